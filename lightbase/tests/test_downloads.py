import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
from written import refused

from lightbase import BaseDataModule, open_or_download


class Source:
    """A stand-in for a class of torchvision.datasets."""

    num_downloads = 0

    def __init__(self, root: Path, download: bool = False) -> None:
        if download and not (root / "x.npy").exists():
            Source.num_downloads += 1
            np.save(root / "x.npy", np.arange(20))
        self.data = np.load(root / "x.npy")


def opened(folder: Path) -> Any:
    return open_or_download(Source, folder, "x.npy there", root=folder).data


def test_several_processes_at_once_download_once(tmp_path: Path) -> None:
    with ThreadPoolExecutor() as pool:
        arrays = list(pool.map(opened, [tmp_path] * 4))
    assert Source.num_downloads == 1
    assert [len(array) for array in arrays] == [20] * 4


class Opened(BaseDataModule):
    def load(self, split: str) -> Any:
        return opened(self.data_dir)


# the network, and a stream in an archive that is cut short
def test_a_failed_download_is_two_lines(train, tmp_path, capsys, monkeypatch):
    # such as of a stream in an archive that is cut short
    monkeypatch.setattr("numpy.save", Mock(side_effect=zlib.error()))
    folder = tmp_path / "data"
    flags = ("--data test_downloads.Opened", "--data.data_dir", folder)
    first, second = refused(capsys, tmp_path, lambda: train(*flags), 1).splitlines()
    problem = f"Source is not in {folder}, or damaged, and cannot be downloaded: "
    assert first == f"error: {problem}error"
    assert second.endswith("without a network, put x.npy there")
