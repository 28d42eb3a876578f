"""The 95 % intervals of the metrics of a test, for evaluate.py --report: each metric is
computed again without each part of the samples.
"""

import copy
import math
import re
import warnings
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import Tensor
from torchmetrics import MeanMetric, Metric

from lightbase.config.errors import say
from lightbase.data.sampler import seeded_order
from lightbase.model.metrics import Accumulator, numbers, sees_batches
from lightbase.model.module import BaseModule
from lightbase.model.predictions import MISFITS

QUANTILE = 0.975
"""Of a distribution: 2.5 % lie beyond each end of an interval."""

MANY_PARTS = 1000

FEW_PARTS = 100
"""How many parts of the test set are left out, one after the other: of a metric whose
states are sums over samples, and of one that keeps all samples."""

SIGNED = re.compile("Kappa|Matthews|Kendall|ExplainedVariance|Cosine")
"""Metrics of torchmetrics between -1 and 1. Their plot_lower_bound is 0."""


def intervals(
    module: BaseModule,
    outputs: Tensor,
    targets: Tensor,
    support: Tensor,
    groups: Any = None,
) -> dict[str, tuple[float, float]]:
    """Return {curve: (low, high)}, the 95 % intervals of the loss and the metrics.

    They follow from the standard error of the jackknife, which leaves out one sample or
    group after the other (Efron and Stein, "The jackknife estimate of variance", 1981).
    The interval of a loss that does not take what test_step gives to `track` is NaN.
    Metrics that see each batch, and calibration errors, which are biased, have none.

    outputs, targets: All samples of the test, on the CPU.
    support: How many samples or pixels each class has.
    groups: The group of each sample, int64 (N,), or None.
    """
    means = module.curves_callback.means["test"]
    ends: dict[str, tuple[float, float]] = {}
    metrics = [("loss", MeanLoss(module.criterion)), *means.metrics.items()]
    for name, metric in metrics:
        kind = type(metric).__name__
        if sees_batches(metric) or "CalibrationError" in kind:
            continue
        parts = parts_of(metric, len(targets), groups)
        size, freedom = len(targets), math.inf
        if groups is not None:
            size, freedom = len(parts), len(parts) - 1
        metric = metric.clone().cpu()
        metric.distributed_available_fn = lambda: False  # this process has all samples
        try:
            values = values_without_parts(
                means, name, metric, (outputs, targets), parts
            )
        except (ValueError, *MISFITS):
            ends[f"{means.prefix}{name}"] = (math.nan, math.nan)
            continue
        if "Accuracy" not in kind or vars(metric).get("average", "micro") != "micro":
            size = min([size, *support[support > 0].tolist()])
        for curve, value in values[0].items():
            left_out = [x[curve] for x in values[1:] if curve in x]
            if num_lost := len(parts) - len(left_out):
                say(
                    f"{curve} is not defined without some samples: its interval leaves "
                    f"out {num_lost} of {len(parts)} parts of the test"
                )
            ends[curve] = interval(metric, value, np.array(left_out), size, freedom)
    return ends


class MeanLoss(MeanMetric):
    """The mean of a loss over samples."""

    def __init__(self, criterion: Any) -> None:
        super().__init__()
        self.set_dtype(torch.float64)
        self.criterion = criterion

    def update(self, outputs: Tensor, targets: Tensor) -> None:  # type: ignore[override]
        super().update(self.criterion(outputs, targets), len(targets))


def parts_of(metric: Metric, num: int, groups: Any) -> list[Tensor]:
    """Return the positions of the samples of each group, or of each sample. If there
    would be too many parts, each has several."""
    if groups is None:
        groups = seeded_order(num, 0)  # data may be periodic
    largest = MANY_PARTS
    if any(isinstance(state, list) for state in metric.metric_state.values()):
        largest = FEW_PARTS
    ids = torch.as_tensor(groups) % largest
    return [(ids == i).nonzero()[:, 0] for i in ids.unique()]


def values_without_parts(
    means: Accumulator,
    name: str,
    metric: Metric,
    samples: tuple[Tensor, Tensor],
    parts: list[Tensor],
) -> list[dict[str, float]]:
    """Return the values of a metric by curve: for all samples, and then without each
    part. Curves that are not defined are left out. The states of the metric have to be
    sums, or lists of batches.

    means: The accumulator of the test, which names the curves.
    samples, parts: All outputs and targets, and the positions of each part.
    """
    states = []
    for rows in parts:
        metric.reset()
        means.update(name, metric, samples[0][rows], samples[1][rows])
        states.append({key: copy.copy(x) for key, x in metric.metric_state.items()})
    metric.compute_with_cache = False
    for key, first in states[0].items():
        setattr(metric, key, sum([state[key] for state in states[1:]], first))
    totals = metric.metric_state
    values = [defined_values(means, name, metric)]
    for state in states:
        for key, total in totals.items():
            setattr(metric, key, without(state[key], total))
        values.append(defined_values(means, name, metric))
    return values


def without(part: Any, total: Any) -> Any:
    if isinstance(total, Tensor):
        return total - part
    left_out = {id(batch) for batch in part}
    return [batch for batch in total if id(batch) not in left_out]


def defined_values(means: Accumulator, name: str, metric: Metric) -> dict[str, float]:
    """Return the value of a metric by curve, or nothing if torchmetrics warns that it
    means nothing."""
    with warnings.catch_warnings(record=True, action="always") as caught:
        value = means.compute(metric)
    for warning in caught:
        if str(warning.message).startswith(("No positive", "No negative")):
            return {}
    curves = numbers(f"{means.prefix}{name}", value, means.classes)
    return {curve: float(x) for curve, x in curves.items() if np.ndim(x) == 0}


def interval(
    metric: Metric, value: float, left_out: Any, size: float, freedom: float
) -> tuple[float, float]:
    """Return the interval of one value of a metric.

    A metric between two bounds has the interval of `wilson` for the number of samples
    to which its standard error belongs. For an accuracy this is their true number.
    Other metrics have Student's interval.

    left_out: The values without each part of the samples, an array.
    size: The number for `wilson` if no part changes the value, as for an F1 of 1.
    freedom: The degrees of freedom of the standard error.
    """
    num = len(left_out)
    if num < 2:
        return math.nan, math.nan
    low, high = type(metric).plot_lower_bound, type(metric).plot_upper_bound
    if SIGNED.search(type(metric).__name__):
        low = -1.0
    if low is None or high is None or not low <= value <= high:
        values = num * value - (num - 1) * left_out
        mean, error = float(values.mean()), float(stats.sem(values))
        radius = error * float(stats.t.ppf(QUANTILE, num - 1))
        return mean - radius, mean + radius
    width = high - low
    share = (value - low) / width
    if np.ptp(left_out) > 1e-6 * width:
        variance = np.var(left_out / width) * (num - 1)
        size = share * (1 - share) / variance + 1
    first, last = wilson(share, size, freedom)
    return low + width * first, low + width * last


def wilson(share: float, num: float, freedom: float = math.inf) -> tuple[float, float]:
    """Return the 95 % interval of a proportion (Wilson, "Probable inference, the law of
    succession, and statistical inference", 1927).

    share: The proportion that was measured, in [0, 1].
    num: The number of samples, or one with the same standard error.
    freedom: The degrees of freedom of the standard error.
    """
    square = float(stats.t.ppf(QUANTILE, freedom)) ** 2
    radius = math.sqrt(square * (square + 4 * num * share * (1 - share)))
    middle = 2 * num * share + square
    width = 2 * (num + square)
    return (middle - radius) / width, (middle + radius) / width
