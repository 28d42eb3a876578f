"""The error of a user's mistake, and lines that only the first process prints.

Scripts import this file before torch, which takes seconds. So it imports no other file
of the library.
"""

import difflib
import inspect
import os
import pkgutil
import re
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

RANK_VARIABLES = (
    "RANK",
    "SLURM_PROCID",
    "JSM_NAMESPACE_RANK",
    "LOCAL_RANK",
    "NODE_RANK",
    "GROUP_RANK",
)
"""Where torchrun, SLURM, LSF and Lightning put the rank of a process."""

SEE_HELP = "see --help, or --print_config for every argument"

LIBRARY = Path(__file__).parents[1]

PACKAGES = re.compile(
    r"<|.*[/\\](?:(?:site|dist)-packages[/\\]|lib/python3[.\d]*/|Python3\d+\\Lib\\)"
)
"""Beginnings of files of Python and of installed packages."""


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
        problem = problem.rpartition("lightbase.config.errors.UserError: ")[2]
        super().__init__(f"{problem.rstrip()}\n{way_out}".rstrip())
        self.status = status

    def _render_traceback_(self) -> list[str]:
        """Return the lines that a notebook shows in place of a traceback."""
        return f"error: {self}".splitlines()


def did_you_mean(word: str, names: Iterable[str], before: str = "") -> str:
    """Return `; did you mean X?` with the name that is most similar to `word`, or ""
    if none is similar. Upper and lower case count as equal.

    names: The names; a dict maps each name to the text that is printed for it.
    before: A text that is printed before the name.
    """
    if not isinstance(names, dict):
        names = {name: name for name in names}
    texts = {name.lower(): text for name, text in names.items()}
    similar = difflib.get_close_matches(word.lower(), texts, n=1, cutoff=0.65)
    if not similar:
        return ""
    return f"; did you mean {before}{texts[similar[0]]}?"


def first_line(error: Exception) -> str:
    """Return the first line of the message, or the name of the class if there is no
    message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].strip()


def is_users(filename: str) -> bool:
    """Return whether a file, as a traceback names it, has code of the user: it is not
    the library's, of scripts/ beside it, or of a package."""
    path = Path(filename)
    if path.is_relative_to(LIBRARY):
        return path.is_relative_to(LIBRARY / "tests")
    is_script = path.parent == LIBRARY.parent / "scripts"
    return not is_script and not PACKAGES.match(filename)


def own_line(error: BaseException | None) -> str:
    """Return the last line of the user's code in the traceback of an error, or "".

    The traceback of a worker process is in the message of its error, and a SyntaxError
    has a line without a function.
    """
    text = "".join(traceback.format_exception(error))
    lines = re.findall(r'File "(.+)", line (\d+).*\n +(.+)', text)
    for file, number, code in reversed(lines):
        if is_users(file):
            return f"in {file}, line {number}: {code}"
    return ""


def imported(argument: str, path: str, base: type | None = None) -> Any:
    """Return the object at an import path, such as torch.optim.SGD.

    argument: The argument that has this path, for the message.
    base: The object has to be a subclass of this class, or a function that is annotated
        to return one.
    """
    try:
        # without the colon, an error within the module would be lost
        found = pkgutil.resolve_name(":".join(path.rsplit(".", 1)))
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(
            f"{argument} {path!r} cannot be imported: {error}",
            own_line(error)
            or "give package.module.NAME, or the bare name of a class of your package",
            2,
        ) from error
    made = found
    if inspect.isfunction(found):
        made = found.__annotations__.get("return")
    if base and not (isinstance(made, type) and issubclass(made, base)):
        problem = wrong_kind(argument, path, found, base.__name__)
        raise UserError(problem, SEE_HELP, 2)
    return found


def wrong_kind(argument: str, path: str, found: Any, needed: str) -> str:
    """Return the message for an import path that names something else than an argument
    needs.

    found: What the path names.
    needed: The name of the class whose subclasses the argument takes.
    """
    kind = f"the {type(found).__name__} {str(found)[:40]}"
    if inspect.ismodule(found):
        kind = "a module"
    elif isinstance(found, type):
        kind = "another class"
    elif callable(found):
        kind = "a function"
    return f"{argument} {path!r} is {kind}, not a subclass of {needed}"


def rank() -> int:
    """Return 0 in the first process, and a number above 0 in the others. It is read
    from the environment, so it is known before there is a Trainer."""
    return max(int(os.environ.get(name, "0")) for name in RANK_VARIABLES)


def say(text: str) -> None:
    """Print lines, in the first process only."""
    if rank() == 0:
        print(text, flush=True)
