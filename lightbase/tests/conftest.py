"""What several test files share: a tiny run, and generated data in the files of the
real sets."""

import functools
import gc
import importlib
import os
import signal
import sys

# before torch is imported: tests that run side by side share the cores
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from generated import cifar10_dir, mnist_dir, offline  # noqa: F401  # fixtures
from hermetic import leaves_nothing, temporary_folder  # noqa: F401  # fixtures
from paths import HERE, TINY, argv, script

from lightbase.config.paths import PROJECT

OWN_PROCESSES = ("test_upgrade", "test_tour", "test_copies")
# a script's background and nohup ignore them, and what they start would
signal.signal(signal.SIGINT, signal.default_int_handler)
if sys.platform == "win32":  # which lacks these; tests that send them are skipped there
    signal.SIGHUP = signal.SIGKILL = signal.SIGTERM
else:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
os.fsync = lambda _: None  # 5 ms each, against a power cut, which no test makes


@pytest.fixture(autouse=True)
def repository(monkeypatch, tmp_path_factory):
    """The user's repository is this folder, as for a script in lightbase/tests/scripts.
    The user's runs are in the temporary folders of the tests."""
    monkeypatch.setattr(PROJECT, "root", HERE)
    monkeypatch.setattr(
        "lightbase.config.paths.Project.logs", tmp_path_factory.getbasetemp().resolve()
    )
    monkeypatch.setattr(PROJECT, "default_model", "example.classifier.Classifier")


def pytest_configure(config):
    # pytest-xdist's first process only hands out tests. It need not wait for imports
    if getattr(config.option, "numprocesses", None):
        return
    # before pytest handles logs, or Lightning would not
    importlib.import_module("lightbase.commands.train")

    # TensorBoard reads event files of one second in the order of their names, which end
    # with this number: 10 before 9
    event_file_writer = importlib.import_module(
        "tensorboard.summary.writer.event_file_writer"
    )
    event_file_writer._global_uid = event_file_writer.AtomicCounter(1000)


def pytest_collection_modifyitems(items):
    import torch

    # Pages define classes in modules of a temporary folder. jsonargparse still finds
    # these classes when the modules are gone, so the tests of pages come last. Those
    # that start processes are long, and come first: no worker waits for one at the end.
    items.sort(key=lambda item: "template" in item.path.parts)
    items.sort(key=lambda item: item.path.stem not in OWN_PROCESSES)
    there = {"gpu": torch.cuda.is_available(), "linux": sys.platform == "linux"}
    for item in items:
        for mark, is_there in there.items():
            if mark in item.keywords and not is_there:
                item.add_marker(pytest.mark.skip(reason=f"no {mark}"))


def pytest_collection_finish():
    # what has been imported stays: looking through all of it takes a second each time
    gc.freeze()


def pytest_unconfigure():
    gc.unfreeze()  # triton, where it is, misses at the end what was not let go


@pytest.fixture
def train(tmp_path):
    """Return a function that calls train.py in this process, on tiny.yaml or another
    config. Its logs are in tmp_path."""

    def run(*args, config=TINY):
        root = ("--trainer.default_root_dir", tmp_path)
        return script("train").main(argv("--config", config, *root, *args))

    return run


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """Return a function that trains tiny.yaml once for the same flags. It returns the
    folder of the run, which no test changes, and the metrics."""

    @functools.cache
    def run(*flags):
        root = tmp_path_factory.mktemp("trained")
        place = ["--config", TINY, "--trainer.default_root_dir", str(root)]
        metrics = script("train").main([*place, *flags])
        (folder,) = root.glob("*/version_0")
        return folder, metrics

    return lambda *args: run(*argv(*args))
