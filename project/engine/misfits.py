"""A network, loss or metric of an installed package that cannot take what it is given: two lines, no traceback."""

import contextlib
import traceback
from collections.abc import Iterator
from pathlib import Path

import torch
from lightning import LightningModule
from torchmetrics import Metric

from project.base.errors import UserError, first_line

PACKAGES = Path(torch.__file__).parents[1]


def is_of_library(error: Exception) -> bool:
    """Whether an installed package refuses what it is given: in a network of its own for any reason, below a network
    of the user's by what torch raises for a wrong shape or type. Everything else may be a bug of the user's."""
    foreign = [PACKAGES in Path(line.filename).parents for line in traceback.extract_tb(error.__traceback__)[1:]]
    return all(foreign) or (foreign[-1] and isinstance(error, RuntimeError | ValueError | AssertionError))


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
                what = f"{type(part).__name__}, {where}, cannot take what it is given: {first_line(error)}"
                way_out = "take another criterion or metric, or make outputs and targets fit it"
                raise UserError(f"{what}\n{way_out}") from error
        raise
