"""How a command runs: its mistakes end in two lines, and signals in one.

Read `run_command` first. `python_errors` is the same for functions that are called in
Python, such as `lightbase.train`.
"""

import contextlib
import importlib
import io
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

from lightbase.commands import flags
from lightbase.config.errors import UserError, rank
from lightbase.config.known_errors import known, lines_of
from lightbase.run.signals import SIGNALS, Stopped, end_with_parent


def run_command(command: str, args: flags.Args = None) -> Any:
    """Read the flags of a command, then import its module, which takes seconds, and
    call its function `run`. Return what the function returns.

    command: The module in the library, such as "commands.evaluate".
    """
    end_with_parent()
    with short_errors():
        read_flags = getattr(flags, f"{command.rpartition('.')[2]}_flags")
        options = read_flags(args)
        module = importlib.import_module(f"lightbase.{command}")
        with SIGNALS.handled():
            return module.run(options)


class LastingOutput(io.FileIO):
    """stdout or stderr that outlives its other end, such as a terminal. An error would
    end a training before its state is saved."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            return len(data)


def outlive_terminal() -> None:
    """Let this process continue when its output is closed."""
    for name, fd in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if stream and stream is getattr(sys, f"__{name}__"):
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

    way_out: How to continue, in place of the command that the training suggests.
    """
    try:
        with SIGNALS.handled():
            yield
    except UserError:
        raise
    except Stopped as stopped:
        hint = stopped.hint
        if hint and way_out:
            hint = way_out
        print(f"{stopped.text}{hint}")
        raise KeyboardInterrupt from None
    except Exception as error:
        if found := known(error):
            error.add_note(found[1].way_out)
        raise


@contextlib.contextmanager
def short_errors() -> Iterator[None]:
    """Run a script. Print a UserError in two lines, and an error for which `lines_of`
    has lines, and exit. Other errors keep their traceback. In a notebook all errors
    stay what they are.

    Raise SystemExit with the status of the error, and 128 plus the number of the signal
    after a signal such as Ctrl-C.
    """
    if hasattr(sys, "ps1"):
        with python_errors():
            yield
        return
    outlive_terminal()
    try:
        yield
    except Stopped as stopped:
        if rank() == 0:
            print(f"{stopped.text}{stopped.hint}", file=sys.stderr, flush=True)
        raise
    except UserError as error:
        print_error(str(error))
        sys.exit(error.status)
    except Exception as error:
        lines, status = lines_of(error)
        if not lines or "LIGHTBASE_TRACEBACK" in os.environ:
            raise
        print_error("\n".join(lines))
        sys.exit(status)


def print_error(text: str) -> None:
    """Print an error to stderr, with the rank if this is not the first process."""
    if rank() > 0:
        # if the first process has the same error, this process ends with it
        time.sleep(2)
        text = f"on rank {rank()}: {text}"
    print(f"error: {text}", file=sys.stderr, flush=True)
