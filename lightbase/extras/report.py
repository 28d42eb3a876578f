"""The tables of evaluate.py --report: the interval of each metric, the scores of each
class, and which classes the network mixes up."""

from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning import Callback
from torch import Tensor

from lightbase.core.batches import to_host
from lightbase.core.curves import gather
from lightbase.core.errors import UserError
from lightbase.core.files import relative_to_cwd, write_whole
from lightbase.core.module import BaseModule
from lightbase.core.predictions import MISFITS, class_names, columns_of, confusion
from lightbase.core.tables import as_csv, as_table

TASKS = ("multiclass", "multilabel", "segmentation")
"""The tasks that have classes or labels."""
MAX_OUTPUTS = 2**14
"""Samples with more outputs, such as large masks, are not kept for the intervals."""


def class_counts(task: str, outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the counts of a batch for the report: a confusion matrix, see `confusion`.
    For multilabel return six counts of each label, int64 (6, labels): the samples that
    have the label, the outputs outside [0, 1], the right predictions and all
    predictions if the outputs are probabilities, and the same two if they are logits.
    Only the whole test tells which of the two they are.

    task: One of TASKS.
    Raise one of MISFITS if the values do not fit the task.
    """
    if task == "multilabel":
        true = targets > 0.5
        counts = [true, (outputs < 0) | (outputs > 1)]
        for threshold in (0.5, 0.0):
            predicted = outputs > threshold
            counts += [true & predicted, predicted]
        return torch.stack(counts).sum(1)
    true, predicted, *_ = columns_of(task, outputs, targets)
    return confusion(true, predicted, max(2, outputs.shape[1]))


def bootstrap(module: BaseModule, batches: list[Any]) -> dict[str, list[float]]:
    """Return {curve: [low, high]}, the 95 % intervals of the loss and the metrics.

    The intervals are percentiles of 1,000 test sets, each drawn with replacement from
    the samples of the test (Efron, "Bootstrap methods: another look at the jackknife",
    1979). The draws have a fixed seed. The interval of the loss is NaN if the criterion
    does not take what test_step gives to `track`.

    batches: Pairs of outputs and targets on the CPU.
    """
    if not batches:
        return {}
    means = module.curves_callback.means["test"]
    outputs, targets = map(torch.cat, zip(*batches, strict=True))
    rng = np.random.default_rng(0)
    draws = []
    for _ in range(1000):
        rows = rng.integers(len(targets), size=len(targets))
        drawn = outputs[rows].to(module.device), targets[rows].to(module.device)
        try:
            loss = module.criterion(*drawn)
        except (ValueError, *MISFITS):
            loss = torch.tensor(torch.nan)
        means.add(len(rows), {"loss": loss}, *drawn)
        values = means.result(torch.as_tensor)
        del values["test/num_samples"]
        means.reset()
        draws.append([*map(float, values.values())])
    ends = np.quantile(draws, [0.025, 0.975], axis=0)
    return dict(zip(values, ends.T.tolist(), strict=True))


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
            counts = class_counts(pl_module.task, outputs.float(), targets)
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
        # in all processes: metrics wait for each other
        intervals = bootstrap(pl_module, [*chain(*gather(self.batches))])
        if not trainer.is_global_zero:
            return
        table: list[Any] = [("metric", "value", "95 % from", "to")]
        for name, ends in intervals.items():
            table.append((name, trainer.callback_metrics[name].item(), *ends))
        write_whole(self.folder / "intervals.csv", as_csv(table))
        scores = class_scores(pl_module.task, counts)
        num = counts.shape[1]
        names = class_names(trainer.datamodule, num)[:num]
        if pl_module.task != "multilabel":
            matrix = zip(names, *counts.T.tolist(), strict=True)
            text = as_csv([("true / predicted", *names), *matrix])
            write_whole(self.folder / "confusion_matrix.csv", text)
        columns = map(Tensor.tolist, scores.values())
        rows = [("class", *scores), *zip(names, *columns, strict=True)]
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
