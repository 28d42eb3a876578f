"""Where things are: the user's repository, the folder of a run, `ROOT/NAME/version_N`, and how
files are written."""

import json
import math
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from filelock import FileLock, Timeout

from lightbase.errors import UserError


@dataclass
class Project:
    """The user's repository, as the scripts give it: see `lightbase.cli.script.starting`.

    root: Its folder; the one that holds lightbase/ where no script has said otherwise.
    default_model: The import path of the LightningModule that trains where a command names none.
    """

    root: Path = Path(__file__).parents[1]
    default_model: str = ""

    @property
    def package(self) -> str:
        """The name of the user's package, which `scripts/rename.py` changes."""
        return self.default_model.partition(".")[0]

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def data(self) -> Path:
        return self.root / "data"

    @property
    def default_config(self) -> Path:
        """What `python scripts/train.py` trains."""
        return self.root / "configs" / "default.yaml"


PROJECT = Project()


def write_whole(path: Path, content: str | bytes | memoryview, way_out: str = "") -> None:
    """Write a file whole or not at all: an earlier file survives a full disk or a crash.

    A link stays, and its target is written. A device, a pipe or /dev/stdout is written in place.
    """
    content = content.encode() if isinstance(content, str) else content
    try:
        if stream := open_stream(path):
            with stream:
                stream.write(content)
        else:
            replace(Path(os.path.realpath(path)), content)
    except OSError as error:
        what = f"{path} cannot be written: {error.strerror}; what was saved before is whole"
        raise UserError(f"{what}\n{way_out}".strip()) from error


def open_stream(path: Path) -> BinaryIO | None:
    """Open a device, a pipe, or a file that this process holds open, to write in place; None for
    any other path."""
    standard = {"/dev/stdout": "/dev/fd/1", "/dev/stderr": "/dev/fd/2"}
    folder, _, name = standard.get(str(path), str(path)).rpartition("/")
    if folder == "/dev/fd" and name.isdecimal():  # 63 for the shell's >(command)
        sys.stdout.flush()  # what was printed before comes first
        return os.fdopen(
            os.dup(int(name)), "wb"
        )  # opened by its path, a file would be cut to nothing
    return path.open("wb") if path.exists() and not path.is_file() else None


def replace(path: Path, content: bytes | memoryview) -> None:
    staged = path.with_name(
        f".{path.name}.part"
    )  # one name a target: the next time replaces what a crash left
    try:
        with staged.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        staged.replace(path)
    except OSError:
        staged.unlink(missing_ok=True)
        raise


def root_folder(config: Any) -> Path:
    """Where runs are kept, below which `name` is to be a folder."""
    root = Path(config.trainer.default_root_dir or PROJECT.logs)
    if not config.name or Path(config.name).is_absolute() or ".." in Path(config.name).parts:
        raise UserError(f"--name {config.name!r} is no name for a folder below {root}", 2)
    return root


class Run:
    """One run's folder ROOT/NAME/version_N, held against other processes until `close`; a new one
    unless given."""

    def __init__(self, root: Path, name: str, folder: Path | None = None) -> None:
        self.root = root
        self.is_new = folder is None
        try:
            self.folder = folder or make_version(root / name)
            self.checkpoints = self.folder / "checkpoints"
            self.lock = FileLock(self.folder / ".lock", blocking=False)
            self.lock.acquire()
        except Timeout as error:
            raise UserError(
                f"{folder} is in use: another process trains there; wait for it or stop it"
            ) from error
        except OSError as error:
            reason = f"{error.strerror}: {error.filename}"
            raise UserError(
                f"trainer.default_root_dir {root} cannot be written: {reason}\ngive another one"
            ) from error

    def close(self) -> None:
        self.lock.release()
        (self.folder / ".lock").unlink(missing_ok=True)

    def __getstate__(self) -> dict[str, Any]:
        return {
            **vars(self),
            "lock": None,
        }  # for ddp_spawn: it stays with the process that started the run

    def discard(self) -> None:
        """Remove a folder in which nothing has happened, and those above it that are empty then, up
        to ROOT."""
        self.close()
        shutil.rmtree(self.folder)
        for parent in self.folder.parents:
            if parent == self.root or any(parent.iterdir()):
                break
            parent.rmdir()

    def write(self, name: str, text: str) -> None:
        write_whole(self.folder / name, text)

    def keep(self, name: str) -> None:
        """A copy of what an earlier start wrote under this name: of config.yaml config_1.yaml, then
        config_2.yaml."""
        path = self.folder / name
        if path.is_file():
            number = len(list(self.folder.glob(f"{path.stem}_*{path.suffix}"))) + 1
            self.write(f"{path.stem}_{number}{path.suffix}", path.read_text(encoding="utf-8"))


