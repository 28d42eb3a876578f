"""What all scripts share: short errors with an exit status, arguments without abbreviations."""

import argparse
import contextlib
import errno
import io
import os
import runpy
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from lightbase.devices.signals import SIGNALS, Stopped
from lightbase.errors import UserError, did_you_mean, rank, say_once
from lightbase.folder import PROJECT, short, versions

# a disk that is full or over quota, a file system without permission or read-only, a file too
# large, a path too long
DISK_ERRORS = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG),
    errno.ENAMETOOLONG,
)


class LastingOutput(io.FileIO):
    """stdout or stderr, whose other end, a pipe's reader or a terminal, may vanish: what is written
    after that is lost. An error would end a training before its state is saved."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.EIO):
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            return len(data)


def outlive_terminal() -> None:
    """Let this process continue when its output is closed. Output that a test captures stays."""
    for name, fd in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if stream is not None and stream is getattr(sys, f"__{name}__"):
            raw = io.BufferedWriter(LastingOutput(fd, "w", closefd=False))
            lasting = io.TextIOWrapper(raw, stream.encoding, stream.errors, line_buffering=True)
            setattr(sys, name, lasting)


@contextlib.contextmanager
def starting(script: str, default_model: str) -> Iterator[None]:
    """Around the imports of a script, which take seconds: Ctrl-C ends them in one line.

    script: The path of the script, which lies in a folder of the repository.
    default_model: See `Project`.
    """
    PROJECT.root, PROJECT.default_model = Path(script).resolve().parents[1], default_model
    with short_errors():
        yield


def find_project() -> None:
    """Outside of a script, such as in a notebook: run scripts/train.py, which names the project."""
    script = PROJECT.root / "scripts" / "train.py"
    if not PROJECT.default_model and script.is_file():
        runpy.run_path(str(script))


def is_interactive() -> bool:
    """Whether this is a notebook or a prompt of Python."""
    return hasattr(sys, "ps1")


@contextlib.contextmanager
def python_errors(way_out: str = "") -> Iterator[None]:
    """Around a training from Python: after Ctrl-C print how to continue, and raise
    KeyboardInterrupt. UserError and others pass. way_out: Instead of the command's."""
    try:
        with SIGNALS.handled():
            yield
    except Stopped as stopped:
        print(f"{stopped.text}{stopped.hint and (way_out or stopped.hint)}")
        raise KeyboardInterrupt from None


@contextlib.contextmanager
def short_errors() -> Iterator[None]:
    """Around a script: print a UserError, or an error of the disk, in two lines and exit. Other
    errors keep their traceback. In a notebook all errors stay what they are."""
    if is_interactive():
        with python_errors():
            yield
        return
    outlive_terminal()
    hook = threading.excepthook
    # TensorBoard's writing thread hands an error of the disk on to the next call of the main thread
    threading.excepthook = lambda args: is_of_disk(args.exc_value) or hook(args)
    try:
        with SIGNALS.handled():
            yield
    except Stopped as stopped:
        if rank() == 0:
            print(f"{stopped.text}{stopped.hint}", file=sys.stderr, flush=True)
        stopped.hint = ""  # for an outer script: benchmark.py
        raise
    except UserError as error:
        if rank() > 0:
            time.sleep(2)  # if the first process has the same error, this process ends with it
        where = f"on rank {rank()}: " if rank() > 0 else ""
        print(f"error: {where}{error}", file=sys.stderr, flush=True)
        sys.exit(error.status)
    except OSError as error:
        if not is_of_disk(error):
            raise
        where = f"{error.filename}: " if error.filename else ""
        print(f"error: {where}{error.strerror}; what was saved before is whole", file=sys.stderr)
        print("make room or choose another folder, then start the command again", file=sys.stderr)
        sys.exit(1)
    finally:
        threading.excepthook = hook


def is_of_disk(error: BaseException | None) -> bool:
    return isinstance(error, OSError) and error.errno in DISK_ERRORS


class ScriptParser(argparse.ArgumentParser):
    """Without abbreviations; reports mistakes as UserError."""

    def __init__(self, **options: Any) -> None:
        formatter = argparse.RawDescriptionHelpFormatter
        super().__init__(allow_abbrev=False, formatter_class=formatter, **options)

    def add_checkpoint_arguments(self) -> None:
        path = "a checkpoint, a run's NAME or NAME/version_N, or last or best of the newest run"
        self.add_argument("--ckpt_path", type=checkpoint_file, required=True, help=path)
        trust: Any = {"nargs": "?", "const": "true", "default": "false"}
        trust |= {"choices": ("true", "false"), "help": "construct whatever it names"}
        self.add_argument("--trust_checkpoint", **trust)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}\nsee --help", 2)


def checkpoint_file(text: str) -> Path:
    """For add_argument(type=...): a file; `last` or `best` of the newest run of all; best.ckpt of a
    run's folder, of NAME/version_N, or of the newest run of NAME. Raises UserError."""
    path, logs = Path(text), PROJECT.logs
    if text in ("last", "best"):
        path = max(logs.rglob(f"checkpoints/{text}.ckpt"), key=os.path.getmtime, default=path)
    elif not path.is_file():
        folder = path if path.is_dir() else logs / text
        path = [folder, *versions(folder).values()][-1] / "checkpoints" / "best.ckpt"
    if not path.is_file():
        names = [] if (logs / text).exists() else [folder.name for folder in logs.glob("*")]
        what = f"no such file, nor a run with this checkpoint{did_you_mean(text, names)}"
        way_out = "python scripts/runs.py lists the runs; --best NAME the best of them"
        raise UserError(f"--ckpt_path {text}: {what}\n{way_out}")
    if path != Path(text):
        say_once(f"Checkpoint: {short(path)}")
    return path


def output_file(text: str) -> Path:
    """For add_argument(type=...): a path whose folder is there."""
    if Path(text).is_dir() or not Path(text).parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder, or in none that is there")
    return Path(text)
