"""A loss or a metric that cannot take what a step gives it: two lines instead of torch's traceback."""

import contextlib
import traceback
from collections.abc import Iterator
from pathlib import Path

import torch
from lightning import LightningModule
from torchmetrics import Metric

from project.base.errors import UserError

PACKAGES = Path(torch.__file__).parents[1]


@contextlib.contextmanager
def short_misfits(model: LightningModule) -> Iterator[None]:
    """Where the criterion or a metric is one of an installed package; in one of the user's own it may be a bug."""
    try:
        yield
    except Exception as error:
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        lines = traceback.extract_tb(error.__traceback__)
        for i, frame in enumerate(frames):
            part = frame.f_locals.get("self")
            is_part = isinstance(part, Metric) or (part is not None and part is getattr(model, "criterion", None))
            if is_part and all(PACKAGES in Path(line.filename).parents for line in lines[i:]):
                caller = next(line for line in reversed(lines[:i]) if PACKAGES not in Path(line.filename).parents)
                where = f"called in {Path(caller.filename).name}, line {caller.lineno}"
                reason = (str(error).strip() or type(error).__name__).splitlines()[0]
                raise UserError(
                    f"{type(part).__name__}, {where}, cannot take what it is given: {reason}\n"
                    "take another criterion or metric, or make outputs and targets fit it"
                ) from error
        raise
