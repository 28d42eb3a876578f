"""A user's mistake: the bad value, the way out, an exit status."""

import difflib
import pkgutil
import re
import traceback
from collections.abc import Callable, Iterable
from typing import Any

from lightbase.ranks import printable_lines


class UserError(Exception):
    """A mistake in the input, not in the code: the message names the bad value and the way out in
    two lines at most.

    status: exit status of the script, 2 for a wrong command line or config, 1 for what goes wrong
    in the run (files, data, devices).
    """

    def __init__(self, message: str, status: int = 1) -> None:
        super().__init__(printable_lines(message))  # it may quote a file
        self.status = status


def did_you_mean(word: str, known: Iterable[str], before: str = "") -> str:
    """`; did you mean X?`, whatever the case, or nothing where nothing is near. before: stands
    before each of them."""
    by_lower = {name.lower(): name for name in known}
    near = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=0.65)
    return f"; did you mean {before}{by_lower[near[0]]}?" if near else ""


def first_line(error: Exception) -> str:
    """Of its message; the name of its class where it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].strip()


def is_raised_on_purpose(error: Exception) -> bool:
    """Whether the line that raised the error is a raise statement, and not a call gone wrong."""
    where = traceback.extract_tb(error.__traceback__)[-1]
    return (where.line or "").startswith("raise ")


IMPORT_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")


def imported(argument: str, path: str) -> Any:
    """Raises UserError where there is nothing; argument: of the model, which has the path as its
    value."""
    if not IMPORT_PATH.fullmatch(path):
        raise UserError(f"model.{argument} {path!r} is no import path such as torch.optim.SGD", 2)
    try:
        return pkgutil.resolve_name(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(f"model.{argument} {path!r} cannot be imported: {error}", 2) from error


def function_at(argument: str, path: str | Callable[..., Any] | None) -> Callable[..., Any] | None:
    """A function, or what a path to one names."""
    found = imported(argument, path) if isinstance(path, str) else path
    if found is not None and not callable(found):
        raise UserError(
            f"model.{argument} {path!r} is a {type(found).__name__}, where a function belongs", 2
        )
    return found  # type: ignore[no-any-return]
