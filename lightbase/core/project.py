"""The user's repository: its folders, its package, and which files are the user's."""

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Project:
    """The user's repository. Each script sets it, see
    `lightbase.commands.script.starting`.

    root: Its folder; without a script, the folder that holds lightbase/.
    default_model: Import path of the LightningModule that trains where a command names
        none.
    """

    root: Path = Path(__file__).parents[2]
    default_model: str = ""

    @property
    def package(self) -> str:
        """The name of the user's package, which `scripts/rename.py` changes."""
        return self.default_model.partition(".")[0]

    @property
    def logs(self) -> Path:
        return (self.root / "logs").resolve()

    @property
    def data(self) -> Path:
        return self.root / "data"

    @property
    def configs(self) -> Path:
        return self.root / "configs"

    @property
    def default_config(self) -> Path | None:
        """What `python scripts/train.py` trains; None if the user has deleted it."""
        file = self.configs / "default.yaml"
        return file if file.is_file() else None


PROJECT = Project()


def is_own(path: Path, root: str | None = None) -> bool:
    """Return whether a file is the user's: it lies in the repository's logs/, or below
    the folder of runs that the command names. Symbolic links are resolved.

    root: The value of --trainer.default_root_dir.
    """
    # realpath, unlike Path.resolve, takes links in a circle
    real = Path(os.path.realpath(path))
    folders = [PROJECT.logs]
    if root:
        folders.append(Path(root))
    return any(real.is_relative_to(os.path.realpath(folder)) for folder in folders)
