"""Fixtures of the user's tests and of the library's: noise in the files of MNIST and
CIFAR-10, and no network. Nothing is downloaded in a test."""

import hashlib
import pickle
import struct
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def mnist_dir(tmp_path: Path) -> Path:
    """Return a folder with MNIST's files: 300 training and 100 test images."""
    import numpy as np

    folder = tmp_path / "data" / "MNIST" / "raw"
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for prefix, num in (("train", 300), ("t10k", 100)):
        images = rng.integers(0, 256, (num, 28, 28), dtype=np.uint8).tobytes()
        labels = rng.integers(0, 10, num, dtype=np.uint8).tobytes()
        header = struct.pack(">4i", 0x803, num, 28, 28)
        (folder / f"{prefix}-images-idx3-ubyte").write_bytes(header + images)
        header = struct.pack(">2i", 0x801, num)
        (folder / f"{prefix}-labels-idx1-ubyte").write_bytes(header + labels)
    return tmp_path / "data"


@pytest.fixture
def cifar10_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with CIFAR-10's files: 5 x 60 training and 100 test images.
    torchvision gets their checksums."""
    import numpy as np
    from torchvision.datasets import CIFAR10

    folder = tmp_path / "data" / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    names = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch", "batches.meta"]
    files = []
    for name, num in zip(names, [60] * 5 + [100, 0], strict=True):
        images = rng.integers(0, 256, (num, 3072), dtype=np.uint8)
        content = {"data": images, "labels": rng.integers(0, 10, num).tolist()}
        content["label_names"] = [str(i) for i in range(10)]
        data = pickle.dumps(content)
        (folder / name).write_bytes(data)
        files.append([name, hashlib.md5(data).hexdigest()])
    monkeypatch.setattr(CIFAR10, "train_list", files[:5])
    monkeypatch.setattr(CIFAR10, "test_list", files[5:6])
    monkeypatch.setitem(CIFAR10.meta, "md5", files[6][1])
    return tmp_path / "data"


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a test fail at once if it wants to download something."""

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError("no network in tests")

    monkeypatch.setattr("socket.socket.connect", refuse)
    monkeypatch.setattr("socket.getaddrinfo", refuse)