def json_text(values: dict[str, Any], indent: int | None = None) -> str:
    """JSON, which has no NaN and no infinity: null in their place."""
    unknown = {
        key: None
        for key, value in values.items()
        if isinstance(value, float) and not math.isfinite(value)
    }
    return json.dumps(values | unknown, indent=indent, allow_nan=False)


def make_version(folder: Path) -> Path:
    """The next one, made by this process."""
    folder.mkdir(parents=True, exist_ok=True)
    number = max(versions(folder), default=-1) + 1
    while True:
        try:
            version = folder / f"version_{number}"
            version.mkdir()
            return version
        except FileExistsError:  # another run has just made it
            number += 1


def is_running(folder: Path) -> bool:
    """Whether a process holds this run now; a lock that one has left behind when it was killed does
    not count."""
    if not (folder / ".lock").exists():
        return False
    try:
        with FileLock(folder / ".lock", blocking=False):
            return False
    except (Timeout, PermissionError):  # who may not write there cannot ask
        return True


def versions(folder: Path) -> dict[int, Path]:
    """The folders version_N below ROOT/NAME, by N, oldest first."""
    found = {path.name.removeprefix("version_"): path for path in folder.glob("version_*")}
    return {int(number): found[number] for number in sorted(filter(str.isdecimal, found), key=int)}


def short(path: Path) -> str:
    """The path as the user would type it: relative to the working folder if it lies below that."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def folder_to_continue(checkpoint: Path, root: Path, name: str) -> Path | None:
    """The run folder below ROOT/NAME whose last.ckpt this is. From any other checkpoint a new run
    starts."""
    if checkpoint.name != "last.ckpt":
        return None
    folder = checkpoint.resolve().parent.parent
    return folder if folder in [path.resolve() for path in versions(root / name).values()] else None


def root_of(checkpoint: Path, name: str) -> str | None:
    """ROOT of a checkpoint ROOT/NAME/version_N/checkpoints/FILE; None where it lies elsewhere."""
    folders = checkpoint.resolve().parts[:-1]
    inner = (*Path(name).parts, folders[-2], "checkpoints") if len(folders) > 1 else ()
    is_run = inner and folders[-len(inner) :] == inner and folders[-2].startswith("version_")
    return str(Path(*folders[: -len(inner)])) if is_run else None


PLACE = ("ckpt_path", "name", "trainer.default_root_dir")
"""Settings that say where a run is, not what it does."""
# last words of metrics' names, for those that cannot be asked
LOWER_IS_BETTER = ("loss", "error", "err", "mae", "mse", "rmse", "nll", "perplexity")
HIGHER_IS_BETTER = (
    "acc",
    "accuracy",
    "f1",
    "auc",
    "auroc",
    "precision",
    "recall",
    "iou",
    "dice",
    "r2",
    "map",
    "psnr",
)


def flatten(config: Any, key: str = "") -> dict[str, Any]:
    """By the names of flags: {"model.lr": 0.01, "model.net": "my.models.mlp.MLP",
    "model.net.sizes": [2, 2]}."""
    if not isinstance(config, dict):
        return {key: config}
    flat: dict[str, Any] = {}
    for name, inner in config.items():
        flat |= flatten(
            inner, key if name in ("class_path", "init_args") else f"{key}.{name}".lstrip(".")
        )
    return flat


def better_by_name(metric: str) -> str | None:
    """min or max, None where the name does not tell."""
    word = metric.rpartition("/")[2].lower().rpartition("_")[2]
    return "min" if word in LOWER_IS_BETTER else "max" if word in HIGHER_IS_BETTER else None
