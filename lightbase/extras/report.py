"""The tables of evaluate.py --report: the interval of each metric, the scores of each
class, and which classes the network mixes up."""

import copy
import math
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning import Callback
from scipy import stats
from torch import Tensor
from torchmetrics import Metric

from lightbase.core.batches import seeded_order, to_host
from lightbase.core.curves import gather
from lightbase.core.data import BaseDataModule
from lightbase.core.errors import UserError, say
from lightbase.core.files import relative_to_cwd, write_whole
from lightbase.core.metrics import Accumulator, defined_value, numbers, sees_batches
from lightbase.core.module import BaseModule
from lightbase.core.predictions import MISFITS, class_names, columns_of, confusion
from lightbase.core.splits import as_groups
from lightbase.core.tables import as_csv, as_table

TASKS = ("multiclass", "multilabel", "segmentation")
"""The tasks that have classes or labels."""
QUANTILE = 0.975
"""Of a distribution: 2.5 % lie beyond each end of an interval."""
MAX_OUTPUTS = 2**14
"""Samples with more outputs, such as large masks, are not kept for the intervals."""
MANY_PARTS = 1000
FEW_PARTS = 100
"""How many parts of the test set are left out, one after the other: of a metric whose
states are sums over samples, and of others."""
SIGNED = re.compile("Kappa|Matthews|Kendall|ExplainedVariance|Cosine")
"""Metrics of torchmetrics between -1 and 1. Their plot_lower_bound is 0."""


def class_counts(
    task: str, outputs: Tensor, targets: Tensor, ignored: int | None = None
) -> Tensor:
    """Return the counts of a batch for the report: a confusion matrix, see `confusion`.
    For multilabel return six counts of each label, int64 (6, labels): the samples that
    have the label, the outputs outside [0, 1], the right predictions and all
    predictions if the outputs are probabilities, and the same two if they are logits.
    Only the whole test tells which of the two they are.

    task: One of TASKS.
    ignored: A target that counts in none of them.
    Raise one of MISFITS if the values do not fit the task.
    """
    if task == "multilabel":
        true = targets > 0.5
        counts = [true, (outputs < 0) | (outputs > 1)]
        for threshold in (0.5, 0.0):
            predicted = (outputs > threshold) & (targets != ignored)
            counts += [true & predicted, predicted]
        return torch.stack(counts).sum(1)
    true, predicted, *_ = columns_of(task, outputs, targets, ignored)
    return confusion(true, predicted, max(2, outputs.shape[1]))


class MeanLoss(Metric):
    """The mean of a loss over samples."""

    total: Tensor
    num: Tensor
    full_state_update = False

    def __init__(self, criterion: Any) -> None:
        super().__init__()
        self.criterion = criterion
        self.add_state("total", torch.zeros((), dtype=torch.float64))
        self.add_state("num", torch.tensor(0))

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        self.total = self.total + self.criterion(outputs, targets) * len(targets)
        self.num = self.num + len(targets)

    def compute(self) -> Any:
        return self.total / self.num


