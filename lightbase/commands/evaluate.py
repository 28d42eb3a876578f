"""Test a checkpoint again, on the data and with the settings of its run."""

import math
from argparse import Namespace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from lightning import Callback
from torch import Tensor

from lightbase.commands.checkpoint import open_checkpoint, trainer_of
from lightbase.config.errors import UserError, say
from lightbase.config.files import (
    Values,
    as_csv,
    as_table,
    as_text,
    json_text,
    relative_to_cwd,
    write_whole,
)
from lightbase.data.splits import group_numbers
from lightbase.data.tensors import to_host
from lightbase.model.curves import gather, is_of_class
from lightbase.model.intervals import intervals
from lightbase.model.module import BaseModule
from lightbase.model.predictions import (
    MISFITS,
    class_names,
    columns_of,
    confusion,
    threshold,
)
from lightbase.model.scores import CONSTANTS, constant_name, gives_probabilities
from lightbase.run.devices import describe_devices
from lightbase.run.fit import NO_TEST, run_test
from lightbase.run.stops import BetweenSteps, end_processes

TASKS = ("multiclass", "multilabel", "segmentation")
"""The tasks that have classes or labels."""

MAX_OUTPUTS = 2**14
"""Samples with more outputs, such as large masks, are not kept for the intervals."""


def run(options: Namespace) -> Values:
    spec, model, data = open_checkpoint(options)
    callbacks: list[Callback] = [BetweenSteps()]
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
    """Return the folder for --report, which is made if it is missing: the value of the
    flag, the run's folder, or the folder of a checkpoint outside of a run."""
    folder = Path(typed or checkpoint.absolute().parent)
    if not typed and folder.name == "checkpoints":
        folder = folder.parent
    folder.mkdir(parents=True, exist_ok=True)
    return folder


class ClassReport(Callback):
    """Writes intervals.csv, the metrics with their intervals, and report.csv, the
    scores of each class or label, at the end of a test; for multiclass and segmentation
    also confusion_matrix.csv. They cover all samples that test_step gives to `track`,
    in all processes.

    folder: The folder for the files. It must exist.
    lines: The first two tables for the terminal, when the test has ended.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lines: list[str] = []
        self.remarks: list[str] = []  # metrics that may be no better than a constant
        self.counts = torch.tensor(0)  # the sum of `class_counts`
        self.batches: list[Any] = []  # outputs and targets

    def on_test_start(self, trainer: Any, pl_module: Any) -> None:
        if not isinstance(pl_module, BaseModule) or pl_module.task not in TASKS:
            raise UserError(
                f"--report: {type(pl_module).__name__} predicts no classes",
                f"its attribute task has to be one of {', '.join(TASKS)}",
                2,
            )

    def on_test_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        """Count the predictions that the step has given to `track`."""
        try:
            outputs, targets = pl_module.tracked
            ignored = pl_module.curves_callback.ignored_target
            counts = class_counts(
                pl_module.task,
                outputs.float(),
                targets,
                ignored,
                gives_probabilities(pl_module),
            )
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
        """Write the files, and fill `lines`, in the first process."""
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
                # outside: the metric is not a function of sums over samples
                if not (value < low - error or value > high + error):
                    table.append((name, value, low, high))
                for constant in CONSTANTS:
                    other = trainer.callback_metrics.get(f"{name}_{constant}", math.nan)
                    if low <= other <= high:
                        self.remarks.append(
                            f"{name}: the interval contains {as_text(float(other))}, "
                            f"what {constant_name(constant)} has"
                        )
        num = counts.shape[1]
        names = class_names(trainer.datamodule, num)[:num]
        of_classes = map(Tensor.tolist, scores.values())
        rows = [("class", *scores), *zip(names, *of_classes, strict=True)]
        tables = {"intervals.csv": table, "report.csv": rows}
        if pl_module.task != "multilabel":
            matrix = zip(names, *counts.T.tolist(), strict=True)
            tables["confusion_matrix.csv"] = [("true / predicted", *names), *matrix]
        for name, content in tables.items():
            write_whole(self.folder / name, as_csv(content))
        self.lines = [*as_table(table), *self.remarks, *as_table(rows)]
        self.lines.append(f"Report: {relative_to_cwd(self.folder / 'report.csv')}")


def class_counts(
    task: str,
    outputs: Tensor,
    targets: Tensor,
    ignored: int | None = None,
    are_probabilities: bool | None = False,
) -> Tensor:
    """Return the counts of a batch for the report: a confusion matrix, see `confusion`.
    For multilabel return three counts of each label, int64 (3, labels): the right
    predictions, the samples that have the label, and all predictions.

    ignored: A target that does not count.
    are_probabilities: See `gives_probabilities`.
    """
    if task == "multilabel":
        true = targets > 0.5
        predicted = outputs > threshold(are_probabilities)
        predicted &= targets != ignored
        return torch.stack([true & predicted, true, predicted]).sum(1)
    columns = columns_of(task, outputs, targets, ignored, are_probabilities)
    true, predicted, *_ = columns
    return confusion(true, predicted, max(2, outputs.shape[1]))


def class_scores(task: str, counts: Tensor) -> dict[str, Tensor]:
    """Return the scores of each class or label, {name of the score: (classes,)}, in
    [0, 1], and `support`: how many samples or pixels have the class.

    The IoU of a class that is neither true nor predicted is NaN. The other scores are 0
    if their denominator is.
    """
    if task == "multilabel":
        right, support, num_predicted = counts
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


def groups_of_test(data: Any, num: int) -> Any:
    """Return the group of each test sample, int64 (N,), with val_split grouped, else
    None."""
    if getattr(data, "val_split", "") != "grouped":
        return None
    groups = data.split_groups.get("test")
    if groups is None:
        say("Intervals: the groups of the test set are unknown, see docs/runs.md")
        return None
    return group_numbers(groups, len(groups), type(data).__name__)[:num]
