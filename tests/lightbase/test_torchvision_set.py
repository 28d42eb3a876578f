import threading
import zlib
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import pytest
import torch
from attached import attach, refuse_network
from PIL import Image
from small import Points
from torchvision import datasets

from lightbase import short_download_errors
from lightbase.data.torchvision_set import TorchvisionSet
from lightbase.errors import UserError


class InParts(datasets.VisionDataset):
    """A stand-in for SVHN and its like: `split=`, files that are downloaded, `labels`, no
    `classes`."""

    shape: tuple[int, ...] = (3, 8, 8)
    num_downloads = 0

    def __init__(self, root: Path, split: str, download: bool = False) -> None:
        file = root / "in_parts.npy"
        if download:
            type(self).num_downloads += 1
            np.save(
                file, np.random.default_rng(0).integers(0, 256, (60, *self.shape), dtype=np.uint8)
            )
        if not file.is_file():
            raise RuntimeError("Dataset not found")
        self.data = np.load(file)[: 40 if split == "train" else 20]
        self.labels = np.arange(len(self.data)) % 3

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        return Image.fromarray(self.data[index].transpose(1, 2, 0)), int(self.labels[index])


@pytest.fixture
def in_parts(monkeypatch: pytest.MonkeyPatch) -> type[InParts]:
    monkeypatch.setattr(datasets, "InParts", InParts, raising=False)
    monkeypatch.setattr(datasets, "__all__", (*datasets.__all__, "InParts"))
    monkeypatch.setattr(InParts, "num_downloads", 0)
    return InParts


def test_a_set_with_train_is_read_by_name(mnist_dir: Path) -> None:
    (mnist_dir / "MNIST").rename(mnist_dir / "FashionMNIST")
    options: Any = {"mean": 0.5, "std": 0.5, "random_flip": True, "batch_size": 8}
    data = TorchvisionSet("FashionMNIST", data_dir=str(mnist_dir), **options)
    assert data.classes[0] == "T-shirt/top"
    assert data.image_shape == (1, 28, 28)
    attach(data).setup("test")
    sizes = {name: len(split) for name, split in data.splits.items()}
    assert sizes == {"train": 270, "val": 30, "test": 100}
    images, targets = next(iter(data.test_dataloader()))
    reference = datasets.FashionMNIST(mnist_dir, train=False)
    assert torch.equal(images[:, 0], reference.data[:8])
    assert torch.equal(targets, reference.targets[:8])
    assert data.normalize(images).min() == -1
    assert not torch.equal(data.augment(images), images)


@pytest.mark.parametrize("shape", [(3, 8, 8), (8, 8, 3), (8, 8, 1), (8, 9)])
def test_a_set_with_split_in_any_layout(shape, in_parts, tmp_path, monkeypatch):
    monkeypatch.setattr(in_parts, "shape", shape)
    data = attach(TorchvisionSet("InParts", data_dir=str(tmp_path), batch_size=8), "test")
    assert data.classes == ["0", "1", "2"]
    stored = torch.from_numpy(np.load(tmp_path / "in_parts.npy"))[:20]
    images = data.splits["test"].inputs
    assert images.shape[1:] == data.image_shape
    channels_first = {(3, 8, 8): stored, (8, 9): stored[:, None]}
    expected = channels_first[shape] if shape in channels_first else stored.permute(0, 3, 1, 2)
    assert torch.equal(images, expected)
    assert len(data.splits["test"]) == 20


@pytest.mark.usefixtures("in_parts")
def test_another_shape_is_read_image_by_image_and_resized(tmp_path: Path) -> None:
    options: Any = {"batch_size": 8, "image_shape": (1, 12, 10)}
    data = attach(TorchvisionSet("InParts", data_dir=str(tmp_path), **options))
    images, targets = next(iter(data.val_dataloader()))
    assert images.shape == (4, 1, 12, 10)
    assert images.dtype == torch.uint8
    assert targets.dtype == torch.int64


def test_a_set_without_parts_gets_a_test_set(tmp_path, monkeypatch):
    def init(self: Any) -> None:
        real(self, size=20, image_size=(3, 8, 8), num_classes=4)

    real = datasets.FakeData.__init__
    monkeypatch.setattr(datasets.FakeData, "__init__", init)
    data = TorchvisionSet("FakeData", data_dir=str(tmp_path), val_fraction=0, batch_size=4)
    assert data.image_shape == (3, 64, 64)
    assert data.num_classes == 4
    attach(data)
    (images, _), *_ = data.train_dataloader()
    assert images.shape == (4, 3, 64, 64)
    train, test = (data.splits[split].dataset.indices for split in ("train", "test"))
    assert len(test) == 4
    assert sorted(train + test) == list(range(20))


def test_two_processes_at_once_download_once(in_parts: type[InParts], tmp_path: Path) -> None:
    sets = [TorchvisionSet("InParts", data_dir=str(tmp_path)) for _ in range(4)]
    threads = [threading.Thread(target=data.prepare_data) for data in sets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert in_parts.num_downloads == 1
    assert all(len(data.open("test")) == 20 for data in sets)


def test_an_unknown_name() -> None:
    with pytest.raises(UserError, match="did you mean FashionMNIST"):
        TorchvisionSet("FashionMINST")
    with pytest.raises(UserError, match="CIFAR100"):
        TorchvisionSet("Qwertyuiop")


@pytest.mark.parametrize(("name", "folder"), [("KMNIST", "KMNIST/raw"), ("CIFAR100", "")])
def test_without_a_network_the_message_says_where_files_go(name, folder, tmp_path, monkeypatch):
    refuse_network(monkeypatch)
    with pytest.raises(UserError, match=f"{name} is not in") as caught:
        TorchvisionSet(name, data_dir=str(tmp_path)).prepare_data()
    assert str(tmp_path / folder) in str(caught.value).splitlines()[1]
    assert len(str(caught.value).splitlines()) == 2


def test_a_set_that_needs_more_than_its_name(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"EMNIST cannot be read from .* split"):
        TorchvisionSet("EMNIST", data_dir=str(tmp_path)).prepare_data()


class Fetched(Points):
    error: Exception

    def prepare_data(self) -> None:
        with short_download_errors("Fetched", self.data_dir, f"points.csv into {self.data_dir}"):
            raise self.error


# the network, an archive that is cut short, and a stream in it
@pytest.mark.parametrize("error", [OSError("no route"), BadZipFile("no zip file"), zlib.error()])
def test_a_failed_download_is_two_lines(train, tmp_path, capsys, monkeypatch, error):
    monkeypatch.setattr(Fetched, "error", error, raising=False)
    flags = "--data test_torchvision_set.Fetched --model.net.sizes [10,2] --data.data_dir"
    with pytest.raises(SystemExit) as caught:
        train(flags, tmp_path)
    assert caught.value.code == 1
    first, second = capsys.readouterr().err.splitlines()
    what = f"error: Fetched is not in {tmp_path}, or damaged, and cannot be downloaded: "
    assert first == what + (str(error) or "error")
    assert second.endswith(f"without a network, put points.csv into {tmp_path}")
