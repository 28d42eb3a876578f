"""Means and metrics of many batches: the values of the curves."""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities import move_data_to_device
from lightning.pytorch.utilities.seed import isolate_rng
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torchmetrics import Metric, MetricCollection
from torchmetrics.wrappers import ClasswiseWrapper
from torchmetrics.wrappers.abstract import WrapperMetric

from lightbase.core.batches import to_host
from lightbase.core.errors import UserError, first_line

Metrics = dict[str, Metric] | MetricCollection
# Batches wait until their outputs hold so many numbers: one update of the metrics for
# many batches costs hardly more than an update for one batch.
KEEP = 2**20
MAX_BATCHES = 1000  # that wait
TAKE_LABELS = ("torchmetrics.classification", "torchmetrics.segmentation")


class Accumulator:
    """Means over samples of the loss and other values, and metrics of outputs and
    targets.

    One process takes what waits to the CPU in one transfer, and computes there: on a
    GPU, accuracy and that of the epoch are some fifty kernels. Many numbers, metrics
    with a network, and the sums of several processes stay on the device.

    epoch: The accumulator of the whole epoch. Every batch is added to it, too; it is
        reset separately.
    classes: Names for metrics that have a value for each class.
    class_curves: Names of the curves of single classes in the newest result.
    others: Values of metrics in the newest result that are no curves, such as a
        confusion matrix.
    """

    def __init__(
        self,
        metrics: MetricCollection,
        epoch: "Accumulator | None" = None,
        classes: Sequence[str] | None = None,
    ) -> None:
        self.metrics = metrics
        self.epoch = epoch
        self.classes = in_keys(classes or [])
        self.class_curves: set[str] = set()
        self.others: dict[str, Any] = {}
        self.is_on_host = not dist.is_initialized() and not [*metrics.parameters()]
        self.reset()

    def reset(self) -> None:
        self.names: tuple[str, ...] = ()
        self.values: list[Tensor] = []  # of the batches that wait, one after the other
        self.sizes: list[int] = []
        self.pairs: list[tuple[Any, Any]] = []  # outputs and targets that wait
        self.num_waiting = 0  # numbers in these outputs
        # (names + 1,): sums over the samples of each value, and the number of samples
        self.sums: Tensor | None = None
        self.has_metrics = False
        # how many targets a classification metric got that are no whole numbers
        self.num_broken: Any = 0
        self.metrics.reset()

    def add(
        self, size: int, values: dict[str, Tensor], outputs: Any, targets: Any
    ) -> None:
        """values: means over a batch of `size` samples."""
        names = self.names or (self.epoch.names if self.epoch else ())
        if names and names != tuple(values):
            raise ValueError(f"track() was given {[*values]} now and {[*names]} before")
        self.names = tuple(values)
        self.values += [value.detach() for value in values.values()]
        self.sizes.append(size)
        if outputs is not None and targets is not None and len(self.metrics):
            # The clone: a compiled network may use the memory of its outputs again.
            clone = apply_to_collection(
                outputs, Tensor, lambda tensor: tensor.detach().clone()
            )
            self.pairs.append((clone, targets))
            self.num_waiting += (
                outputs.numel() if isinstance(outputs, Tensor) else KEEP // 16
            )
        if self.num_waiting > KEEP or len(self.sizes) >= MAX_BATCHES:
            self.is_on_host = False  # from now on: a transfer would wait for the GPU
            self.flush()

    def flush(self) -> None:
        """Add the batches that wait to the sums and the metrics."""
        if not self.sizes:
            return
        values, pairs = torch.stack(self.values), self.pairs
        # a wrapper may count its updates, as Running does
        if not any(
            isinstance(metric, WrapperMetric) for metric in self.metrics.values()
        ):
            pairs = concatenated(pairs)
        if self.is_on_host:
            values, pairs = to_host((values, pairs))
        sums = self._sums(values)
        for accumulator in [self, self.epoch] if self.epoch else [self]:
            accumulator.names = self.names
            accumulator.sums = (
                sums if accumulator.sums is None else accumulator.sums.to(sums) + sums
            )
            accumulator.metrics.to(sums.device, non_blocking=sums.is_cuda)
            accumulator.has_metrics |= bool(pairs)
            with isolate_rng(include_cuda=False):  # a BootStrapper draws numbers
                for outputs, targets in pairs:
                    accumulator.update_metrics(outputs, targets)
        self.values, self.sizes = [], []
        self.pairs, self.num_waiting = [], 0

    def update_metrics(self, outputs: Any, targets: Any) -> None:
        """Add a batch to the metrics, with targets of the type that each metric
        takes."""
        labels = targets
        if isinstance(targets, Tensor) and targets.is_floating_point():
            labels = targets.long()
        try:
            for metric in self.metrics.values():
                if takes_labels(metric) and labels is not targets:
                    # .item() would wait for the GPU: `result` looks at the number
                    self.num_broken = self.num_broken + (labels != targets).sum()
                metric.update(outputs, labels if takes_labels(metric) else targets)
        except Exception as error:
            pair = apply_to_collection(
                (outputs, targets), Tensor, lambda x: tuple(x.shape)
            )
            shapes = [str(part)[:80] for part in pair]
            names = ", ".join(map(str, self.metrics))
            what = f"the metrics {names} cannot take outputs {shapes[0]} and targets {shapes[1]}"
            modules = [type(metric).__module__ for metric in self.metrics.values()]
            are_torchmetrics = all(
                module.startswith("torchmetrics.") for module in modules
            )
            if are_torchmetrics and not isinstance(error, torch.OutOfMemoryError):
                raise UserError(f"{what}: {first_line(error)}") from error
            error.add_note(what)
            raise

    def _sums(self, values: Tensor) -> Tensor:
        """The sums of the batches that wait, as in `sums`."""
        values = values.view(len(self.sizes), -1)
        values = values.to(
            torch.float32 if values.device.type == "mps" else torch.float64
        )
        sizes: Any = self.sizes[0]
        if len(set(self.sizes)) > 1:  # rare; copying a list to the GPU waits for it
            sizes = torch.tensor(self.sizes, dtype=values.dtype, device=values.device)[
                :, None
            ]
        return torch.cat(
            [(values * sizes).sum(0), values.new_full((1,), sum(self.sizes))]
        )

    def result(self, reduce: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """The means and metrics over all processes, and `num_samples`; empty without a
        batch.

        reduce: adds up a tensor over the processes."""
        self.flush()
        if self.sums is None:
            return {}
        total = reduce(self.sums.clone())
        means = dict(zip(self.names, (total[:-1] / total[-1]).float(), strict=True))
        if isinstance(self.num_broken, Tensor) and reduce(self.num_broken.clone()) > 0:
            what = "a classification metric got targets that are no whole numbers"
            raise UserError(
                what, "take a metric of torchmetrics.regression, or round them"
            )
        metrics: dict[str, Tensor] = {}
        self.class_curves, self.others = set(), {}
        for name, metric in self.metrics.items() if self.has_metrics else ():
            classes, value = self.classes, metric.compute()
            if isinstance(metric, ClasswiseWrapper):  # its dict has names of its own
                classes, value = (
                    in_keys(metric.labels or classes),
                    metric.metric.compute(),
                )
            for key, part in numbers(name, value, classes).items():
                is_curve = isinstance(part, Tensor) and part.dim() == 0
                (metrics if is_curve else self.others)[key] = part
            self.class_curves |= {
                f"{name}/{of_class}" for of_class in classes
            } & metrics.keys()
        check_names([*self.names, *metrics, "num_samples"])
        return means | metrics | {"num_samples": total[-1]}

    def state(self) -> dict[str, Any]:
        """For a checkpoint, on the CPU: other processes may not see this one's GPU."""
        self.flush()
        metrics: dict[str, Any] = {}
        for name, metric in self.metrics.items() if self.has_metrics else ():
            is_merged = (
                metric.full_state_update is False and not metric.dist_sync_on_step
            )
            if is_merged and not isinstance(
                metric, WrapperMetric
            ):  # others start from zero
                metrics[name] = metric.metric_state
        state = {"names": list(self.names), "sums": self.sums, "metrics": metrics}
        return to_host(state)  # type: ignore[no-any-return]

    def add_state(self, state: dict[str, Any], device: torch.device) -> None:
        if state["sums"] is None:
            return
        device = torch.device("cpu") if self.is_on_host else device
        state = move_data_to_device(state, device)
        self.names = tuple(state["names"])
        if state["sums"].shape != (len(self.names) + 1,):
            raise ValueError("the sums of the curves do not fit their names")
        self.sums = state["sums"] if self.sums is None else self.sums + state["sums"]
        self.metrics.to(device)
        for name, saved in state["metrics"].items():
            self.metrics[name].merge_state(saved)


def concatenated(pairs: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """The batches as one batch, if they are tensors and their samples have the same
    shape."""
    if not all(isinstance(part, Tensor) for pair in pairs for part in pair):
        return pairs
    shapes = {(outputs.shape[1:], targets.shape[1:]) for outputs, targets in pairs}
    if len(shapes) != 1:
        return pairs
    all_outputs, all_targets = zip(*pairs, strict=True)
    return [(torch.cat(all_outputs), torch.cat(all_targets))]


def takes_labels(metric: Metric) -> bool:
    """Whether it is one of torchmetrics' metrics of classes or masks, or a wrapper
    around one."""
    for part in metric.modules():
        if any(cls.__module__.startswith(TAKE_LABELS) for cls in type(part).__mro__):
            return True
    return False


def numbers(name: str, value: Any, classes: Sequence[str]) -> dict[str, Any]:
    """The parts of a metric's value by name. Tensors float32 () are curves; others are
    no curves.

    A number is the curve NAME, a vector NAME/CLASS if it has a value for each class,
    and NAME_0, NAME_1, ... otherwise. The values of a dict are NAME_KEY.
    """
    if isinstance(value, dict):
        parts = [numbers(f"{name}_{key}", part, classes) for key, part in value.items()]
        return {key: part for inner in parts for key, part in inner.items()}
    try:
        tensor = torch.as_tensor(value).float()
    except (TypeError, ValueError, RuntimeError):  # such as None, or several matrices
        return {name: value}
    if tensor.numel() == 1:
        return {name: tensor.squeeze()}
    if tensor.dim() != 1 or not 0 < len(tensor) <= max(100, len(classes)):
        return {name: value}
    if len(tensor) == len(classes):
        return {f"{name}/{classes[i]}": number for i, number in enumerate(tensor)}
    return {f"{name}_{i}": number for i, number in enumerate(tensor)}


def check_names(names: Sequence[str]) -> None:
    """Raises UserError if two curves have one name."""
    if twice := [name for name, num in Counter(names).items() if num > 1]:
        raise UserError(
            f"two curves have the name {twice[0]!r}: rename the metric or the value",
            status=2,
        )


def in_keys(classes: Sequence[str]) -> list[str]:
    """Names of classes as a logger, such as MLflow, and a file name can hold them: "a
    b/c" as a_b_c."""
    names = [re.sub(r"[^\w.-]+", "_", name) for name in classes]
    return [
        name if names.count(name) == 1 else f"{name}_{i}"
        for i, name in enumerate(names)
    ]


def collection(
    metrics: Metrics | Metric | None, more: Mapping[str, Any] | None = None
) -> MetricCollection:
    """A MetricCollection of what `BaseModule.metrics` may be; a dict keeps its order.

    more: Metrics to add, by name. Raises UserError for a name that is taken.
    """
    if isinstance(metrics, Metric):
        metrics = {type(metrics).__name__: metrics}
    # Compute groups would take two metrics for one, if their states are equal in the
    # first batch.
    ordered = MetricCollection({}, compute_groups=False)
    for name, metric in [*(metrics or {}).items(), *(more or {}).items()]:
        if name in ordered:
            raise UserError(
                f"model.metrics.{name}: another argument adds this metric", status=2
            )
        try:
            ordered.add_metrics(
                {name: metric}
            )  # all at once they would be sorted by name
        except (
            KeyError
        ) as error:  # torch refuses a name with a dot, or of one of its methods
            raise UserError(
                f"model.metrics: {name!r} cannot be a name: {error}", status=2
            ) from error
    return ordered
