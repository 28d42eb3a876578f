"""What an import path names."""

import pkgutil
import re
from collections.abc import Callable
from typing import Any

from project.base.errors import UserError

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
