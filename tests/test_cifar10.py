import pickle
from pathlib import Path

import pytest
import torch
from torchvision import datasets
from torchvision.transforms import v2

from lightbase import UserError

CIFAR10 = pytest.importorskip("project.data.cifar10").CIFAR10


def test_cifar10_equals_torchvisions_own_pipeline(cifar10_dir: Path) -> None:
    data = CIFAR10(data_dir=str(cifar10_dir))
    inputs, targets = data.load("test")
    transform = v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])
    reference = datasets.CIFAR10(cifar10_dir, train=False, transform=transform)
    expected, labels = zip(*reference, strict=True)
    torch.testing.assert_close(data.normalize(inputs), torch.stack(expected))
    assert targets.tolist() == list(labels)


class RunsCode:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return open, ("run", "w")


@pytest.mark.usefixtures("offline")
def test_a_damaged_or_foreign_file_is_not_read(cifar10_dir, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = cifar10_dir / "cifar-10-batches-py" / "data_batch_3"
    content = pickle.dumps(RunsCode())
    file.write_bytes(content)
    with pytest.raises(UserError, match=r"CIFAR10 is not in .*, or damaged, and can"):
        CIFAR10(data_dir=str(cifar10_dir)).load("train")
    assert file.read_bytes() == content
    assert not Path("run").exists()
