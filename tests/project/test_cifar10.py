from pathlib import Path

import pytest
import torch
from attached import attach, refuse_network
from torchvision import datasets
from torchvision.transforms import v2

from lightbase.errors import UserError

CIFAR10 = pytest.importorskip("project.data.cifar10").CIFAR10


def test_cifar10_equals_torchvisions_own_pipeline(cifar10_dir: Path) -> None:
    data = attach(CIFAR10(data_dir=str(cifar10_dir)), "test")
    inputs, targets = next(iter(data.test_dataloader()))
    transform = v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])
    reference = datasets.CIFAR10(cifar10_dir, train=False, transform=transform)
    torch.testing.assert_close(
        data.normalize(inputs), torch.stack([reference[i][0] for i in range(64)])
    )
    assert targets.tolist() == [reference[i][1] for i in range(64)]


def test_cifar10_augments_training_batches_only(cifar10_dir: Path) -> None:
    data = attach(
        CIFAR10(data_dir=str(cifar10_dir), random_crop=4, random_flip=True, val_fraction=0)
    )
    batch = next(iter(data.train_dataloader()))
    data.trainer.training = True
    augmented, _ = data.on_after_batch_transfer(batch, 0)
    data.trainer.validating = True
    plain, _ = data.on_after_batch_transfer(batch, 0)
    assert augmented.shape == plain.shape
    assert not torch.equal(augmented, plain)
    torch.testing.assert_close(plain, batch[0].float() / 255)


@pytest.mark.parametrize("how", ["cut", "empty", "flip"])
def test_a_damaged_file_is_not_trained_on(cifar10_dir, how, monkeypatch):
    refuse_network(monkeypatch)
    file = cifar10_dir / "cifar-10-batches-py" / "data_batch_3"
    content = bytearray(file.read_bytes())
    if how == "flip":
        content[len(content) // 2] ^= 1
    file.write_bytes({"cut": content[:-7], "empty": b"", "flip": content}[how])
    with pytest.raises(
        UserError, match=r"CIFAR10 is not in .*, or damaged, and cannot be downloaded"
    ):
        CIFAR10(data_dir=str(cifar10_dir)).prepare_data()


def test_without_a_network_the_message_says_which_file_goes_where(tmp_path, monkeypatch):
    refuse_network(monkeypatch)
    with pytest.raises(UserError, match=r"cifar-10-python\.tar\.gz") as caught:
        CIFAR10(data_dir=str(tmp_path)).prepare_data()
    assert str(tmp_path) in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 2


def test_a_reflected_edge_is_smaller_than_the_image() -> None:
    CIFAR10(random_crop=31, crop_mode="reflect")
    with pytest.raises(ValueError, match="at most 31"):
        CIFAR10(random_crop=32, crop_mode="reflect")
