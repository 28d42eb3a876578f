"""Calls pytest as if packages were not installed:
`python without_packages.py optuna,timm --collect-only`."""

import sys
from importlib.machinery import PathFinder
from typing import Any

import pytest

find_spec = PathFinder.find_spec


def find_other(cls: Any, name: str, *args: Any) -> Any:
    """Find no module of the packages."""
    if name.partition(".")[0] in PACKAGES:
        return None
    return find_spec(name, *args)


if __name__ == "__main__":
    names, *flags = sys.argv[1:]
    PACKAGES = names.split(",")
    PathFinder.find_spec = classmethod(find_other)  # type: ignore[assignment]
    # its plugin imports the package at the end
    sys.exit(pytest.main([*flags, "-p", "no:hypothesispytest"]))
