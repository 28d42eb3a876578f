"""A user's mistake: the bad value, the way out, an exit status. Lines that only the
first process prints. Scripts import this file before torch, which takes seconds."""

import difflib
import functools
import os
import pkgutil
import re
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

# Noted before torch is imported, which takes seconds: the parent process may have ended
# by then.
STARTED_BY = os.getppid()
# where torchrun, SLURM, LSF and Lightning put the rank; there is no Trainer yet
VARIABLES = (
    "RANK",
    "SLURM_PROCID",
    "JSM_NAMESPACE_RANK",
    "LOCAL_RANK",
    "NODE_RANK",
    "GROUP_RANK",
)


class UserError(Exception):
    """A mistake in the input, not in the code.

    problem: The bad value and what is wrong with it, in one line.
    way_out: What the user can do, in one line.
    status: Exit status of the script: 2 for a wrong command line or config, 1 for
        errors of the run (files, data, devices).
    """

    def __init__(self, problem: str, way_out: str = "", status: int = 1) -> None:
        # If this error is raised in a worker of a DataLoader, torch makes another one,
        # whose message is the traceback.
        problem = problem.rpartition("lightbase.core.errors.UserError: ")[2]
        message = f"{problem.rstrip()}\n{way_out}".rstrip()
        super().__init__(printable_lines(message))  # the message may quote a file
        self.status = status


def did_you_mean(word: str, names: Iterable[str], before: str = "") -> str:
    """`; did you mean X?` with the name next to `word`, in any case; empty if none is
    similar.
    names: A dict has what is printed of each name. before: Printed before it."""
    by_lower = {
        name.lower(): names[name] if isinstance(names, dict) else name for name in names
    }
    near = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=0.65)
    return f"; did you mean {before}{by_lower[near[0]]}?" if near else ""


def first_line(error: Exception) -> str:
    """The first line of the message; the name of the class if there is no message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].strip()


def raised_at(error: BaseException) -> tuple[Path, str]:
    """The file and the line of code that raised an error."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return Path(frame.filename), frame.line or ""


IMPORT_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")


def imported(argument: str, path: str) -> Any:
    """The object at an import path. argument: the model's argument that has this value.
    Raises UserError if there is no such object."""
    if not IMPORT_PATH.fullmatch(path):
        raise UserError(
            f"model.{argument} {path!r} is no import path such as torch.optim.SGD",
            status=2,
        )
    try:
        return pkgutil.resolve_name(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(
            f"model.{argument} {path!r} cannot be imported: {error}", status=2
        ) from error


def rank() -> int:
    """0 in the first process, above 0 in the others."""
    ranks = [os.environ.get(name, "0") for name in VARIABLES]
    return next((int(rank) for rank in ranks if rank != "0"), 0)


def say(text: str) -> None:
    """Print lines, in the first process only."""
    if rank() == 0:
        print(printable_lines(text), flush=True)


@functools.cache
def say_once(text: str) -> None:
    say(text)


def printable_lines(text: str) -> str:
    """Lines without control characters, which become escapes such as \\x1b."""
    return "\n".join(map(printable, text.replace("\t", " ").split("\n")))


def printable(text: str) -> str:
    """One line without control characters: a line break becomes \\n."""
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode() for c in text
    )
