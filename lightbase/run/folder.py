"""The folder of a run, `ROOT/NAME/version_N`."""

import contextlib
import errno
import os
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from lightbase.config.errors import UserError
from lightbase.config.files import relative_to_cwd, write_whole
from lightbase.config.paths import PROJECT

NO_NAME = re.compile(r"/+|\.\.|version_\d+")
"""Parts of names that runs may not have: runs.py would take version_N for a run."""


class LockedFolder:
    """The folder ROOT/NAME/version_N of a run. It is locked against other processes
    until `close`.

    root: ROOT, the folder of all runs.
    name: NAME, the name of the experiment. It may have several parts, as in a/b.
    folder: The folder of an earlier run, which continues. None makes a new folder.
    """

    def __init__(self, root: Path, name: str, folder: Path | None = None) -> None:
        self.root = root
        self.is_new = folder is None
        parent = root / name
        try:
            self.folder = folder or make_version(parent)
            self.checkpoints = self.folder / "checkpoints"
            self.lock = FileLock(self.folder / ".lock", blocking=False)
            self.lock.acquire()
        except Timeout as error:
            raise UserError(
                f"{folder} is in use: another process trains there; wait for it or "
                "stop it"
            ) from error
        except OSError as error:
            raise UserError(
                f"trainer.default_root_dir {root} cannot be written: {error}",
                "give another one",
            ) from error

    def close(self) -> None:
        """Release the lock of the folder. Its file is removed before, because another
        process may take the lock at once. Windows removes no open file."""
        with contextlib.suppress(PermissionError):
            (self.folder / ".lock").unlink(missing_ok=True)
        self.lock.release()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for the processes of ddp_spawn, without the lock."""
        return {**vars(self), "lock": None}

    def discard(self) -> None:
        """Remove the folder, and the empty folders above it, below ROOT."""
        self.close()
        shutil.rmtree(self.folder)
        for parent in self.folder.parents:
            if parent == self.root or any(parent.iterdir()):
                break
            parent.rmdir()

    def write(self, name: str, text: str) -> None:
        self.check_exists()
        write_whole(self.folder / name, text)

    def check_exists(self) -> None:
        if not (self.folder / ".lock").exists():
            raise UserError(
                f"{self.folder} is gone: it was removed while the run trained",
                "start the run again",
            )


def root_folder(config: Any) -> Path:
    """Return ROOT, the folder of all runs."""
    root = Path(config.trainer.default_root_dir or PROJECT.logs).resolve()
    check_name(root, config.name)
    return root


def check_name(root: Path, name: str) -> None:
    parts = Path(name).parts
    is_other = not parts or any(map(NO_NAME.fullmatch, parts))
    if is_other or not name.isprintable():
        raise UserError(
            f"--name {name[:99]!r} is not a name for a folder below {root}",
            "give one without control characters and version_N",
            2,
        )


def script_command(script: str, ckpt_path: str, root: Path) -> str:
    """Return the command that opens a checkpoint with a script, without `python`, for
    the working folder.

    script: The name of the script, such as "evaluate.py".
    ckpt_path: A path, or NAME/version_N.
    root: The folder of all runs.
    """
    path = relative_to_cwd(PROJECT.root / "scripts" / script)
    words = [path, "--ckpt_path", ckpt_path]
    if root != PROJECT.logs:
        words += ["--trainer.default_root_dir", relative_to_cwd(root)]
    return shlex.join(words)


def check_same_settings(
    folder: Path, before: dict[str, Any], now: dict[str, Any]
) -> None:
    """Raise UserError if the runs in a folder have other settings than this command:
    their numbers would not belong together.

    before, now: The settings by flag.
    """
    for key in before | now:
        if before.get(key) != now.get(key):
            raise UserError(
                f"--{key} {now.get(key)}: {relative_to_cwd(folder)} has "
                f"{before.get(key)}",
                "give the same, or another --name",
                2,
            )


def make_version(folder: Path) -> Path:
    """Make and return the next folder version_N of ROOT/NAME. If another process makes
    it at this moment, try the next number."""
    folder.mkdir(parents=True, exist_ok=True)
    version = folder / f"version_{newest_number(folder) + 1}"
    try:
        version.mkdir()
    except FileExistsError:
        return make_version(folder)
    return version


def torchrun_id() -> str:
    """Return the --rdzv-id of torchrun, or "" without torchrun."""
    return os.environ.get("TORCHELASTIC_RUN_ID", "")


def run_of_torchrun(folder: Path) -> Path | None:
    """Return the newest run in ROOT/NAME that this torchrun has started, or None. Its
    environment.txt tells. Other commands may have started runs of this name since."""
    for number in range(newest_number(folder), -1, -1):
        run = folder / f"version_{number}"
        file = run / "environment.txt"
        if file.is_file() and f"\ntorchrun: {torchrun_id()}\n" in file.read_text():
            return run
    return None


def newest_version(folder: Path) -> Path:
    """Return the newest folder version_N of ROOT/NAME. It does not exist if there is no
    run."""
    return folder / f"version_{newest_number(folder)}"


def newest_number(folder: Path) -> int:
    """Return the highest N of the folders version_N in ROOT/NAME, or -1 if there is
    none."""
    names = [path.name.removeprefix("version_") for path in folder.glob("version_*")]
    return max((int(name) for name in names if name.isdecimal()), default=-1)


def is_running(folder: Path) -> bool:
    """Return whether a process holds the lock of this run, or whether the lock cannot
    be tried. A killed process leaves a file, but no lock."""
    file = folder / ".lock"
    if not file.is_file() or file.is_symlink():
        return False
    try:
        with FileLock(file, blocking=False):
            return False
    except Timeout:
        return True
    except OSError as error:  # unknown
        return error.errno != errno.EROFS


def logs_folder_of(checkpoint: Path, name: str) -> str | None:
    """Return ROOT of a checkpoint ROOT/NAME/version_N/checkpoints/FILE, or None if it
    lies elsewhere. NAME may have several parts."""
    folder = checkpoint.resolve().parent.parent
    if folder.name.startswith("version_"):
        for root in folder.parent.parents:
            if root / name == folder.parent:
                return str(root)
    return None
