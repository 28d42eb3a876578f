"""What several test files share: a tiny run, and generated data in the layout of the real sets."""

import gc
import hashlib
import importlib
import os
import pickle
import signal
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: tests share the cores

import pytest
from paths import HERE, TINY, argv

from lightbase.folder import PROJECT

# a script's background and nohup ignore them, and what they start would
signal.signal(signal.SIGINT, signal.default_int_handler)
if sys.platform == "win32":  # which lacks these; tests that send them are skipped there
    signal.SIGHUP = signal.SIGKILL = signal.SIGTERM
else:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
PROJECT.default_model = "example.classifier.Classifier"
os.fsync = lambda _: None  # 5 ms each, against a power cut, which no test makes


@pytest.fixture(autouse=True)
def example(monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's repository is this folder, as for a script in tests/lightbase/scripts."""
    monkeypatch.setattr(PROJECT, "root", HERE)
    monkeypatch.setattr(PROJECT, "default_model", "example.classifier.Classifier")


def pytest_configure(config: pytest.Config) -> None:
    if getattr(config.option, "numprocesses", None):
        # pytest-xdist's first process only hands out tests: it need not wait for the imports
        return
    import lightbase.run.train  # noqa: F401  # before pytest handles logs, or Lightning would not

    # TensorBoard reads event files of one second in the order of their names, which end with this
    # number: 10 before 9
    event_file_writer = importlib.import_module("tensorboard.summary.writer.event_file_writer")
    event_file_writer._global_uid = event_file_writer.AtomicCounter(1000)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch

    missing = {"gpu": not torch.cuda.is_available(), "linux": sys.platform != "linux"}
    for item in items:
        for mark in missing:
            if missing[mark] and mark in item.keywords:
                item.add_marker(pytest.mark.skip(reason=f"no {mark}"))


def pytest_collection_finish() -> None:
    gc.freeze()  # what has been imported stays: looking through all of it takes a second each time


def pytest_unconfigure() -> None:
    gc.unfreeze()  # triton, where it is, misses at the end what was not let go


@pytest.fixture
def train(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Runs train.py in this process on tests/tiny.yaml, unless told another config, with its logs
    in tmp_path."""
    from lightbase.run.train import main

    def run(*args: object, config: str = TINY) -> dict[str, Any]:
        return main(argv("--config", config, "--trainer.default_root_dir", tmp_path, *args))

    return run


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, dict[str, Any]]]:
    """As `train`, once for the same flags: the folder of the run, which no test changes, and its
    metrics."""
    from lightbase.run.train import main

    runs: dict[tuple[str, ...], tuple[Path, dict[str, Any]]] = {}

    def run(*args: object) -> tuple[Path, dict[str, Any]]:
        flags = tuple(argv(*args))
        if flags not in runs:
            root = tmp_path_factory.mktemp("trained")
            metrics = main(argv("--config", TINY, "--trainer.default_root_dir", root, *flags))
            (folder,) = root.glob("*/version_0")
            runs[flags] = folder, metrics
        return runs[flags]

    return run


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
