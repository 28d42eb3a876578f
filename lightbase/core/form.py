"""The form of a checkpoint: its keys, their types, and how high its counters can be.

A file may be damaged, or made to do harm. So each state is compared with a fresh one
before it is used (`check_form`, `check_like`). If restoring a state fails nevertheless,
`state_errors` turns the error into two lines.
"""

import contextlib
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightbase.core.compat import saved_batches, saved_counters, saved_epochs
from lightbase.core.errors import UserError, first_line

FORM: dict[str, Any] = {
    "package": "",
    "state_dict": {},
    "epoch": 0,
    "global_step": 0,
    "loops": {},
    "callbacks": {"RunRecorder": {"train_seconds": 0.0}},
    "optimizer_states": [],
    "lr_schedulers": [],
    "schedule": {},
    "watched": {},
}
"""Values of the right types for the keys that a checkpoint may have. One with weights
only lacks most of them."""
KINDS: dict[type, Any] = {
    int: int,
    float: int | float | Tensor,
    str: str,
    dict: dict,
    list: list | tuple,
    tuple: list | tuple,
    Tensor: Tensor,
}
"""The types that a saved value may have, by the type of the fresh one."""
MOST_BATCHES = 2**40  # of a training: thirty years at a thousand batches a second
STEPS_A_BATCH = 1000  # of optimizers and schedules, with manual optimization
STATE_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""Errors that reading a wrong state can raise."""
RESTORE = {
    "restore_training_state",
    "_restore_modules_and_callbacks",
    "load_data_state",
    "load_state",
    "check_restart",
    "on_load_checkpoint",
    "on_train_start",
    "check_restored",
}
"""Functions of Lightning and of this library that read the state."""
LIBRARIES = (
    sysconfig.get_path("purelib"),
    sysconfig.get_path("platlib"),
    sysconfig.get_path("stdlib"),
    str(Path(__file__).parents[1]),
    "<",  # code that Python has compiled from text
)
"""How the paths of files begin that are not the user's."""


def check_form(checkpoint: dict[str, Any], path: Path) -> None:
    """Raise UserError for a checkpoint with values of other types than a run writes, or
    with counters that its training cannot have reached. A checkpoint of weights only
    has no counters, and they are not checked.

    checkpoint: The content of a file, see `load_checked`.
    path: The file, for the message.
    """
    try:
        check_like(checkpoint, FORM, "its", is_complete=False)
        if "loops" in checkpoint:
            check_counters(checkpoint)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise UserError(
            f"checkpoint {path} is damaged or no checkpoint: "
            f"{type(error).__name__}: {first_line(error)}"
        ) from error


def check_counters(checkpoint: dict[str, Any]) -> None:
    """Raise LookupError, TypeError or ValueError if a counter of epochs, batches or
    steps is missing, no number, or too high. A resume would count up to it, which may
    take for ever.

    The number of batches limits the other counters: at most STEPS_A_BATCH for each
    batch.
    """
    epochs = {"current": {"ready": 0, "processed": 0}}
    check_like(saved_epochs(checkpoint), epochs, "epochs")
    batches = saved_batches(checkpoint)
    check_like(batches, {"ready": 0}, "the number of batches")
    limit = STEPS_A_BATCH * (batches["ready"] + 1)
    steps = {"epoch": checkpoint["epoch"], "global_step": checkpoint["global_step"]}
    steps |= saved_counters(checkpoint)
    check_like(steps, dict.fromkeys(steps, 0), "the checkpoint", limit)
    for schedule in checkpoint["lr_schedulers"]:
        check_like(schedule, {"last_epoch": 0}, "a schedule", limit)


def check_like(
    saved: Any,
    fresh: Any,
    name: str,
    limit: int = MOST_BATCHES,
    is_complete: bool = True,
) -> None:
    """Raise ValueError if a saved state does not have the form of a fresh one.

    That is so if a value has another type or shape, if a whole number is below -1 or
    above the limit, or if a key is missing. Keys that only the saved state has are
    allowed. Dicts and lists are compared part by part.

    fresh: A state of the right form, such as {"epoch": 0}. None in it allows any value,
        and an empty list allows any list.
    name: What the state is called in the error.
    limit: The highest whole number.
    is_complete: False allows missing keys, for instance in a state of an older torch.
    """
    if fresh is not None and not is_like(saved, fresh, limit):
        raise ValueError(f"{name} is {str(saved)[:40]}")
    if isinstance(fresh, dict):
        for key, value in fresh.items():
            if key in saved:
                check_like(saved[key], value, f"{name} {key}", limit, is_complete)
            elif is_complete:
                raise ValueError(f"{name} has no {key}")
    elif isinstance(fresh, list | tuple):
        for i, value in enumerate(fresh):
            check_like(saved[i], value, f"{name} {i}", limit, is_complete)


def is_like(saved: Any, fresh: Any, limit: int) -> bool:
    """Return whether a saved value has the type, the length or shape, and the range of
    a fresh one. It does not look at the parts of a list or a dict.

    limit: The highest whole number. The lowest is -1.
    """
    if isinstance(saved, bool) or isinstance(fresh, bool):
        return type(saved) is type(fresh)
    for kind, allowed in KINDS.items():
        if isinstance(fresh, kind) and not isinstance(saved, allowed):
            return False
    if isinstance(fresh, int):
        return -1 <= saved <= limit
    if isinstance(fresh, list | tuple):
        return len(saved) == len(fresh) or not fresh
    if isinstance(fresh, float) and isinstance(saved, Tensor):
        return saved.numel() == 1
    if isinstance(fresh, Tensor):
        return (saved.shape, saved.dtype) == (fresh.shape, fresh.dtype)
    return True


@contextlib.contextmanager
def state_errors(path: Path | None) -> Iterator[None]:
    """Within this context, turn an error that a checkpoint's state causes into a
    UserError. Errors in the user's code keep their traceback, and so does a full
    memory.

    path: The checkpoint. None for a new training, in which nothing is changed.
    """
    try:
        yield
    except STATE_ERRORS as error:
        is_memory = isinstance(error, torch.OutOfMemoryError)
        if path is None or is_memory or not is_of_restore(error):
            raise
        reason = f"{type(error).__name__}: {first_line(error)[:200]}"
        raise UserError(
            f"the state in {path} does not fit: {reason}",
            f"a new run can begin with its weights: --model.weights {path}",
        ) from error


def is_of_restore(error: BaseException) -> bool:
    """Return whether an error was raised while a state was read, and not in the user's
    code.

    error: Its traceback decides. It names a function in RESTORE, and all its files
        belong to libraries.
    """
    functions = set()
    for frame in traceback.extract_tb(error.__traceback__):
        if not frame.filename.startswith(LIBRARIES) and ".pyx" not in frame.filename:
            return False
        functions.add(frame.name)
    return not functions.isdisjoint(RESTORE)
