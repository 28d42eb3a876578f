import threading
import zlib
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import pytest
from small import Points
from torchvision import datasets

from lightbase import BaseDataModule, Batch, open_or_download, short_download_errors


class InParts:
    """A stand-in for a class of torchvision.datasets."""

    num_downloads = 0

    def __init__(self, root: Path, split: str, download: bool = False) -> None:
        file = root / "in_parts.npy"
        if download:
            InParts.num_downloads += 1
            np.save(file, np.arange(60))
        if not file.is_file():
            raise RuntimeError("Dataset not found")
        self.data = np.load(file)[: 40 if split == "train" else 20]


def test_several_processes_at_once_download_once(tmp_path: Path) -> None:
    opened: list[InParts] = []

    def read() -> None:
        options: Any = {"root": tmp_path, "split": "test"}
        opened.append(open_or_download(InParts, tmp_path, "in_parts.npy", **options))

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert InParts.num_downloads == 1
    assert [len(source.data) for source in opened] == [20] * 4


class Fashion(BaseDataModule):
    """As docs/extending.md has it."""

    classes = datasets.FashionMNIST.classes
    image_shape = (1, 28, 28)

    def load(self, split: str) -> Batch:
        files = f"its files into {self.data_dir}/FashionMNIST/raw"
        options = {"root": self.data_dir, "train": split == "train"}
        source = open_or_download(datasets.FashionMNIST, self.data_dir, files, **options)
        return source.data[:, None], source.targets


class Fetched(Points):
    def prepare_data(self) -> None:
        with short_download_errors("Fetched", self.data_dir, f"points.csv into {self.data_dir}"):
            raise OSError("no network")


# the network, an archive that is cut short, and a stream in it
@pytest.mark.parametrize(
    ("data", "error"),
    [
        ("Fashion", OSError("no route")),
        ("Fashion", BadZipFile("no zip file")),
        ("Fashion", zlib.error()),
        ("Fetched", OSError("no network")),
    ],
)
def test_a_failed_download_is_two_lines(train, tmp_path, capsys, monkeypatch, data, error):
    def init(self: Any, root: Path, train: bool, download: bool = False) -> None:
        raise error if download else RuntimeError("Dataset not found")

    monkeypatch.setattr(datasets.FashionMNIST, "__init__", init)
    with pytest.raises(SystemExit) as caught:
        train("--data", f"test_downloads.{data}", "--data.data_dir", tmp_path / "data")
    assert caught.value.code == 1
    first, second = capsys.readouterr().err.splitlines()
    reason = str(error) or "error"
    name = data if data == "Fetched" else "FashionMNIST"
    what = f"{name} is not in {tmp_path / 'data'}, or damaged, and cannot be downloaded: {reason}"
    assert first == f"error: {what}"
    assert "without a network, put " in second
    assert not (tmp_path / "tiny").exists()


@pytest.mark.parametrize(
    "path", ["lightbase.TorchvisionSet", "example.data.torchvision_set.TorchvisionSet"]
)
def test_a_class_of_an_earlier_version_that_is_gone(train, capsys, path):
    with pytest.raises(SystemExit):
        train("--data", path, "--data.dataset", "FashionMNIST")
    error = capsys.readouterr().err
    assert path in error
    assert len(error.splitlines()) <= 2