class Resamples:
    """Computes a metric on other samples than those of the test.

    means: The accumulator of the test, which names the curves.
    name, metric: The metric, which is changed.
    outputs, targets: All samples of the test, on the CPU.
    groups: The group of each sample, int64 (N,), or None.
    values: The value on all samples by curve.
    is_sum: Whether the states of the metric are sums over samples. Then leaving out a
        few samples takes the time of the few.
    """

    def __init__(
        self,
        means: Accumulator,
        name: str,
        metric: Metric,
        outputs: Tensor,
        targets: Tensor,
        groups: Any,
    ) -> None:
        self.means, self.name, self.metric = means, name, metric
        self.outputs, self.targets, self.groups = outputs, targets, groups
        rows = torch.arange(len(targets))
        halves = [self.states(half, targets) for half in rows.chunk(2)]
        metric.reset()
        self.start = copy.deepcopy([*metric.metric_state.values()])
        self.total = self.states(rows, targets)
        self.values = self.computed()
        self.is_sum = all(map(is_sum, self.start, self.total, *halves))

    def states(self, rows: Tensor, targets: Tensor) -> list[Any]:
        """Return the states of the metric for the samples at these positions."""
        self.metric.reset()
        self.means.update(self.name, self.metric, self.outputs[rows], targets[rows])
        return [*self.metric.metric_state.values()]

    def computed(self) -> dict[str, float]:
        """Return the value by curve. It is NaN if the metric is not defined."""
        name = f"{self.means.prefix}{self.name}"
        parts = numbers(name, defined_value(self.metric, 2), self.means.classes)
        return {curve: float(x) for curve, x in parts.items() if np.ndim(x) == 0}

    def parts(self, largest: int) -> Sequence[Tensor]:
        """Return the positions of the samples of each group, or of each sample. If
        there would be more than `largest` parts, each has several."""
        if self.groups is None:  # shuffled, because data may be periodic
            return seeded_order(len(self.targets), 0).chunk(largest)
        ids = torch.as_tensor(self.groups) % largest
        return [(ids == i).nonzero()[:, 0] for i in ids.unique()]

    def without_parts(self) -> list[dict[str, float]]:
        """Return the values by curve without each part of the samples."""
        values = []
        for rows in self.parts(MANY_PARTS if self.is_sum else FEW_PARTS):
            if self.is_sum:
                left_out = self.states(rows, self.targets)
                for i, name in enumerate(self.metric.metric_state):
                    state = self.total[i] - left_out[i] + self.start[i]
                    setattr(self.metric, name, state)
            else:
                is_left = torch.ones(len(self.targets), dtype=torch.bool)
                self.states(is_left.index_fill(0, rows, False), self.targets)
            values.append(self.computed())
        return values

    @cached_property
    def with_mistakes(self) -> list[dict[str, float]]:
        """The values by curve if a group or sample had the targets of another class,
        for at most FEW_PARTS of them."""
        num_classes = 2
        if self.outputs.dim() > self.targets.dim():
            num_classes = max(2, self.outputs.shape[1])
        others = (self.targets + 1) % num_classes
        values = []
        for rows in self.parts(FEW_PARTS):
            if self.groups is None:
                rows = rows[:1]
            targets = self.targets.clone()
            targets[rows] = others[rows]
            self.states(torch.arange(len(targets)), targets)
            values.append(self.computed())
        return values


def is_sum(start: Any, total: Any, *parts: Any) -> bool:
    """Return whether a state of a metric is the sum of its values on two parts."""
    if not isinstance(total, Tensor):
        return False
    return torch.allclose(sum(parts).double(), (total + start).double(), rtol=1e-4)


def intervals(
    module: BaseModule, outputs: Tensor, targets: Tensor, groups: Any = None
) -> dict[str, tuple[float, float]]:
    """Return {curve: (low, high)}, the 95 % intervals of the loss and the metrics.

    They follow from the standard error of the jackknife, which leaves out one sample or
    group after the other (Efron and Stein, "The jackknife estimate of variance", 1981).
    The interval of the loss is NaN if the criterion does not take what test_step gives
    to `track`. Metrics that see each batch, and calibration errors, which are biased,
    have no interval.

    outputs, targets: All samples of the test, on the CPU.
    groups: The group of each sample, int64 (N,), or None.
    """
    means = module.curves_callback.means["test"]
    ends: dict[str, tuple[float, float]] = {}
    metrics = [("loss", MeanLoss(module.criterion)), *means.metrics.items()]
    for name, metric in metrics:
        if sees_batches(metric) or "CalibrationError" in type(metric).__name__:
            continue
        metric = metric.clone().cpu()
        metric.distributed_available_fn = lambda: False  # this process has all samples
        try:
            samples = Resamples(means, name, metric, outputs, targets, groups)
        except (ValueError, *MISFITS):
            ends[f"{means.prefix}{name}"] = (math.nan, math.nan)
            continue
        values = samples.without_parts()
        for curve in samples.values:
            left_out = np.array([x.get(curve, math.nan) for x in values])
            ends[curve] = interval(samples, curve, left_out)
    return ends


