"""Where the tests of the library find things, and what its scripts call."""

import atexit
import importlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


def on_accelerator(config: str) -> str:
    """A copy of tiny.yaml that trains there. Processes that a test starts find it by
    the environment."""
    if "TEST_CONFIG" not in os.environ:
        folder = tempfile.mkdtemp()
        atexit.register(shutil.rmtree, folder)
        copy = Path(folder, "tiny.yaml")
        text = Path(config).read_text()
        copy.write_text(text.replace("accelerator: cpu", f"accelerator: {ACCELERATOR}"))
        os.environ["TEST_CONFIG"] = str(copy)
    return os.environ["TEST_CONFIG"]


HERE = Path(__file__).parent  # a small repository: its package is `example`
TINY = str(HERE / "tiny.yaml")
# Where tests train. TEST_ACCELERATOR=gpu: on a GPU.
ACCELERATOR = os.environ.get("TEST_ACCELERATOR", "cpu")
if ACCELERATOR != "cpu":
    TINY = on_accelerator(TINY)
Train = Callable[..., dict[str, Any]]  # the fixtures `train` and `trained`
Trained = Callable[..., tuple[Path, dict[str, Any]]]


def script(name: str) -> ModuleType:
    """What a file of scripts/ calls."""
    return importlib.import_module(
        "lightbase.core.run" if name == "train" else f"lightbase.commands.{name}"
    )


def argv(*args: object) -> list[str]:
    """The arguments of a command. Flags may share a string: `argv("--a 1 --b", value,
    "--c 2")`.

    Only a string that starts with "--" is split, so a value may contain spaces.
    """
    words: list[str] = []
    for arg in map(str, args):
        words += arg.split() if arg.startswith("--") else [arg]
    return words


def words(line: str) -> list[str]:
    """The arguments of a command line without quotes."""
    return line.split()


def fails(capsys: Any, status: int, run: Callable[[], Any]) -> str:
    """What a script prints that ends with this status: an error of one or two lines."""
    with pytest.raises(SystemExit) as caught:
        run()
    error: str = capsys.readouterr().err.rstrip("\n")
    assert caught.value.code == status, error
    assert 1 <= len(error.splitlines()) <= 2, error
    assert error.startswith("error: ")
    return error
