"""What several test files share: generated data in the layout of the real sets."""

import hashlib
import os
import pickle
import struct
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: tests share the cores

import pytest
from pages import REPO

from lightbase.folder import PROJECT


@pytest.fixture(autouse=True)
def repository(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a script in scripts/."""
    monkeypatch.setattr(PROJECT, "root", REPO)
    monkeypatch.setattr(PROJECT, "default_model", "project.classifier.Classifier")


@pytest.fixture
def mnist_dir(tmp_path: Path) -> Path:
    """MNIST's four files, with 300 training and 100 test images of noise."""
    import numpy as np

    folder = tmp_path / "data" / "MNIST" / "raw"
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for prefix, num in (("train", 300), ("t10k", 100)):
        images = rng.integers(0, 256, (num, 28, 28), dtype=np.uint8)
        labels = rng.integers(0, 10, num, dtype=np.uint8)
        (folder / f"{prefix}-images-idx3-ubyte").write_bytes(
            struct.pack(">4i", 0x803, num, 28, 28) + images.tobytes()
        )
        (folder / f"{prefix}-labels-idx1-ubyte").write_bytes(
            struct.pack(">2i", 0x801, num) + labels.tobytes()
        )
    return tmp_path / "data"


@pytest.fixture
def cifar10_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """CIFAR-10's files, with 5 x 60 training and 100 test images of noise, and torchvision told
    their checksums."""
    import numpy as np
    from torchvision import datasets

    folder = tmp_path / "data" / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)

    def write(name: str, content: dict[str, Any]) -> list[str]:
        blob = pickle.dumps(content, protocol=2)
        (folder / name).write_bytes(blob)
        return [name, hashlib.md5(blob).hexdigest()]

    def batch(num: int) -> dict[str, Any]:
        images = rng.integers(0, 256, (num, 3072), dtype=np.uint8)
        return {"data": images, "labels": rng.integers(0, 10, num).tolist()}

    cifar10 = datasets.CIFAR10
    monkeypatch.setattr(
        cifar10, "train_list", [write(f"data_batch_{i}", batch(60)) for i in range(1, 6)]
    )
    monkeypatch.setattr(cifar10, "test_list", [write("test_batch", batch(100))])
    _, md5 = write("batches.meta", {"label_names": [str(i) for i in range(10)]})
    monkeypatch.setattr(
        cifar10, "meta", {"filename": "batches.meta", "key": "label_names", "md5": md5}
    )
    return tmp_path / "data"