def interval(samples: Resamples, curve: str, left_out: Any) -> tuple[float, float]:
    """Return the interval of one curve.

    A metric between two bounds has the interval of `wilson` for the number of samples
    to which its standard error belongs. For an accuracy this is their true number. If
    no sample changes the value, as for an F1 of 1, the number follows from the changes
    by mistakes. Other metrics have the interval of `mean_interval`.

    left_out: The values without each part of the samples, an array.
    """
    value = samples.values[curve]
    defined = left_out[~np.isnan(left_out)]
    num = len(defined)
    if math.isnan(value) or num < 2:
        return math.nan, math.nan
    if num < len(left_out):
        say(
            f"{curve} is not defined without some samples: its interval leaves out "
            f"{len(left_out) - num} of {len(left_out)} parts of the test"
        )
    kind = type(samples.metric)
    low, high = kind.plot_lower_bound, kind.plot_upper_bound
    if SIGNED.search(kind.__name__):
        low = -1.0
    if low is None or high is None or not low <= value <= high:
        return mean_interval(num * value - (num - 1) * defined)
    width = high - low
    share = (value - low) / width
    variance = np.var(defined / width) * (num - 1)
    if np.ptp(defined) > 1e-6 * width:
        size = share * (1 - share) / variance + 1
    else:
        changes = np.abs([x[curve] - value for x in samples.with_mistakes]) / width
        size = np.nansum(changes) / max(np.nansum(changes**2), 1e-12)
    freedom = math.inf
    if samples.groups is not None:
        freedom = num - 1
    first, last = wilson(share, float(size), freedom)
    return low + width * first, low + width * last


def wilson(share: float, num: float, freedom: float = math.inf) -> tuple[float, float]:
    """Return the 95 % interval of a proportion (Wilson, "Probable inference, the law of
    succession, and statistical inference", 1927).

    share: The proportion that was measured, in [0, 1].
    num: The number of samples. It may be a number with the same standard error.
    freedom: The degrees of freedom of the standard error, infinity for a normal one.
    """
    square = float(stats.t.ppf(QUANTILE, freedom)) ** 2
    radius = math.sqrt(square * (square + 4 * num * share * (1 - share)))
    middle = 2 * num * share + square
    width = 2 * (num + square)
    return (middle - radius) / width, (middle + radius) / width


def mean_interval(values: Any) -> tuple[float, float]:
    """Return the 95 % interval of the mean of values: Student's. If no value is
    negative, it is Student's for the logarithm of the mean, because losses are skewed.

    values: An array (n,), n at least 2.
    """
    mean = float(np.mean(values))
    radius = float(stats.sem(values) * stats.t.ppf(QUANTILE, len(values) - 1))
    if mean > 0 and min(values) >= -1e-6 * mean:  # 0 but for rounding
        factor = math.exp(radius / mean)
        return mean / factor, mean * factor
    return mean - radius, mean + radius


def groups_of_test(data: Any, num: int) -> Any:
    """Return the group of each test sample, int64 (N,), with val_split grouped. Return
    None for single samples. Print a line if the groups are unknown."""
    if not isinstance(data, BaseDataModule) or data.val_split != "grouped":
        return None
    groups = data.split_groups.get("test")
    if groups is None:
        say(
            "Intervals: the groups of the test set are unknown, so they hold for "
            "independent samples; load may set self.split_groups['test']"
        )
        return None
    return as_groups(groups, len(groups), type(data).__name__)[:num]


