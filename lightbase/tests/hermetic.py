"""A test leaves nothing behind. The fixture `leaves_nothing` runs around every test, and
fails with the test that leaves something: a thread or a process that goes on would
disturb a later test, which pytest would then blame."""

import gc
import logging
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

GRACE_S = 10
"""How long the fixture waits for threads and processes that are about to end."""

REPO = Path(__file__).parents[2]

FOLDERS = (REPO, REPO / "lightbase" / "tests")
"""Folders in which a test makes no file, but those whose names begin with . or _."""

STAY = ("programs.py", "multiprocessing.resource_tracker", "compile_worker")
"""Parts of the commands of processes that serve all tests: they fork programs, and are
started once by Python and by torch.compile."""

TQDMS = "tqdm_monitor"
"""The thread that serves all progress bars."""

TORCHS = signal.SIGCHLD
"""The signal for which torch keeps a handler from the first worker of a loader on."""

OF_OTHERS = {
    "CUDA_DEVICE_ORDER",
    "KMP_DUPLICATE_LIB_OK",
    "KMP_INIT_AT_FORK",
    "PL_GLOBAL_SEED",
    "PL_SEED_WORKERS",
    "PYTORCH_NVML_BASED_CUDA_CHECK",
    "CUBLAS_WORKSPACE_CONFIG",
    "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR",
}
"""Variables that scikit-learn sets when it is imported, torch.compile, and Lightning in
each training, for processes that it starts and for CUDA."""

KEPT = ("wandb-", "torchinductor_", ".ses", "pytest-of-", "programs")
"""In the names of temporary files that W&B removes at the end of the process, of what
torch.compile and onnxruntime keep, and of processes that keep files (ranks.py)."""


@pytest.fixture(scope="session", autouse=True)
def temporary_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Temporary files of this process have a folder of their own: with pytest-xdist,
    other processes run tests meanwhile."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(tmp_path_factory.mktemp("temporary")))
        patch.setattr(tempfile, "tempdir", None)
        yield


@pytest.fixture(autouse=True)
def leaves_nothing(temporary_folder: None) -> Iterator[None]:
    before, threads = state(), {*threading.enumerate()}
    yield
    left = []
    for thread in {*threading.enumerate()} - threads:
        if thread.name != TQDMS and thread not in compile_threads():
            thread.join(GRACE_S)
            if thread.is_alive():
                left.append(f"the thread {thread.name}")
    deadline = time.monotonic() + GRACE_S
    while processes() - before["processes"] and time.monotonic() < deadline:
        time.sleep(0.05)
    after = state()
    if after != before:
        gc.collect()  # what nobody uses any more closes its files
        after = state()
    for name in before:
        if after[name] != before[name]:
            left.append(f"{name}: {difference(before[name], after[name])}")
    assert not left, f"this test leaves behind: {'; '.join(left)}"


def compile_threads() -> set[threading.Thread]:
    """Return the threads with which torch.compile serves all tests."""
    compiler: Any = sys.modules.get("torch._inductor.async_compile")
    if not compiler:
        return set()
    return {*compiler.AsyncCompile.pool()._threads}


def state() -> dict[str, Any]:
    """Return what a test must not change, by name."""
    torch = sys.modules.get("torch")
    values = {
        "processes": processes(),
        "signal handlers": {
            number.name: signal.getsignal(number)
            for number in signal.Signals
            if number != TORCHS
        },
        "working folder": {str(Path.cwd())},
        "environment": {
            name: value
            for name, value in os.environ.items()
            if name not in {"PYTEST_CURRENT_TEST", *OF_OTHERS}
        },
        "logging handlers": {*logging.getLogger().handlers},
        "temporary files": {
            file.name
            for file in Path(tempfile.gettempdir()).iterdir()
            if not any(part in file.name for part in KEPT)
        },
        "files": {str(file) for folder in FOLDERS for file in folder.glob("[!._]*")},
        "open files": open_files(),
    }
    if torch:
        values["settings of torch"] = {
            "default dtype": torch.get_default_dtype(),
            "threads": torch.get_num_threads(),
            "gradients": torch.is_grad_enabled(),
            "process group": torch.distributed.is_initialized(),
        }
    return values


def processes() -> set[str]:
    """Return the processes that this one has started, "PID COMMAND"."""
    found = set()
    for file in Path("/proc/self/task").glob("*/children"):
        for pid in file.read_text().split():
            try:
                command = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
            except OSError:
                continue
            # that of a process that has ended is empty
            if command and not any(part in command for part in STAY):
                found.add(f"{pid} {command}")
    return found


def open_files() -> set[str]:
    """Return the open files below the folders of the tests."""
    root = Path(tempfile.gettempdir()).parent
    found = set()
    for number in Path("/proc/self/fd").glob("*"):
        try:
            file = number.readlink()
        except OSError:
            continue
        if file.is_relative_to(root):
            found.add(str(file))
    return found


def difference(before: Any, after: Any) -> str:
    if isinstance(before, dict):
        before, after = ({*map(str, values.items())} for values in (before, after))
    return ", ".join(sorted(str(x)[:200] for x in before ^ after))
