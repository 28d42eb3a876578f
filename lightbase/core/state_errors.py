"""Errors while the state in a checkpoint is restored, in two lines.

The user's code may have changed since the checkpoint was written. Then its state does
not fit the objects that are there now.
"""

import contextlib
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path

import torch

from lightbase.core.errors import UserError, first_line, raised_at

RESTORE = {
    "restore_training_state",
    "_restore_modules_and_callbacks",
    "load_data_state",
    "load_state",
    "check_restart",
    "check_restored",
}
"""Functions of Lightning and of this library that read the state."""
LIBRARIES = (
    sysconfig.get_path("purelib"),
    sysconfig.get_path("platlib"),
    str(Path(__file__).parents[1]),
)
"""The folders of code that is not the user's."""


@contextlib.contextmanager
def state_errors(path: Path | None) -> Iterator[None]:
    """Within this context, turn an error that a checkpoint's state causes into a
    UserError. Errors in the user's code keep their traceback, and so does a full
    memory.

    path: The checkpoint. None for a new training, in which nothing is changed.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, UserError | torch.OutOfMemoryError):
            raise
        if path is None or not is_of_restore(error):
            raise
        reason = f"{type(error).__name__}: {first_line(error)[:200]}"
        raise UserError(
            f"the state in {path} does not fit: {reason}",
            f"a new run can begin with its weights: --model.weights {path}",
        ) from error


def is_of_restore(error: Exception) -> bool:
    """Return whether an error was raised while a state was read, and not in the user's
    code: a function in RESTORE was called, and the code that failed is a library's."""
    functions = {frame.name for frame in traceback.extract_tb(error.__traceback__)}
    file, _ = raised_at(error)
    return str(file).startswith(LIBRARIES) and not functions.isdisjoint(RESTORE)
