"""The user's repository, the folder of a run, `ROOT/NAME/version_N`, and how files are
written."""

import contextlib
import errno
import json
import math
import os
import re
import shutil
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from lightbase.core.errors import UserError


@dataclass
class Project:
    """The user's repository, which each script sets, see
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
LARGEST_TEXT = 10 * 2**20  # bytes of a YAML or JSON file


def write_whole(
    path: Path, content: str | bytes | memoryview, way_out: str = ""
) -> None:
    """Write a file completely or not at all: an earlier file survives a full disk or a
    crash.

    Nothing is written through a link: a folder that came from somebody else may have
    some. Raises UserError for a link, and if the file cannot be written, with the line
    `way_out` below it.
    """
    content = content.encode() if isinstance(content, str) else content
    is_device = path.is_relative_to(
        "/dev"
    )  # such as the /dev/fd/63 of a shell's >(command)
    if not is_device:
        refuse_links([path, *path.parents[:2]])
    # always the same name, so that the next write replaces what a crash has left
    staged = path.with_name(f".{path.name}.part")
    try:
        if is_device and path.exists():
            path.write_bytes(content)
            return
        if path.exists() and not path.is_file():
            raise OSError(errno.EINVAL, "it is no regular file")
        staged.unlink(missing_ok=True)  # it may be a link
        with staged.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        staged.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            staged.unlink()
        what = f"{path} cannot be written: {error.strerror}; what was saved before is whole"
        raise UserError(f"{what}\n{way_out}".strip()) from error


def refuse_links(paths: Iterable[Path]) -> None:
    """Raise UserError if one of the paths is a symbolic link, through which a file
    would be written elsewhere."""
    for path in paths:
        if path.is_symlink():
            what = f"nothing is written through a link: {path} leads to {os.path.realpath(path)}"
            raise UserError(
                what, "give the path that it leads to, or remove the link", 2
            )


def check_readable(path: Path, largest: int) -> None:
    """Raise OSError for what is no regular file, such as a pipe or /dev/zero, or is too
    large.

    largest: The highest number of bytes.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is no regular file")
    if status.st_size > largest:
        raise OSError(
            errno.EFBIG,
            f"it has {status.st_size:,} bytes, and {largest:,} is the limit",
        )


def is_own(path: Path, root: str | None = None) -> bool:
    """Whether a file is the user's: it lies in the repository's logs/, or below the
    folder of runs that the command names. Symbolic links are resolved.

    root: The value of --trainer.default_root_dir.
    """
    roots = [PROJECT.logs, Path(root)] if root else [PROJECT.logs]
    real = Path(os.path.realpath(path))  # unlike resolve, it takes links in a circle
    return any(real.is_relative_to(os.path.realpath(folder)) for folder in roots)


def root_folder(config: Any) -> Path:
    """The folder of all runs. Raises UserError where `name` is no folder below it, or
    one that cannot be written as text, such as bytes of another encoding than the
    locale's."""
    root = Path(config.trainer.default_root_dir or PROJECT.logs).resolve()
    parts = Path(config.name).parts
    is_text = config.name.isprintable() and not Path(config.name).is_absolute()
    # runs.py would take version_N for a run, and .. and . for no name
    if (
        not parts
        or not is_text
        or any(re.fullmatch(r"\.\.|version_\d+", part) for part in parts)
    ):
        raise UserError(
            f"--name {config.name!r} is no name for a folder below {root}", status=2
        )
    return root


class Run:
    """The folder ROOT/NAME/version_N of a run, locked against other processes until
    `close`.

    folder: An existing one; None makes a new one.
    """

    def __init__(self, root: Path, name: str, folder: Path | None = None) -> None:
        self.root = root
        self.is_new = folder is None
        check_links(root, root / name, folder)
        try:
            self.folder = folder or make_version(root / name)
            self.checkpoints = self.folder / "checkpoints"
            self.lock = FileLock(self.folder / ".lock", blocking=False)
            self.lock.acquire()
        except Timeout as error:
            what = "another process trains there; wait for it or stop it"
            raise UserError(f"{folder} is in use: {what}") from error
        except OSError as error:
            what = f"trainer.default_root_dir {root} cannot be written"
            reason = f"{error.strerror}: {error.filename}"
            raise UserError(f"{what}: {reason}", "give another one") from error

    def close(self) -> None:
        self.lock.release()
        (self.folder / ".lock").unlink(missing_ok=True)

    def __getstate__(self) -> dict[str, Any]:
        # for ddp_spawn: the lock stays with the process that started the run
        return {**vars(self), "lock": None}

    def discard(self) -> None:
        """Remove the folder, and the folders above it, below ROOT, that are empty
        then."""
        self.close()
        shutil.rmtree(self.folder)
        for parent in self.folder.parents:
            if parent == self.root or any(parent.iterdir()):
                break
            parent.rmdir()

    def write(self, name: str, text: str) -> None:
        write_whole(self.folder / name, text)


