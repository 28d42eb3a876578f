"""Where the tests of the library find things, and what its scripts call."""

import atexit
import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightbase.commands.script import run_command

HERE = Path(__file__).parent  # a small repository: its package is `example`
TINY = str(HERE / "tiny.yaml")
# Where tests train. TEST_ACCELERATOR=gpu: on a GPU.
ACCELERATOR = os.environ.get("TEST_ACCELERATOR", "cpu")
Train = Callable[..., dict[str, Any]]  # the fixtures `train` and `trained`
Trained = Callable[..., tuple[Path, dict[str, Any]]]


def on_accelerator() -> str:
    """Return the path of a copy of tiny.yaml that trains on ACCELERATOR. Processes that
    a test starts find it by the environment."""
    if "TEST_CONFIG" not in os.environ:
        folder = tempfile.mkdtemp()
        atexit.register(shutil.rmtree, folder)
        copy = Path(folder, "tiny.yaml")
        text = (HERE / "tiny.yaml").read_text()
        copy.write_text(text.replace("accelerator: cpu", f"accelerator: {ACCELERATOR}"))
        os.environ["TEST_CONFIG"] = str(copy)
    return os.environ["TEST_CONFIG"]


if ACCELERATOR != "cpu":
    TINY = on_accelerator()


def script(name: str) -> SimpleNamespace:
    """Return a namespace whose `main` takes the arguments of a file of scripts/, and
    does what this file does. Skip the test if it is sweep.py and Optuna is missing."""
    if name == "sweep":
        pytest.importorskip("optuna")
    room = "compare" if name in ("runs", "sweep") else "commands"
    return SimpleNamespace(main=partial(run_command, f"{room}.{name}"))


def argv(*args: object) -> list[str]:
    """Return the arguments of a command. Flags may share a string: `argv("--a 1 --b",
    value, "--c 2")`.

    Only a string that starts with "--" is split, so a value may contain spaces.
    """
    words = []
    for arg in map(str, args):
        if arg.startswith("--"):
            words += arg.split()
        else:
            words.append(arg)
    return words


def fails(capsys: Any, status: int, run: Callable[[], Any]) -> str:
    """Return the error that a script prints: two lines, or up to six with the user's
    line and notes. It ends with this status."""
    with pytest.raises(SystemExit) as caught:
        run()
    error: str = capsys.readouterr().err.rstrip("\n")
    assert caught.value.code == status, error
    assert 1 <= len(error.splitlines()) <= 6, error
    assert error.startswith("error: ")
    return error


@contextlib.contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Let a test fail if this block takes longer."""

    def stop(*_: Any) -> None:
        pytest.fail(f"hangs for {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    # again and again: the first failure may be caught
    signal.setitimer(signal.ITIMER_REAL, seconds, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
