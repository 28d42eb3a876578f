import pytest
import torch
from attached import attach, refuse_network
from torchvision import datasets
from torchvision.transforms import v2

from lightbase.errors import UserError

CIFAR10 = pytest.importorskip("project.data.cifar10").CIFAR10


def test_cifar10_equals_torchvisions_own_pipeline(cifar10_dir):
    data = attach(CIFAR10(data_dir=str(cifar10_dir)), "test")
    inputs, targets = next(iter(data.test_dataloader()))
    transform = v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])
    reference = datasets.CIFAR10(cifar10_dir, train=False, transform=transform)
    torch.testing.assert_close(
        data.normalize(inputs), torch.stack([reference[i][0] for i in range(64)])
    )
    assert targets.tolist() == [reference[i][1] for i in range(64)]


@pytest.mark.parametrize("how", ["cut", "altered", "empty"])
def test_a_damaged_or_foreign_file_is_named_and_not_written_over(cifar10_dir, how, monkeypatch):
    refuse_network(monkeypatch)
    file = cifar10_dir / "cifar-10-batches-py" / "data_batch_3"
    before = file.read_bytes()
    content = {"cut": before[:-7], "altered": before[:-1] + b"x"}.get(how, b"")
    file.write_bytes(content)
    with pytest.raises(UserError, match=f"{file} is damaged or packed anew: move it away"):
        CIFAR10(data_dir=str(cifar10_dir)).prepare_data()
    assert file.read_bytes() == content


def test_missing_files_are_downloaded(cifar10_dir, monkeypatch):
    refuse_network(monkeypatch)
    (cifar10_dir / "cifar-10-batches-py" / "data_batch_3").unlink()
    data = CIFAR10(data_dir=str(cifar10_dir))
    data.prepare_data()
    with pytest.raises(UserError, match=r"CIFAR10 is not in .*, or damaged, and cannot be"):
        data.load("train")
