"""How a command runs: its mistakes end in two lines, and signals in one.

Read `run_command` first. `python_errors` is the same for functions that are called in
Python, such as `lightbase.train`.
"""

import atexit
import contextlib
import gc
import importlib
import io
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightbase.commands.flags import Args
from lightbase.config.errors import SEE_HELP, UserError, rank
from lightbase.config.known_errors import known, lines_of
from lightbase.run.signals import SIGNALS, Stopped, end_with_parent


def run_command(command: str, args: Args = None) -> Any:
    """Read the flags of a command, then import its module, which takes seconds, and
    call its function `run`. Return what the function returns.

    A mistake prints two lines and raises SystemExit, see `short_errors`.

    command: The module in the library, such as "commands.evaluate".
    """
    end_with_parent()
    with short_errors():
        room, name = command.split(".")
        flags = importlib.import_module(f"lightbase.{room}.flags")
        options = getattr(flags, f"{name}_flags")(args)
        with without_gc():
            module = importlib.import_module(f"lightbase.{command}")
        with SIGNALS.handled():
            return module.run(options)


@contextlib.contextmanager
def without_gc() -> Iterator[None]:
    """Let Python's garbage collector skip the objects that are imported within this
    context: there are a million of them, and searching them takes 0.6 s. If torch is
    imported already, as in a notebook, nothing happens."""
    if "torch" in sys.modules:
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
    atexit.register(gc.unfreeze)  # nanobind would report frozen objects as leaked


class LastingOutput(io.FileIO):
    """stdout or stderr that outlives its other end, such as a terminal or the reader of
    a pipe. What is written after that is lost. An error would end a training before its
    state is saved."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            return len(data)


def outlive_terminal() -> None:
    """Let this process continue when its output is closed. A stream that is no longer
    Python's own, such as that of a test, stays."""
    for name, fd in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if stream is None:  # the shell has closed it
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115
        elif stream is getattr(sys, f"__{name}__"):
            raw = io.BufferedWriter(LastingOutput(fd, "w", closefd=False))
            lasting = io.TextIOWrapper(
                raw, stream.encoding, stream.errors, line_buffering=True
            )
            setattr(sys, name, lasting)


@contextlib.contextmanager
def python_errors(way_out: str = "") -> Iterator[None]:
    """Run a training from Python. After Ctrl-C print how to continue, and raise
    KeyboardInterrupt. An error in the table of known_errors.py gets its way out as a
    note.

    way_out: How to continue, in place of the command that the training suggests. It is
        printed only if the training can be continued.
    """
    try:
        with SIGNALS.handled():
            yield
    except UserError as error:
        error.args = (str(error).replace(SEE_HELP, "see docs/python.md"),)
        raise
    except Stopped as stopped:
        hint = stopped.hint
        if hint and way_out:
            hint = way_out
        print(f"{stopped.text}{hint}")
        raise KeyboardInterrupt from None
    except Exception as error:
        found = known(error)
        if found and found[1].way_out:
            error.add_note(found[1].way_out)
        raise


@contextlib.contextmanager
def short_errors() -> Iterator[None]:
    """Run a script. Print a UserError in two lines, and an error for which
    `lines_of` has lines, and exit.

    Other errors keep their traceback.

    Raise SystemExit with the status of the error, and 128 plus the number of the signal
    after a signal such as Ctrl-C.
    """
    outlive_terminal()
    try:
        yield
    except Stopped as stopped:
        if rank() == 0:
            print(stopped, file=sys.stderr, flush=True)
        raise
    except UserError as error:
        print_error(str(error))
        sys.exit(error.status)
    except Exception as error:
        lines, status = lines_of(error)
        if not lines or "LIGHTBASE_TRACEBACK" in os.environ:
            raise
        print_error("\n".join(lines))
        if type(error).__name__ == "AcceleratorError":
            atexit.register(end_at_once)
        sys.exit(status)


def end_at_once() -> None:
    """End the process with status 1 before torch frees the tensors of a GPU that has
    failed. Freeing them would abort Python, after the lines of the error. `atexit`
    calls this function."""
    sys.stdout.flush()
    os._exit(1)


def print_error(text: str) -> None:
    """Print an error to stderr, with the rank if this is not the first process.

    text: One or two lines, without the word "error".
    """
    if rank() > 0:
        # if the first process has the same error, this process ends with it
        time.sleep(2)
        text = f"on rank {rank()}: {text}"
    print(f"error: {text}", file=sys.stderr, flush=True)
