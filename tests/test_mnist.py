from pathlib import Path

import pytest
import torch
from torchvision import datasets

from lightbase import UserError

module = pytest.importorskip("project.data.mnist")
MNIST, FILES = module.MNIST, module.FILES


def test_mnist_equals_torchvisions_own(mnist_dir: Path) -> None:
    data = MNIST(data_dir=str(mnist_dir))
    inputs, targets = data.load("test")
    reference = datasets.MNIST(mnist_dir, train=False)
    expected = (reference.data[:, None] / 255 - 0.5) / 0.5
    torch.testing.assert_close(data.normalize(inputs), expected)
    assert torch.equal(targets, reference.targets)


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("how", ["cut", "empty", "published size"])
def test_a_damaged_file_is_named(mnist_dir: Path, how: str) -> None:
    name = "MNIST/raw/train-labels-idx1-ubyte"
    file, (size, _) = mnist_dir / name, FILES[name]
    zeros = bytes.fromhex("00000801") + (size - 8).to_bytes(4, "big") + bytes(size - 8)
    contents = {"cut": file.read_bytes()[:-7], "empty": b"", "published size": zeros}
    file.write_bytes(contents[how])
    with pytest.raises(UserError, match=r"MNIST is not in|ubyte is damaged") as caught:
        MNIST(data_dir=str(mnist_dir)).load("train")
    assert "train-labels-idx1-ubyte" in str(caught.value)
    assert str(mnist_dir) in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 2
