"""Test a checkpoint again, on the data and with the settings of its run.

The metrics are printed as a table, and as JSON in the last line. Files are written only
with --report: see ClassReport.

The tables of evaluate.py --report: the interval of each metric, the scores of each
class, and which classes the network mixes up.
"""

import copy
import math
import re
import warnings
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning import Callback
from scipy import stats
from torch import Tensor
from torchmetrics import MeanMetric, Metric

from lightbase.commands import arguments
from lightbase.commands.checkpoint import open_checkpoint, trainer_of
from lightbase.commands.script import short_errors
from lightbase.config.errors import UserError, say
from lightbase.config.files import json_text, relative_to_cwd, write_whole
from lightbase.config.tables import as_csv, as_table
from lightbase.data.batches import seeded_order, to_host
from lightbase.data.module import BaseDataModule
from lightbase.data.splits import as_groups
from lightbase.model.curves import gather, is_of_class
from lightbase.model.metrics import Accumulator, numbers, sees_batches
from lightbase.model.module import BaseModule
from lightbase.model.predictions import MISFITS, class_names, columns_of, confusion
from lightbase.run.devices import describe_devices
from lightbase.run.fit import NO_TEST, run_test
from lightbase.run.stops import StopOnSignal, end_processes


def main(args: arguments.Args = None) -> dict[str, Any]:
    """Test the checkpoint, and print the metrics as a table and as JSON.

    args: The arguments of the script.
    Return the metrics by name, such as test/acc.
    A user's mistake prints two lines and raises SystemExit. In a notebook it raises
    UserError.
    """
    with short_errors():
        options, flags = arguments.evaluate().read(args)
        spec, model, data = open_checkpoint(options, flags)
        callbacks: list[Callback] = [StopOnSignal()]
        report = None
        if options.report is not None:
            report = ClassReport(report_folder(options.report, options.ckpt_path))
            callbacks.append(report)
        with trainer_of(spec, model, callbacks) as trainer:
            say(describe_devices(trainer))
            metrics = run_test(trainer, model, data, None)
        end_processes(trainer)
        if not metrics:
            raise UserError(NO_TEST)
    names = sorted(metrics, key=is_of_class)
    lines = as_table([("metric", "value"), *[(name, metrics[name]) for name in names]])
    if report is not None:
        lines += report.lines
    say("\n".join([*lines, json_text(metrics)]))
    return metrics


def report_folder(typed: str, checkpoint: Path) -> Path:
    """Return the folder for --report, which is made if it is missing.

    typed: The value of the flag. If it is empty, the report goes to the run's folder,
        or beside a checkpoint that lies in no run.
    checkpoint: The path of the checkpoint.
    """
    folder = checkpoint.absolute().parent
    if folder.name == "checkpoints":
        folder = folder.parent
    if typed:
        folder = Path(typed)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


TASKS = ("multiclass", "multilabel", "segmentation")
"""The tasks that have classes or labels."""

QUANTILE = 0.975
"""Of a distribution: 2.5 % lie beyond each end of an interval."""

MAX_OUTPUTS = 2**14
"""Samples with more outputs, such as large masks, are not kept for the intervals."""

MANY_PARTS = 1000

FEW_PARTS = 100
"""How many parts of the test set are left out, one after the other: of a metric whose
states are sums over samples, and of one that keeps all samples."""

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


class MeanLoss(MeanMetric):
    """The mean of a loss over samples."""

    def __init__(self, criterion: Any) -> None:
        super().__init__()
        self.set_dtype(torch.float64)
        self.criterion = criterion

    def update(self, outputs: Tensor, targets: Tensor) -> None:  # type: ignore[override]
        super().update(self.criterion(outputs, targets), len(targets))


