import pickle
from pathlib import Path

import pytest
import torch
from torchvision import datasets
from torchvision.transforms.functional import to_tensor

from lightbase import UserError

CIFAR10 = pytest.importorskip("project.data.cifar10").CIFAR10


def test_cifar10_equals_torchvisions_own(cifar10_dir: Path) -> None:
    data = CIFAR10(data_dir=str(cifar10_dir))
    inputs, targets = data.load("test")
    reference = datasets.CIFAR10(cifar10_dir, train=False)
    for image, expected in zip(data.normalize(inputs), reference.data, strict=True):
        torch.testing.assert_close(image, to_tensor(expected))
    assert targets.tolist() == reference.targets


@pytest.mark.usefixtures("offline")
def test_a_damaged_file_is_not_read(cifar10_dir):
    file = cifar10_dir / "cifar-10-batches-py" / "data_batch_3"
    file.write_bytes(pickle.dumps("not the published file"))
    with pytest.raises(UserError, match=r"CIFAR10 is not in .*, or damaged, and can"):
        CIFAR10(data_dir=str(cifar10_dir)).load("train")
