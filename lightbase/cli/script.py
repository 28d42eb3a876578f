"""What all scripts share: short errors with an exit status, arguments without abbreviations."""

import argparse
import contextlib
import errno
import importlib.metadata
import io
import os
import platform
import sys
import threading
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import lightbase
from lightbase.devices.signals import SIGNALS, Stopped
from lightbase.errors import UserError
from lightbase.folder import PROJECT
from lightbase.ranks import rank


def versions() -> str:
    """One line: the user's project, lightbase, and what they stand on. The project's version is
    read where it is edited: an installation's metadata is that of its day."""
    file = PROJECT.root / "pyproject.toml"
    table = tomllib.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    project = table.get("project", {})
    parts = [f"{project['name']} {project['version']}"] if {"name", "version"} <= {*project} else []
    packages = [f"{name} {importlib.metadata.version(name)}" for name in ("torch", "lightning")]
    python = f"Python {platform.python_version()}"
    return ", ".join([*parts, f"lightbase {lightbase.__version__}", *packages, python])


# noted early: when torch has been imported, seconds later, the process that started this one may be
# gone
STARTED_BY = os.getppid()
# the file system, not the code, is to blame: full, over quota, read-only, no permission, too large
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG)


class LastingOutput(io.FileIO):
    """stdout or stderr, whose other end may vanish, a pipe's reader or a terminal: what is written
    then is lost."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            os.dup2(
                os.open(os.devnull, os.O_WRONLY), self.fileno()
            )  # for all that still write there
            if error.errno not in (errno.EPIPE, errno.EIO):
                raise
            return len(data)


def outlive_terminal() -> None:
    """Let this process go on when its output is, or gets, closed. Output that somebody captures is
    left alone."""
    for name, fd in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if stream is None:  # closed at the start: takes its number, lest a file of ours gets it
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115
        elif stream is getattr(sys, f"__{name}__"):
            raw: Any = LastingOutput(fd, "w", closefd=False)
            how = {"line_buffering": stream.line_buffering, "write_through": stream.write_through}
            raw = raw if stream.write_through else io.BufferedWriter(raw)
            setattr(sys, name, io.TextIOWrapper(raw, stream.encoding, stream.errors, **how))


@contextlib.contextmanager
def starting(script: str, default_model: str) -> Iterator[None]:
    """Around the imports of a script, which take seconds: Ctrl-C ends them in one line, and
    --version needs none.

    script: The path of the script, which lies in a folder of the repository.
    default_model: As of `Project`.
    """
    PROJECT.root, PROJECT.default_model = Path(script).resolve().parents[1], default_model
    if sys.argv[1:] == ["--version"]:
        print(versions())
        sys.exit()
    with short_errors():
        yield


@contextlib.contextmanager
def short_errors() -> Iterator[None]:
    """Around a script: print a UserError, or the disk's refusal, in short and exit; let all other
    errors through."""
    outlive_terminal()
    original_hook = threading.excepthook

    def thread_hook(args: threading.ExceptHookArgs) -> None:
        # TensorBoard's writing thread hands such an error on to the next call of the main thread
        if not (isinstance(args.exc_value, OSError) and args.exc_value.errno in DISK_ERRORS):
            original_hook(args)

    threading.excepthook = thread_hook
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
            time.sleep(
                2
            )  # the first process has the word; if it says the same, this one ends with it
        print(f"error: {f'on rank {rank()}: ' * (rank() > 0)}{error}", file=sys.stderr, flush=True)
        sys.exit(error.status)
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            raise
        where = f"{error.filename}: " if error.filename else ""
        print(f"error: {where}{error.strerror}; what was saved before is whole", file=sys.stderr)
        print("make room or choose another folder, then start the command again", file=sys.stderr)
        sys.exit(1)
    finally:
        threading.excepthook = original_hook


class ShowVersions(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        print(versions())
        parser.exit()


class ScriptParser(argparse.ArgumentParser):
    """Without abbreviations, with --version; reports mistakes as UserError."""

    def __init__(self, **options: Any) -> None:
        super().__init__(
            allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **options
        )
        self.add_argument(
            "--version", action=ShowVersions, nargs=0, help="print the versions and exit"
        )

    def add_checkpoint_arguments(self) -> None:
        self.add_argument(
            "--ckpt_path",
            type=Path,
            required=True,
            help="a run's checkpoint, best.ckpt for instance",
        )
        whatever = "construct whatever the config in the checkpoint names"
        options: dict[str, Any] = {
            "choices": ("true", "false"),
            "nargs": "?",
            "const": "true",
            "default": "false",
        }
        self.add_argument("--trust_checkpoint", help=whatever, **options)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}\nsee --help", 2)


def output_file(text: str) -> Path:
    """For add_argument(type=...): a path whose folder is there."""
    if Path(text).is_dir() or not Path(text).parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder, or in none that is there")
    return Path(text)
