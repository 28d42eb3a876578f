import threading
import zlib
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import pytest
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


class Opened(BaseDataModule):
    def load(self, split: str) -> Batch:
        options: Any = {"root": self.data_dir, "split": split}
        return open_or_download(InParts, self.data_dir, "in_parts.npy", **options).data


class Fetched(Points):
    def prepare_data(self) -> None:
        with short_download_errors(
            "Fetched", self.data_dir, f"points.csv into {self.data_dir}"
        ):
            raise OSError("no network")


# the network, an archive that is cut short, and a stream in it
@pytest.mark.parametrize(
    ("data", "error"),
    [
        ("Opened", OSError("no route")),
        ("Opened", BadZipFile("no zip file")),
        ("Opened", zlib.error()),
        ("Fetched", OSError("no network")),
    ],
)
def test_a_failed_download_is_two_lines(
    train, tmp_path, capsys, monkeypatch, data, error
):
    def init(self: Any, root: Path, split: str, download: bool = False) -> None:
        raise error if download else RuntimeError("Dataset not found")

    monkeypatch.setattr(InParts, "__init__", init)
    with pytest.raises(SystemExit) as caught:
        train("--data", f"test_downloads.{data}", "--data.data_dir", tmp_path / "data")
    assert caught.value.code == 1
    first, second = capsys.readouterr().err.splitlines()
    reason = str(error) or "error"
    name = data if data == "Fetched" else "InParts"
    place = f"is not in {tmp_path / 'data'}, or damaged"
    assert first == f"error: {name} {place}, and cannot be downloaded: {reason}"
    assert "without a network, put " in second
    assert not (tmp_path / "tiny").exists()
