"""What --version prints, which needs none of the seconds of imports."""

import importlib.metadata
import platform
import tomllib
from pathlib import Path


def versions() -> str:
    """One line. The project's own is read where it is edited: an installation's metadata is that of
    its day."""
    text = Path(__file__).parents[2].joinpath("pyproject.toml").read_text(encoding="utf-8")
    own = tomllib.loads(text)["project"]
    packages = [f"{name} {importlib.metadata.version(name)}" for name in ("torch", "lightning")]
    return ", ".join(
        [f"{own['name']} {own['version']}", *packages, f"Python {platform.python_version()}"]
    )
