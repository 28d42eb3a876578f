"""Where the tests of the library find things, and what its scripts call."""

import importlib
from pathlib import Path
from types import ModuleType

HERE = Path(__file__).parent  # a small repository: its package is `example`
REPO = HERE.parents[1]
TINY = str(HERE / "tiny.yaml")


def script(name: str) -> ModuleType:
    """What a file of scripts/ calls."""
    return importlib.import_module(
        "lightbase.run.train" if name == "train" else f"lightbase.tools.{name}"
    )


def words(line: str) -> list[str]:
    """The arguments of a command line without quotes."""
    return line.split()
