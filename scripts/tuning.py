"""What tune.py goes by and shows: the time of each batch, the loss over a rising learning rate, a
curve of either."""

import itertools
import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from lightning import LightningDataModule, LightningModule
from lightning.pytorch.profilers import Profiler

from project.base.errors import UserError
from project.callbacks import charts

SMOOTHING = 0.98  # of the losses that Lightning's finder reports


def argument(owner: LightningModule | LightningDataModule, *names: str) -> tuple[str, Any]:
    """The first of the names that is one of its attributes or hyper-parameters, and the value.
    Raises UserError."""
    known = {**owner.hparams, **vars(owner)}
    for name in names:
        if name in known:
            return name, known[name]
    raise UserError(
        f"{type(owner).__name__} has no {' or '.join(names)}, neither as an attribute nor in "
        "its hparams"
    )


class TrialClock(Profiler):
    """Times every batch, from its loading to the end of its step, by batch size."""

    def __init__(self, data: LightningDataModule) -> None:
        super().__init__()
        self.data = data
        self.seconds: dict[int, list[float]] = {}

    def start(self, action_name: str) -> None:
        if action_name.endswith("train_dataloader_next"):
            self.since = time.perf_counter()

    def stop(self, action_name: str) -> None:
        if action_name == "run_training_batch":
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
            self.seconds.setdefault(argument(self.data, "batch_size")[1], []).append(
                time.perf_counter() - self.since
            )


def batch_losses(smoothed: Sequence[float]) -> list[float]:
    """The loss of each batch, out of the means that Lightning's finder reports: they lag behind by
    some 50 batches, and they start at half the loss, since 2.6 divides the i-th mean by 1 -
    0.98^(i+1) where 1 - 0.98^i would be right. From a loss that is not finite on there are none."""
    sums = [loss * (1 - SMOOTHING ** (i + 2)) for i, loss in enumerate(smoothed)]
    losses = [
        (this - SMOOTHING * before) / (1 - SMOOTHING)
        for before, this in itertools.pairwise([0.0, *sums])
    ]
    return list(itertools.takewhile(math.isfinite, losses))


def width(num_losses: int) -> float:
    return max(1.0, num_losses / 40)


def smooth(losses: Sequence[float]) -> np.ndarray:
    """Each a mean of its neighbours, weighted by a normal curve, so of about 3.5 times its
    width."""
    position = np.arange(len(losses))
    weights = np.exp(-0.5 * ((position[:, None] - position) / width(len(losses))) ** 2)
    return weights @ np.asarray(losses) / weights.sum(1)


def choose(
    rates: Sequence[float], losses: Sequence[float], num_steps: int
) -> tuple[int | None, str]:
    """Index of the suggested rate, or None, and the reason.

    rates, losses: of each step, fewer than `num_steps` where the loss ran away.
    Lightning's own suggestion is where the loss falls most steeply over the rate, not over its
    logarithm: nearly always on noise among the smallest rates.
    """
    if len(rates) <= 20:
        return None, "the loss is lost at once: give a smaller --min_lr"
    curve = smooth(losses)
    lowest = int(curve.argmin())
    fall = curve[0] - curve[lowest]
    noise = float(np.std(losses[: lowest + 1] - curve[: lowest + 1])) / math.sqrt(
        3.5 * width(len(losses))
    )
    first, last = f"{rates[0]:.2g}", f"{rates[-1]:.2g}"
    if fall < max(5 * noise, 0.002 * abs(curve[0])):
        if len(rates) < num_steps - 1:
            return (
                None,
                f"the loss runs away at {last} before it falls: give more --num_steps or a "
                "smaller --min_lr",
            )
        return (
            None,
            f"the loss does not fall from {first} to {last}: give a larger --max_lr or more "
            "--num_steps",
        )
    # the valley is flat: its far end, where 95 % of the fall is still there
    end = int(np.flatnonzero(curve < curve[lowest] + 0.05 * fall)[-1])
    if end >= num_steps - 3:
        return None, f"the loss still falls at --max_lr {last}: give a larger one"
    if rates[end] / 10 < rates[0]:
        return (
            None,
            f"the loss is low up to {rates[end]:.1e}, a tenth of which is below --min_lr "
            f"{first}: lower that",
        )
    best = int(np.searchsorted(rates, rates[end] / 10))
    return (
        best,
        f"The loss is low up to a learning rate of {rates[end]:.1e}, a tenth of which is safe",
    )


def draw_curve(
    x: Sequence[float],
    y: Sequence[float],
    chosen: int | None,
    x_label: str,
    y_label: str,
    title: str,
) -> Any:
    """y over x on a logarithmic axis, one point marked."""
    figure, axes = charts.new_figure(6, 4, title, x_label, y_label)
    axes.plot(x, y, marker="o" if len(x) < 30 else None, markersize=4, color=charts.COLOURS[0])
    if chosen is not None:
        axes.plot(x[chosen], y[chosen], marker="o", markersize=10, color=charts.COLOURS[3])
    axes.set_xscale("log")
    return figure