def check_links(root: Path, parent: Path, folder: Path | None) -> None:
    """Raise UserError for a link on the way from ROOT to a run, or in the folder of a
    run.

    parent: ROOT/NAME. folder: Of a run that continues; None for a new run.
    """
    refuse_links(path for path in [parent, *parent.parents] if root in path.parents)
    if folder:
        # W&B makes links for itself
        files = [
            file for file in folder.rglob("*") if folder / "wandb" not in file.parents
        ]
        refuse_links([folder, *files])
        for file in files:
            if not file.is_file() and not file.is_dir():  # a pipe would be waited for
                raise UserError(f"{file} is no regular file: remove it", status=2)


def read_json(path: Path) -> dict[str, Any]:
    """The content of a JSON file that holds an object. Raises UserError for any other
    file."""
    try:
        check_readable(path, LARGEST_TEXT)
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} is damaged: it holds no object with keys")
    return content


def json_text(values: dict[str, Any], indent: int | None = None) -> str:
    """JSON with null for NaN and infinity, which JSON lacks."""
    finite = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in values.items()
    }
    return json.dumps(finite, indent=indent, allow_nan=False)


def make_version(folder: Path) -> Path:
    """Make the next folder version_N; another process may do the same at this
    moment."""
    folder.mkdir(parents=True, exist_ok=True)
    number = max(versions(folder), default=-1) + 1
    while True:
        try:
            version = folder / f"version_{number}"
            version.mkdir()
            return version
        except FileExistsError:
            number += 1


def is_running(folder: Path) -> bool:
    """Whether a process holds the lock of this run. The file of a killed process does
    not count."""
    if not (folder / ".lock").is_file() or (folder / ".lock").is_symlink():
        return False
    try:
        with FileLock(folder / ".lock", blocking=False):
            return False
    except (
        Timeout,
        PermissionError,
    ):  # without permission to write there is no way to find out
        return True


def versions(folder: Path) -> dict[int, Path]:
    """The folders version_N below ROOT/NAME, by N, oldest first."""
    paths = {
        path.name.removeprefix("version_"): path for path in folder.glob("version_*")
    }
    return {
        int(number): paths[number]
        for number in sorted(filter(str.isdecimal, paths), key=int)
    }


def short(path: Path) -> str:
    """The path relative to the working folder if it lies below it."""
    return str(
        path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    )


def root_of(checkpoint: Path, name: str) -> str | None:
    """ROOT of a checkpoint ROOT/NAME/version_N/checkpoints/FILE; None where it lies
    elsewhere."""
    folder = checkpoint.resolve().parent.parent
    root = Path(*folder.parent.parts[: -len(Path(name).parts)])
    is_run = folder.name.startswith("version_") and folder.parent == root / name
    return str(root) if is_run else None


PLACE = ("ckpt_path", "name", "trainer.default_root_dir")
"""Settings that say where a run is, not what it does."""
# last words of the names of metrics that do not say which values are better
LOWER_IS_BETTER = re.compile("loss|error|err|mae|mse|rmse|nll|perplexity")
HIGHER_IS_BETTER = re.compile(
    "acc|accuracy|f1|auc|auroc|precision|recall|iou|dice|r2|map|psnr"
)


def flatten(config: Any, key: str = "") -> dict[str, Any]:
    """A config by the names of flags: {"model.lr": 0.01, "model.net":
    "my.models.mlp.MLP", "model.net.sizes": [2, 2]}."""
    if not isinstance(config, dict):
        return {key: config}
    flat: dict[str, Any] = {}
    for name, inner in config.items():
        is_class = name in ("class_path", "init_args")
        flat |= flatten(inner, key if is_class else f"{key}.{name}".lstrip("."))
    return flat


def better_by_name(metric: str) -> str | None:
    """min or max; None where the name of the metric does not tell."""
    word = metric.rpartition("/")[2].lower().rpartition("_")[2]
    if LOWER_IS_BETTER.fullmatch(word):
        return "min"
    return "max" if HIGHER_IS_BETTER.fullmatch(word) else None
