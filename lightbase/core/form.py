"""The form of a checkpoint: its keys, their types, and how far its counters can have
got."""

import contextlib
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from lightbase.core.errors import UserError, first_line

TYPES: dict[str, type] = {
    "package": str,
    "state_dict": dict,
    "epoch": int,
    "global_step": int,
    "loops": dict,
    "callbacks": dict,
    "optimizer_states": list,
    "lr_schedulers": list,
    "schedule": dict,
    "watched": dict,
}
"""The types of keys that a checkpoint may have. One with weights only lacks most of
them."""
MOST_BATCHES = 2**40  # of a training: thirty years at a thousand batches a second
STEPS_A_BATCH = 1000  # of optimizers and schedules, with manual optimization
STATE_ERRORS = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError),
    *(RuntimeError, TypeError, ValueError),
)


def check_form(checkpoint: dict[str, Any], path: Path) -> None:
    """Raise UserError for a checkpoint with values of other types than a run writes, or
    with counters that its training cannot have reached."""
    try:
        for key, kind in TYPES.items():
            value = checkpoint.get(key, kind())
            if not isinstance(value, kind) or isinstance(value, bool):
                raise ValueError(f"{key} is a {type(value).__name__}")
        if "loops" in checkpoint:
            limit = most_steps(checkpoint)
            counters = {key: checkpoint[key] for key in ("epoch", "global_step")}
            counters |= checkpoint["loops"]["fit_loop"]["epoch_loop.state_dict"]
            epochs = {"current": {"ready": 0, "processed": 0}}
            check_like(
                checkpoint["loops"]["fit_loop"]["epoch_progress"], epochs, "epochs"
            )
            check_like(counters, dict.fromkeys(counters, 0), "the checkpoint", limit)
            for schedule in checkpoint["lr_schedulers"]:
                check_like(schedule, {"last_epoch": 0}, "a schedule", limit)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise UserError(
            f"checkpoint {path} is damaged or no checkpoint: {reason}"
        ) from error


def most_steps(checkpoint: dict[str, Any]) -> int:
    """The highest number of steps that the training of a checkpoint can have made."""
    batches = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]["total"]
    check_like(batches, {"ready": 0}, "the number of batches", MOST_BATCHES)
    return STEPS_A_BATCH * int(batches["ready"] + 1)


def check_like(
    saved: Any,
    fresh: Any,
    name: str,
    limit: int = MOST_BATCHES,
    is_complete: bool = True,
) -> None:
    """Raise ValueError where a saved state has values of other kinds or shapes than a
    fresh one, whole numbers below -1 or over the limit, or lacks keys.

    name: What the state is of. is_complete: False allows missing keys, of an older
        torch.
    """
    kinds = next(
        (kinds for kind, kinds in KINDS.items() if isinstance(fresh, kind)), object
    )
    is_of_kind = isinstance(saved, kinds) and isinstance(saved, bool) <= isinstance(
        fresh, bool
    )
    if isinstance(fresh, list | tuple):
        is_of_kind = is_of_kind and len(saved) == len(fresh)
    elif isinstance(fresh, torch.Tensor):
        is_of_kind = is_of_kind and (saved.shape, saved.dtype) == (
            fresh.shape,
            fresh.dtype,
        )
    elif isinstance(fresh, int):
        is_of_kind = is_of_kind and -1 <= saved <= limit
    if fresh is not None and not is_of_kind:
        raise ValueError(f"{name} is {str(saved)[:40]}")
    if isinstance(fresh, dict):
        saved, fresh = {**saved}, {**fresh}
    elif isinstance(fresh, list | tuple):
        saved, fresh = dict(enumerate(saved)), dict(enumerate(fresh))
    else:
        return
    for key, value in fresh.items():
        if key in saved:
            check_like(saved[key], value, f"{name} {key}", limit, is_complete)
        elif is_complete:
            raise ValueError(f"{name} has no {key}")


KINDS: dict[Any, Any] = {
    bool: bool,
    int: int,
    float: int | float | torch.Tensor,
    str: str,
    dict: dict,
    list: list | tuple,
    tuple: list | tuple,
    torch.Tensor: torch.Tensor,
}
"""The types that a saved value may have, by the type of the fresh one."""


@contextlib.contextmanager
def state_errors(path: Path | None) -> Iterator[None]:
    """While a checkpoint is restored, put an error that its state causes into two
    lines. Errors in the user's code keep their traceback. path: None for a new
    training."""
    try:
        yield
    except STATE_ERRORS as error:
        is_memory = isinstance(error, torch.OutOfMemoryError)
        if path is None or is_memory or not is_of_restore(error):
            raise
        reason = f"{type(error).__name__}: {first_line(error)[:200]}"
        way_out = f"a new run can begin with its weights: --model.weights {path}"
        raise UserError(
            f"the state in {path} does not fit: {reason}", way_out
        ) from error


RESTORE = {
    *("restore_training_state", "_restore_modules_and_callbacks", "load_data_state"),
    *(
        "load_state",
        "check_resume",
        "on_load_checkpoint",
        "on_train_start",
        "check_restored",
    ),
}
"""Functions of Lightning and of this library that read the state."""


def is_of_restore(error: BaseException) -> bool:
    """Whether an error was raised while a state was read, and not in the user's
    code."""
    frames = traceback.extract_tb(error.__traceback__)
    places = [sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib")]
    places.append(str(Path(__file__).parents[2]))
    is_ours = all(
        x.filename.startswith((*places, "<")) or ".pyx" in x.filename for x in frames
    )
    return is_ours and any(frame.name in RESTORE for frame in frames)
