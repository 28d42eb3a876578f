"""The folder of a run, `ROOT/NAME/version_N`, and what is written into it beside the event files."""

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from project.base.errors import UserError
from project.engine.script import write_whole

LOGS = Path(__file__).parents[2] / "logs"


class Run:
    """One run's folder, held against other processes until `close`.

    folder: ROOT/NAME/version_N. A new one is made where none is given, with the next free N.
    """

    def __init__(self, root: Path, name: str, folder: Path | None = None) -> None:
        self.root = root
        self.is_new = folder is None
        try:
            self.folder = folder or _make_version(root / name)
            self.lock = FileLock(self.folder / ".lock", blocking=False)
            self.lock.acquire()
        except Timeout as error:
            raise UserError(f"{folder} is in use: another process trains there; wait for it or stop it") from error
        except OSError as error:
            raise UserError(
                f"trainer.default_root_dir {root} cannot be written: {error.strerror}: {error.filename}\n"
                "give another folder"
            ) from error

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    def close(self) -> None:
        self.lock.release()
        (self.folder / ".lock").unlink(missing_ok=True)

    def __getstate__(self) -> dict[str, Any]:
        # for ddp_spawn: the lock stays with the process that started the run
        return {"root": self.root, "folder": self.folder, "is_new": self.is_new}

    def discard(self) -> None:
        """Remove a folder in which nothing has happened, and those above it that are empty then, up to ROOT."""
        self.close()
        shutil.rmtree(self.folder)
        for parent in self.folder.parents:
            if parent == self.root or any(parent.iterdir()):
                break
            parent.rmdir()

    def write(self, name: str, text: str) -> None:
        """Write a small file whole or not at all."""
        write_whole(self.folder / name, text)

    def write_metrics(self, values: dict[str, Any]) -> None:
        self.write("metrics.json", json_text(values, indent=2) + "\n")


def json_text(values: dict[str, Any], indent: int | None = None) -> str:
    """JSON, which has no NaN and no infinity: null in their place."""
    known = {
        key: value if not isinstance(value, float) or math.isfinite(value) else None for key, value in values.items()
    }
    return json.dumps(known, indent=indent, allow_nan=False)


def _make_version(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    versions = [int(path.name.removeprefix("version_")) for path in run_folders(folder)]
    number = max(versions, default=-1) + 1
    while True:
        version = folder / f"version_{number}"
        try:
            version.mkdir()  # fails if another run has just made it
        except FileExistsError:
            number += 1
        else:
            return version


def run_folders(folder: Path) -> list[Path]:
    """The folders version_N below ROOT/NAME, oldest first."""
    found = [path for path in folder.glob("version_*") if re.fullmatch(r"version_\d+", path.name)]
    return sorted(found, key=lambda path: int(path.name.removeprefix("version_")))


def find_checkpoint(ckpt_path: str, root: Path, name: str) -> Path:
    """The file meant by --ckpt_path: a path, or `last` or `best` of the newest run in ROOT/NAME that has one."""
    if ckpt_path not in ("last", "best"):
        return Path(ckpt_path)
    for folder in reversed(run_folders(root / name)):
        path = folder / "checkpoints" / f"{ckpt_path}.ckpt"
        if path.is_file():
            return path
    raise UserError(f"ckpt_path {ckpt_path}: no run in {root / name} has one; leave --ckpt_path out to start a run")


def folder_to_continue(checkpoint: Path, root: Path, name: str) -> Path | None:
    """The run folder below ROOT/NAME whose last.ckpt this is. From any other checkpoint a new run starts."""
    folder = checkpoint.resolve().parents[1]
    goes_on = checkpoint.name == "last.ckpt" and folder in [path.resolve() for path in run_folders(root / name)]
    return folder if goes_on else None
