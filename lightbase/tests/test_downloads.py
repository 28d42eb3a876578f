import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from paths import fails
from small import Points

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
    options: Any = {"root": tmp_path, "split": "test"}

    def read(_: int) -> InParts:
        return open_or_download(InParts, tmp_path, "in_parts.npy", **options)

    with ThreadPoolExecutor() as pool:
        opened = list(pool.map(read, range(4)))
    assert InParts.num_downloads == 1
    assert [len(source.data) for source in opened] == [20] * 4


class Opened(BaseDataModule):
    def load(self, split: str) -> Batch:
        options: Any = {"root": self.data_dir, "split": split}
        return open_or_download(InParts, self.data_dir, "in_parts.npy", **options).data


class Fetched(Points):
    def prepare_data(self) -> None:
        with short_download_errors("InParts", self.data_dir, "points.csv there"):
            raise OSError("no network")


# the network, and a stream in an archive that is cut short
@pytest.mark.parametrize(
    ("data", "error", "reason"),
    [
        ("Opened", OSError("no route"), "no route"),
        ("Opened", zlib.error(), "error"),
        ("Fetched", None, "no network"),
    ],
)
def test_a_failed_download_is_two_lines(
    train, tmp_path, capsys, monkeypatch, data, error, reason
):
    monkeypatch.setattr("numpy.save", Mock(side_effect=error))
    flags = ("--data", f"test_downloads.{data}", "--data.data_dir", tmp_path / "data")
    first, second = fails(capsys, 1, lambda: train(*flags)).splitlines()
    place = f"is not in {tmp_path / 'data'}, or damaged"
    assert first == f"error: InParts {place}, and cannot be downloaded: {reason}"
    assert "without a network, put " in second
    assert not (tmp_path / "tiny").exists()