def values_without_parts(
    means: Accumulator,
    name: str,
    metric: Metric,
    samples: tuple[Tensor, Tensor],
    parts: list[Tensor],
) -> list[dict[str, float]]:
    """Return the values of a metric by curve: for all samples, and then without each
    part. Curves that are not defined are left out.

    The states of the metric have to be sums, or lists of batches.

    means: The accumulator of the test, which names the curves.
    samples: All outputs and targets.
    parts: The positions of the samples of each part.
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
    """Return a state of a metric without the state of a part of the samples."""
    if isinstance(total, Tensor):
        return total - part
    left_out = {id(batch) for batch in part}
    return [batch for batch in total if id(batch) not in left_out]


def defined_values(means: Accumulator, name: str, metric: Metric) -> dict[str, float]:
    """Return the value of a metric by curve. Return nothing if torchmetrics warns that
    the value means nothing."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        value = metric.compute()
    for warning in caught:
        if str(warning.message).startswith(("No positive", "No negative")):
            return {}
    curves = numbers(f"{means.prefix}{name}", value, means.classes)
    return {curve: float(x) for curve, x in curves.items() if np.ndim(x) == 0}


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
    The interval of the loss is NaN if the criterion does not take what test_step gives
    to `track`. Metrics that see each batch, and calibration errors, which are biased,
    have no interval.

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
        num, freedom = len(targets), math.inf
        if groups is not None:
            num, freedom = len(parts), len(parts) - 1
        metric = metric.clone().cpu()
        metric.distributed_available_fn = lambda: False  # this process has all samples
        try:
            values = values_without_parts(
                means, name, metric, (outputs, targets), parts
            )
        except (ValueError, *MISFITS):
            ends[f"{means.prefix}{name}"] = (math.nan, math.nan)
            continue
        size = num
        if "Accuracy" not in kind or vars(metric).get("average", "micro") != "micro":
            size = min([num, *support[support > 0].tolist()])
        for curve, value in values[0].items():
            left_out = [x[curve] for x in values[1:] if curve in x]
            if len(left_out) < len(parts):
                say(
                    f"{curve} is not defined without some samples: its interval leaves "
                    f"out {len(parts) - len(left_out)} of {len(parts)} parts of the "
                    "test"
                )
            ends[curve] = interval(metric, value, np.array(left_out), size, freedom)
    return ends


def interval(
    metric: Metric, value: float, left_out: Any, size: float, freedom: float
) -> tuple[float, float]:
    """Return the interval of one value of a metric.

    A metric between two bounds has the interval of `wilson` for the number of samples
    to which its standard error belongs. For an accuracy this is their true number.
    Other metrics have Student's interval.

    left_out: The values without each part of the samples, an array.
    size: The number of samples for `wilson` if no part changes the value, as for an F1
        of 1.
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
        radius = float(stats.sem(values) * stats.t.ppf(QUANTILE, num - 1))
        return float(values.mean()) - radius, float(values.mean()) + radius
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
    num: The number of samples. It may be a number with the same standard error.
    freedom: The degrees of freedom of the standard error, infinity for a normal one.
    """
    square = float(stats.t.ppf(QUANTILE, freedom)) ** 2
    radius = math.sqrt(square * (square + 4 * num * share * (1 - share)))
    middle = 2 * num * share + square
    width = 2 * (num + square)
    return (middle - radius) / width, (middle + radius) / width


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
        batches = [*chain(*gather(self.batches))]
        if not trainer.is_global_zero:
            return
        scores = class_scores(pl_module.task, counts)
        table: list[Any] = [("metric", "value", "95 % from", "to")]
        if batches:
            outputs, targets = map(torch.cat, zip(*batches, strict=True))
            num, step = len(targets), trainer.world_size
            # rank r of n has the samples r, r + n, r + 2 n, ...
            places = [torch.arange(rank, num, step) for rank in range(step)]
            order = torch.cat(places).argsort()
            groups = groups_of_test(trainer.datamodule, num)
            ends = intervals(
                pl_module, outputs[order], targets[order], scores["support"], groups
            )
            for name, (low, high) in ends.items():
                value = trainer.callback_metrics[name].item()
                error = 1e-3 * abs(value)
                # beyond its interval, the metric is no function of sums over samples
                if not (value < low - error or value > high + error):
                    table.append((name, value, low, high))
        write_whole(self.folder / "intervals.csv", as_csv(table))
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
