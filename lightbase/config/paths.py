"""The user's repository: its folders, its package, and which files are the user's.

`PROJECT` is the repository of this process.
"""

import os
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Project:
    """The user's repository.

    default_model: The import path of the LightningModule that a command trains if it
        names none.
    """

    root: Path
    default_model: str

    @property
    def package(self) -> str:
        """The name of the user's package."""
        return self.default_model.partition(".")[0]

    @property
    def logs(self) -> Path:
        """The default folder of all runs, without symbolic links."""
        return (self.root / "logs").resolve()

    @property
    def data(self) -> Path:
        """The default folder of data sets."""
        return self.root / "data"

    @property
    def configs(self) -> Path:
        return self.root / "configs"

    @property
    def default_config(self) -> Path:
        """The config file that `python scripts/train.py` trains. It may be missing."""
        return self.configs / "default.yaml"

    def found(self, path: str) -> Path:
        """Return the path of a file or folder. A relative path starts at the working
        folder, or at the repository if only the repository has such a file."""
        if (self.root / path).exists() and not Path(path).exists():
            return self.root / path
        return Path(path)


def find_project(script: str) -> Project:
    """Return the repository: the nearest folder above the script whose pyproject.toml
    has a table [tool.lightbase] with `default_model`. For other scripts and notebooks
    it is the folder that holds lightbase/."""
    home = Path(__file__).parents[2]
    for root in (*Path(script).resolve().parents, home):
        file = root / "pyproject.toml"
        if file.is_file():
            tools = tomllib.loads(file.read_text("utf-8")).get("tool", {})
            if "lightbase" in tools:
                return Project(root, tools["lightbase"]["default_model"])
    return Project(home, "")


PROJECT = find_project(sys.argv[0])


def is_own(path: Path, root: str | None = None) -> bool:
    """Return whether a file is the user's, so that classes which it names may be run:
    it lies in the repository's logs/, or below `root`, the value of
    --trainer.default_root_dir, after symbolic links are resolved."""
    # realpath, unlike Path.resolve, takes links in a circle
    real = Path(os.path.realpath(path))
    folders = [PROJECT.logs]
    if root:
        folders.append(Path(root))
    return any(real.is_relative_to(os.path.realpath(folder)) for folder in folders)