class ClassReport(Callback):
    """Writes intervals.csv, the metrics with their intervals, and report.csv, the
    scores of each class or label, at the end of a test. For multiclass and segmentation
    it also writes confusion_matrix.csv. The files cover all samples that test_step
    gives to `track`, in all processes.

    folder: The folder for the files. It must exist.
    lines: The first two tables as lines for the terminal. Empty before the test has
        ended.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lines: list[str] = []
        self.counts = torch.tensor(0)  # the sum of `class_counts`
        self.batches: list[Any] = []  # outputs and targets

    def on_test_start(self, trainer: Any, pl_module: Any) -> None:
        """Raise UserError if the task has no classes."""
        if not isinstance(pl_module, BaseModule) or pl_module.task not in TASKS:
            raise UserError(
                f"--report: {type(pl_module).__name__} predicts no classes",
                f"its attribute task has to be one of {', '.join(TASKS)}",
                2,
            )

    def on_test_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        """Count the predictions that the step has given to `track`. Raise UserError if
        they do not fit the task."""
        try:
            outputs, targets = pl_module.tracked
            ignored = pl_module.curves_callback.ignored_target
            counts = class_counts(pl_module.task, outputs.float(), targets, ignored)
        except MISFITS as error:
            raise UserError(
                f"what test_step gives track does not fit task {pl_module.task}",
                status=2,
            ) from error
        self.counts = self.counts + counts
        if outputs[0].numel() <= MAX_OUTPUTS:
            self.batches.append(to_host(pl_module.tracked))
        pl_module.tracked = None  # the next step may not call `track`

    def on_test_end(self, trainer: Any, pl_module: Any) -> None:
        """Write the files, and fill `lines`; only the first process does."""
        counts = sum(gather(self.counts.cpu()))
        columns: list[Tensor] = []
        if self.batches:  # rank r of n has the samples r, r + n, r + 2 n, ...
            outputs, targets = map(torch.cat, zip(*self.batches, strict=True))
            places = torch.arange(len(targets)) * trainer.world_size
            columns = [outputs, targets, places + trainer.global_rank]
        ranks = gather(columns)
        if not trainer.is_global_zero:
            return
        table: list[Any] = [("metric", "value", "95 % from", "to")]
        if columns:
            outputs, targets, places = map(torch.cat, zip(*ranks, strict=True))
            order = places.argsort()
            groups = groups_of_test(trainer.datamodule, len(order))
            ends = intervals(pl_module, outputs[order], targets[order], groups)
            for name, (low, high) in ends.items():
                table.append((name, trainer.callback_metrics[name].item(), low, high))
        write_whole(self.folder / "intervals.csv", as_csv(table))
        scores = class_scores(pl_module.task, counts)
        num = counts.shape[1]
        names = class_names(trainer.datamodule, num)[:num]
        if pl_module.task != "multilabel":
            matrix = zip(names, *counts.T.tolist(), strict=True)
            text = as_csv([("true / predicted", *names), *matrix])
            write_whole(self.folder / "confusion_matrix.csv", text)
        of_classes = map(Tensor.tolist, scores.values())
        rows = [("class", *scores), *zip(names, *of_classes, strict=True)]
        file = self.folder / "report.csv"
        write_whole(file, as_csv(rows))
        self.lines = [
            *as_table(table),
            *as_table(rows),
            f"Report: {relative_to_cwd(file)}",
        ]


def class_scores(task: str, counts: Tensor) -> dict[str, Tensor]:
    """Return the scores of each class or label, {name of the score: (classes,)}.

    segmentation: `iou`, intersection over union, in [0, 1]. It is NaN for a class that
        is neither true nor predicted.
    multiclass, multilabel: `precision`, `recall` and `f1`, in [0, 1]. A score whose
        denominator is 0 is 0.

    All tasks also have `support`: how many samples or pixels have the class.

    counts: See `class_counts`.
    """
    if task == "multilabel":
        support, outside, right, num_predicted, *of_logits = counts
        if outside.any():
            right, num_predicted = of_logits
    else:
        right, support, num_predicted = counts.diag(), counts.sum(1), counts.sum(0)
    total = support + num_predicted
    if task == "segmentation":
        return {"iou": right / (total - right), "support": support}
    return {
        "precision": right / num_predicted.clamp(min=1),
        "recall": right / support.clamp(min=1),
        "f1": 2 * right / total.clamp(min=1),
        "support": support,
    }
