from pathlib import Path

import pytest
import torch
from torchvision import datasets

from lightbase import UserError

module = pytest.importorskip("project.data.mnist")
MNIST, FILES = module.MNIST, module.FILES
LABELS = "MNIST/raw/train-labels-idx1-ubyte"


def test_mnist_equals_torchvisions_own(mnist_dir: Path) -> None:
    data = MNIST(data_dir=str(mnist_dir))
    inputs, targets = data.load("test")
    reference = datasets.MNIST(mnist_dir, train=False)
    expected = (reference.data[:, None] / 255 - 0.5) / 0.5
    torch.testing.assert_close(data.normalize(inputs), expected)
    assert torch.equal(targets, reference.targets)


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize(
    "size", [0, 100, FILES["MNIST/raw/train-labels-idx1-ubyte"][0]]
)
def test_a_damaged_file_is_named(mnist_dir: Path, size: int) -> None:
    (mnist_dir / LABELS).write_bytes(bytes(size))
    with pytest.raises(UserError, match="train-labels-idx1-ubyte") as caught:
        MNIST(data_dir=str(mnist_dir)).load("train")
    assert str(mnist_dir) in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 2
