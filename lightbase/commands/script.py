"""What all scripts share: a start in which Ctrl-C and mistakes end in one or two lines.

Read `starting` and `short_errors` first. `starting` is around the imports of each
script, and `short_errors` is around its main function.
"""

import atexit
import contextlib
import gc
import io
import logging
import os
import re
import runpy
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightbase.commands.arguments import PARSERS, first_look
from lightbase.config.errors import SEE_HELP, UserError, is_users, rank, say
from lightbase.config.known_errors import known, lines_of
from lightbase.config.paths import PROJECT
from lightbase.run.signals import ERASE_LINE, SIGNALS, Stopped, end_with_parent

IN_PYTHON = r"trainer\.|model\.|data\."
"""Beginnings of flags that arguments in Python lack."""

FILE = r"[\w./\\-]*(?:ckpt|pth?|safetensors|ya?ml|csv|np[yz])\b"
"""The rest of the name of a file that begins like a flag, such as model.ckpt."""

FRAME = re.compile(r'^ *File "(.+?)", line \d+.*\n(?:    .*\n)*', re.MULTILINE)
"""A frame in the text of a traceback, with its lines of code. Group 1 is the file."""


class LastingOutput(io.FileIO):
    """stdout or stderr that outlives its other end.

    A pipe's reader or a terminal may vanish. What is written after that is lost. An
    error would end a training before its state is saved.

    is_behind_bar: Whether the cursor of a terminal is behind a progress bar: tqdm
        begins each bar with a carriage return. Other text, such as a line of `print` or
        of the debugger, erases the bar. Only an empty line leaves it. The next refresh
        draws the bar again.
    """

    is_behind_bar = False

    def write(self, data: Any) -> int:
        """Write bytes, and return their number. If nobody can read them any more, drop
        them, and lead later output to /dev/null."""
        start = bytes(data[:1])
        erases = LastingOutput.is_behind_bar and start not in b"\r\n"
        LastingOutput.is_behind_bar = start == b"\r"
        try:
            if erases and self.isatty():
                super().write(ERASE_LINE)
            return super().write(data)
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            return len(data)


def outlive_terminal() -> None:
    """Let this process continue when its output is closed. A stream that a test has
    replaced to capture the output stays."""
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
def starting(script: str, default_model: str) -> Iterator[None]:
    """Start a script, around its imports, which take seconds.

    Ctrl-C ends them in one line. --help, and mistakes in the flags of the script, are
    answered before them. Unless torch was there before, the garbage collector of Python
    does not run during the imports, and never searches the imported objects.

    script: The path of the script, which lies in a folder of the repository.
    default_model: See `Project`.
    """
    # matplotlib would print two lines if the home folder cannot be written
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    PROJECT.root = Path(script).resolve().parents[1]
    PROJECT.default_model = default_model
    name = Path(script).stem
    # find_project and the processes that a training starts only import the script
    main_file = getattr(sys.modules["__main__"], "__file__", None) or ""
    is_command = Path(main_file).resolve() == Path(script).resolve()
    # in a notebook gc.freeze would keep what the user has made
    freezes = "torch" not in sys.modules
    if freezes:
        # searching the million objects of the imports for garbage takes 0.8 s
        gc.disable()
    with short_errors():
        if is_command:
            sys.excepthook = print_traceback
            end_with_parent()
            first_look(name, sys.argv[1:])
            if name in ("train", *PARSERS) and sys.stdout.isatty():
                say("Loading PyTorch ...")
        SIGNALS.ends_at_once = is_command
        yield
        SIGNALS.ends_at_once = False
    if freezes:
        gc.freeze()
        gc.enable()
        atexit.register(gc.unfreeze)  # nanobind lists as leaked what is frozen


def find_project() -> None:
    """Outside of a script, such as in a notebook, run scripts/train.py. It names the
    project, and trains nothing: it is not run as the main program."""
    script = PROJECT.root / "scripts" / "train.py"
    if not PROJECT.default_model and script.is_file():
        sys.path.append(str(script.parent))  # of start.py
        runpy.run_path(str(script))


def is_interactive() -> bool:
    """Return whether this is a notebook or a prompt of Python. Only there sys.ps1
    exists."""
    return hasattr(sys, "ps1")


@contextlib.contextmanager
def python_errors(way_out: str = "", prefixes: str = IN_PYTHON) -> Iterator[None]:
    """Run a training from Python. After Ctrl-C print how to continue, and raise
    KeyboardInterrupt. An error in the table of known_errors.py gets its way out as a
    note. Other errors pass.

    way_out: How to continue, in place of the command that the training suggests. It is
        printed only if the training can be continued.
    prefixes: A pattern for beginnings of flags, such as "trainer.". A UserError gets
        arguments of Python in place of flags, without this beginning: `max_epochs=3`
        for `--trainer.max_epochs 3`. "" leaves its message as it is.
    """
    find_project()
    try:
        with SIGNALS.handled():
            yield
    except UserError as error:
        if prefixes:
            text = re.sub(
                r"(--[\w.]+) (\d\S*|true|false)\b",
                lambda flag: f"{flag[1]}={flag[2].capitalize()}",
                str(error).replace(SEE_HELP, "see docs/python.md"),
            )
            error.args = (
                re.sub(
                    rf"(?<![\w./\\])(--)?({prefixes}|(?<=--))(?=\w)(?!{FILE})",
                    "",
                    text,
                ),
            )
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
    """Run a script. Print a UserError in two lines, and an error for which
    `lines_of` has lines, and exit.

    Other errors keep their traceback. In a notebook all errors stay what they are.

    Raise SystemExit with the status of the error, and 128 plus the number of the signal
    after a signal such as Ctrl-C.
    """
    if is_interactive():
        with python_errors(prefixes=""):
            yield
        return
    outlive_terminal()
    try:
        with SIGNALS.handled():
            yield
    except Stopped as stopped:
        if rank() == 0:
            print(f"{stopped.text}{stopped.hint}", file=sys.stderr, flush=True)
        stopped.hint = ""  # for an outer script: benchmark.py
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


def print_traceback(kind: Any, error: BaseException, frames: Any) -> None:
    """Print an error to stderr, with the frames in the user's files only. `starting`
    makes this function the excepthook of Python, so debuggers still get the error.

    The traceback is complete if the environment variable LIGHTBASE_TRACEBACK is set,
    or if none of its frames is in the user's files.
    """
    output = io.StringIO()
    # traceback.format_exception has "Did you mean" only from Python 3.12 on
    with contextlib.redirect_stderr(output):
        sys.__excepthook__(kind, error, frames)
    text = output.getvalue()
    short = FRAME.sub(lambda frame: frame[0] * is_users(frame[1]), text)
    if FRAME.search(short) and "LIGHTBASE_TRACEBACK" not in os.environ:
        text = short.replace(
            "last):", "last), your code only; all with LIGHTBASE_TRACEBACK=1:", 1
        )
    sys.stderr.write(text)
