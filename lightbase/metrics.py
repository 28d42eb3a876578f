"""Means and metrics of many batches, computed a few times only: what the curves are made of."""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities import move_data_to_device
from torch import Tensor
from torchmetrics import Metric, MetricCollection

from lightbase.errors import UserError, first_line
from lightbase.ranks import say

Metrics = dict[str, Metric] | MetricCollection
KEEP = (
    2**20
    # numbers of outputs that wait: one update for many batches costs hardly more than one for a
    # single
)


class Accumulator:
    """Means over samples, of the loss and other values, and metrics of outputs and targets.

    whole: those of a longer time, which get every batch too and start anew on their own.
    classes: names for metrics with a value for each.
    reported: names of metrics that make no curve; a line has reported each of them.
    """

    def __init__(
        self,
        metrics: MetricCollection,
        whole: "Accumulator | None" = None,
        classes: Sequence[str] | None = None,
        reported: set[str] | None = None,
    ) -> None:
        self.metrics, self.whole, self.classes = metrics, whole, in_keys(classes or [])
        self.reported = set() if reported is None else reported
        self.reset()

    def reset(self) -> None:
        self.names: tuple[str, ...] = ()
        self.values: list[Tensor] = []  # of each batch, all names
        self.sizes: list[int] = []
        self.pairs: list[tuple[Tensor, Tensor]] = []  # outputs and targets
        self.num_waiting = 0
        self.sums: Tensor | None = (
            None  # (names + 1,): of the values times samples, and of the samples
        )
        self.has_metrics = False
        self.metrics.reset()

    def add(
        self, size: int, values: dict[str, Tensor], outputs: Tensor | None, targets: Tensor | None
    ) -> None:
        """values: means over a batch of `size` samples."""
        names = self.names or (self.whole.names if self.whole else ())
        if names and names != tuple(values):
            raise ValueError(
                f"track() was given {', '.join(values)} now and {', '.join(names)} before"
            )
        self.names = tuple(values)
        self.values += [value.detach() for value in values.values()]
        self.sizes.append(size)
        if outputs is not None and targets is not None and len(self.metrics):
            # a compiled network may use the memory of its outputs again
            self.pairs.append((outputs.detach().clone(), targets.detach()))
            self.num_waiting += outputs.numel()
        if self.num_waiting > KEEP or len(self.sizes) >= 1000:
            self.flush()

    def flush(self) -> None:
        """Into sums and metrics."""
        both = [self, self.whole] if self.whole else [self]
        if self.sizes:
            values = torch.stack(self.values).view(len(self.sizes), -1)
            values = values.to(torch.float32 if values.device.type == "mps" else torch.float64)
            sizes: Any = self.sizes[0]  # mostly of all: a copy of several to the GPU waits for it
            if len(set(self.sizes)) > 1:
                sizes = torch.tensor(self.sizes, dtype=values.dtype, device=values.device)[:, None]
            sums = torch.cat([(values * sizes).sum(0), values.new_full((1,), sum(self.sizes))])
            for means in both:
                means.names, means.sums = (
                    self.names,
                    sums if means.sums is None else means.sums + sums,
                )
            self.values, self.sizes = [], []
        if self.pairs:
            if (
                len({(outputs.shape[1:], targets.shape[1:]) for outputs, targets in self.pairs})
                == 1
            ):
                all_outputs, all_targets = zip(*self.pairs, strict=True)
                self.pairs = [(torch.cat(all_outputs), torch.cat(all_targets))]
            for means in both:
                means.metrics.to(self.pairs[0][0].device)
                for outputs, targets in self.pairs:
                    update(means.metrics, outputs, targets)
                means.has_metrics = True
            self.pairs, self.num_waiting = [], 0

    def result(self, reduce: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """Over all processes, `num_samples` beside them; empty without a batch."""
        self.flush()
        if self.sums is None:
            return {}
        total = reduce(self.sums.clone())
        means = dict(zip(self.names, (total[:-1] / total[-1]).float(), strict=True))
        computed = (
            numbers(self.metrics.compute(), self.classes, self.reported) if self.has_metrics else {}
        )
        check_names([*self.names, *computed, "num_samples"])
        return means | computed | {"num_samples": total[-1]}

    def state(self) -> dict[str, Any]:
        self.flush()
        # of metrics that torchmetrics can add up; others count from the resume on
        can_add = {
            n: m
            for n, m in self.metrics.items()
            if m.full_state_update is False and not m.dist_sync_on_step
        }
        states = {name: metric.metric_state for name, metric in can_add.items() if self.has_metrics}
        # on the CPU: other processes may not see this one's GPU
        own = {"names": list(self.names), "sums": self.sums, "metrics": states}
        return move_data_to_device(own, torch.device("cpu"))

    def add_state(self, state: dict[str, Any], device: torch.device) -> None:
        if state["sums"] is None:
            return
        state = move_data_to_device(state, device)
        self.names = tuple(state["names"])
        self.sums = state["sums"] if self.sums is None else self.sums + state["sums"]
        self.metrics.to(device)
        for name, saved in state["metrics"].items():
            self.metrics[name].merge_state(saved)


def update(metrics: MetricCollection, outputs: Tensor, targets: Tensor) -> None:
    """Raises UserError if torchmetrics' metrics refuse the batch. An error of other metrics gets a
    note."""
    try:
        metrics.update(outputs, targets)
    except Exception as error:
        shapes = f"outputs {tuple(outputs.shape)} and targets {tuple(targets.shape)}"
        what = f"the metrics {', '.join(map(str, metrics))} cannot take {shapes}"
        modules = [type(metric).__module__ for metric in metrics.values()]
        may_be_a_bug = not all(module.startswith("torchmetrics.") for module in modules)
        if may_be_a_bug or isinstance(error, torch.OutOfMemoryError):
            error.add_note(what)
            raise
        way_out = "take other metrics, or make outputs and targets fit them"
        raise UserError(f"{what}: {first_line(error)}\n{way_out}") from error


def numbers(
    values: Mapping[str, Any], classes: Sequence[str], reported: set[str]
) -> dict[str, Tensor]:
    """Metrics of one number as they are; those of one for each class as NAME/CLASS, or NAME_0,
    NAME_1, ... where the classes have no names. A line reports each other metric, unless `reported`
    has its name already."""
    found: dict[str, Tensor] = {}
    for name, value in values.items():
        if isinstance(value, int | float | np.number | np.bool_ | np.ndarray):
            value = torch.tensor(value)
        is_vector = isinstance(value, Tensor) and value.dim() == 1
        if isinstance(value, Tensor) and value.numel() == 1:
            found[name] = value.float().squeeze()
        elif is_vector and len(value) == len(classes):
            found |= {
                f"{name}/{label}": number
                for label, number in zip(classes, value.float(), strict=True)
            }
        elif is_vector and 0 < len(value) <= 100:
            found |= {f"{name}_{i}": number for i, number in enumerate(value.float())}
        elif name not in reported:
            say_no_curve(name, value)
            reported.add(name)
    return found


def say_no_curve(name: str, value: Any) -> None:
    kind = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
    what = (
        f"Metric {name} is not logged: {kind}, and a curve needs a number, or a vector of "
        "100 at most"
    )
    is_matrix = isinstance(value, Tensor) and value.dim() == 2
    report = " (evaluate.py --report writes a confusion matrix)" if is_matrix else ""
    say(f"{what}; compute one in a metric of your own{report}")


def check_names(names: Sequence[str]) -> None:
    """Raises UserError if two curves have one name."""
    if twice := [name for name, num in Counter(names).items() if num > 1]:
        what = f"two curves have the name {twice[0]!r}, and one would replace the other"
        way_out = (
            "rename the metric, or the value that track() is given; loss and num_samples are taken"
        )
        raise UserError(f"{what}:\n{way_out}", 2)


def in_keys(classes: Sequence[str]) -> list[str]:
    """Names of classes as they can stand in the key of a curve, of a file or of MLflow: "a b/c" as
    a_b_c."""
    names = [re.sub(r"[^\w.-]+", "_", name) for name in classes]
    return [name if names.count(name) == 1 else f"{name}_{i}" for i, name in enumerate(names)]


def collection(metrics: Metrics | Metric | None) -> MetricCollection:
    """torchmetrics' collection of what `BaseModule.metrics` may be."""
    if not isinstance(metrics, dict):
        return metrics if isinstance(metrics, MetricCollection) else MetricCollection(metrics or {})
    ordered = MetricCollection({})
    for name, metric in metrics.items():  # all at once they would be sorted by name
        if not str(name).isprintable():
            raise UserError(f"model.metrics: {name!r} cannot be a name", 2)
        try:
            ordered.add_metrics({name: metric})
        except KeyError as error:  # of torch, for names with a dot, or of its methods
            raise UserError(
                f"model.metrics: {name!r} cannot be a name: {error.args[0]}", 2
            ) from error
    return ordered
