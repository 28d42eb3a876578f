"""Means and metrics of many batches: the values of the curves.

Read `Accumulator` first: it adds up the batches of a stage. The functions below it are
its steps.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torchmetrics import Metric, MetricCollection
from torchmetrics.wrappers import ClasswiseWrapper
from torchmetrics.wrappers.abstract import WrapperMetric

from lightbase.config.errors import UserError, say
from lightbase.config.known_errors import noted
from lightbase.data.tensors import map_tensors, tensors_in, to_host
from lightbase.model.scores import (
    SCORES_DTYPE,
    depends_on_order,
    is_converted,
    num_logits,
    scores_for,
    with_thresholds,
)

Metrics = dict[str, Metric | None] | MetricCollection

Pairs = list[tuple[Any, Any]]
"""Outputs and targets of batches."""

WAY_OUT = (
    "does it fit the task? Metrics of classes take class numbers int64 (N,), such as "
    "argmax(1) of one-hot targets"
)

# Batches wait until their outputs hold so many numbers: one update of the metrics for
# many batches costs hardly more than an update for one batch.
MAX_NUMBERS = 2**20

MAX_BATCHES = 1000

TAKE_LABELS = ("torchmetrics.classification", "torchmetrics.segmentation")
"""Packages whose metrics need integers as targets."""

TAKE_NUMBERS = ("torchmetrics.regression",)
"""Packages whose metrics add up numbers. The sums are float64, because torchmetrics
takes the difference of two of them: in float32, the R2 of targets with a large mean is
wrong."""

MIN_SAMPLES = 100
"""As many outputs in [0, 1] are a reason to ask whether they are probabilities."""

COUNTED = "counted targets"
"""The name of the share of the targets that the loss does not ignore. The loss is
weighted by it, and it makes no curve."""


class Accumulator:
    """Means over samples of the loss and other values, and metrics of outputs and
    targets.

    `add` only puts a batch into lists. `flush` adds all waiting batches to the sums and
    metrics, when a result is wanted or when too many batches wait.

    By default `flush` copies the waiting batches to the CPU in one transfer, and
    computes there: on a GPU, the accuracies of the curve and of the epoch would start
    some fifty kernels. It computes on the GPU if there are several processes, or if a
    metric has a network. It also does so after too many batches have waited once.

    metrics: Metrics that no other accumulator uses.
    prefix: The beginning of the names of the curves, such as "val/".
    classes: Names for metrics that have a value for each class.
    are_probabilities: Whether the outputs are probabilities, see `gives_probabilities`.
    epoch: The accumulator of the whole epoch, or None. Every batch is added to it, too;
        it is reset separately.
    sums: Tensor (names + 1,): the sums over the samples of each value, and the number
        of samples. It is None without a sample.
    non_scalar_values: Values of metrics in the newest result that make no curve, such
        as a confusion matrix.
    is_on_host: Whether `flush` computes on the CPU.
    """

    def __init__(
        self,
        metrics: MetricCollection,
        prefix: str = "",
        classes: Sequence[str] = (),
        are_probabilities: bool | None = None,
    ) -> None:
        self.metrics = metrics
        self.are_probabilities = are_probabilities
        self.is_told = False
        for metric in metrics.values():
            if is_of(metric, TAKE_NUMBERS):
                metric.set_dtype(SCORES_DTYPE)
        self.prefix = prefix
        self.classes = as_curve_names(classes)
        self.epoch: Accumulator | None = None
        self.non_scalar_values: dict[str, Any] = {}
        self.is_on_host = not dist.is_initialized() and not [*metrics.parameters()]
        self.reset()

    def reset(self) -> None:
        self.names: tuple[str, ...] = ()
        self.sums: Tensor | None = None
        self.has_metrics = False
        # targets of classification metrics that are not class numbers
        self.num_broken: Any = 0
        self.num_logits: list[Tensor] = []  # how many outputs are no probabilities
        self.metrics.reset()
        self._forget_waiting()

    def _forget_waiting(self) -> None:
        self.values: list[Tensor] = []  # of the waiting batches, one after the other
        self.sizes: list[int] = []
        self.pairs: Pairs = []
        self.num_waiting = 0  # numbers in the outputs

    def has_samples(self) -> bool:
        return bool(self.sizes) or self.sums is not None

    def add(
        self,
        size: int,
        values: dict[str, Tensor],
        outputs: Any,
        targets: Any,
        copies: bool = True,
    ) -> None:
        """Add a batch.

        size: The number of its samples.
        values: Means over the batch, tensors () by name.
        outputs, targets: (N, ...), for the metrics. If one of them is None, the metrics
            get nothing.
        copies: Copy the outputs, because a compiled network may use their memory again.
        """
        names = self.names
        if self.epoch and not names:
            names = self.epoch.names
        if names and names != tuple(values):
            raise ValueError(f"track() was given {[*values]} now and {[*names]} before")
        self.names = tuple(values)
        self.values += [value.detach() for value in values.values()]
        self.sizes.append(size)
        if outputs is not None and targets is not None and len(self.metrics):
            if isinstance(outputs, Tensor):  # faster than what follows
                outputs = outputs.clone() if copies else outputs
                self.num_waiting += outputs.numel()
            else:
                outputs = map_tensors(torch.clone, outputs)
                self.num_waiting += sum(part.numel() for part in tensors_in(outputs))
            self.pairs.append((outputs, targets))
        if self.num_waiting > MAX_NUMBERS or len(self.sizes) >= MAX_BATCHES:
            self.is_on_host = False  # from now on: a transfer would wait for the GPU
            self.flush()

    def flush(self) -> None:
        """Add the batches that wait to the sums and the metrics, here and in
        `epoch`."""
        if not self.sizes:
            return
        values = torch.stack(self.values)
        joined = concatenated(self.pairs)
        batches = []
        if any(sees_batches(metric) for metric in self.metrics.values()):
            batches = self.pairs
        if self.is_on_host:
            values, joined, batches = to_host((values, joined, batches))
        sums = sums_of(values.view(len(self.sizes), -1), self.sizes)
        self.merge(self.names, sums, joined, batches)
        if self.epoch:
            self.epoch.merge(self.names, sums, joined, batches)
        self._forget_waiting()

    def merge(
        self, names: tuple[str, ...], sums: Tensor, joined: Pairs, batches: Pairs
    ) -> None:
        """Add samples to the sums and the metrics. They move to the device of `sums`.

        names: The names of the values.
        sums: (names + 1,), in the same form as the attribute `sums`.
        joined: Outputs and targets of several batches together.
        batches: Outputs and targets of each batch, for metrics that `sees_batches`.
        """
        self.names = names
        if self.sums is not None:
            sums = self.sums.to(sums) + sums
        self.sums = sums
        self.metrics.to(sums.device, non_blocking=sums.is_cuda)
        if joined:
            self.has_metrics = True
        with isolate_rng(include_cuda=False):  # a BootStrapper draws numbers
            for name, metric in self.metrics.items():
                pairs = joined
                if sees_batches(metric):
                    pairs = batches
                for outputs, targets in pairs:
                    self.update(name, metric, outputs, targets)

    def update(self, name: str, metric: Metric, outputs: Any, targets: Any) -> None:
        """Add a batch to a metric. Metrics of classes or masks get their targets as
        integers. `num_broken` counts the targets that are not class numbers; `result`
        refuses them.

        An error of the metric gets a note with its name.
        """
        labels = targets
        if is_of(metric, TAKE_NUMBERS):
            outputs, labels = map_tensors(
                lambda x: x.to(SCORES_DTYPE), (outputs, targets)
            )
        if isinstance(targets, Tensor) and is_of(metric, TAKE_LABELS):
            labels = targets.long()
            # .item() would wait for the GPU: `result` looks at the number
            self.num_broken = self.num_broken + num_not_classes(
                metric, outputs, targets
            )
            are_floats = isinstance(outputs, Tensor) and outputs.is_floating_point()
            if are_floats and is_converted(metric, self.are_probabilities):
                self.num_logits.append(num_logits(metric, outputs))
                outputs = scores_for(metric, outputs, self.are_probabilities)
        try:
            metric.update(outputs, labels)
        except Exception as error:
            shapes = map_tensors(lambda x: tuple(x.shape), (outputs, targets))
            error.add_note(f"the metric {name} got {str(shapes)[:80]}; {WAY_OUT}")
            raise

    def result(self, reduce: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """Return the means and metrics over the samples of all processes, and
        `num_samples`: {curve: tensor ()}. Return nothing if there was no batch. Set
        `non_scalar_values`. Call `reset` after it.

        reduce: A function that returns the sum of a tensor over all processes.

        A metric that is not defined for a single sample is NaN in a point of train/.
        """
        self.flush()
        if self.sums is None:
            return {}
        total = reduce(self.sums)
        self._check(total[-1], reduce)
        names = [f"{self.prefix}{name}" for name in self.names]
        curves = dict(zip(names, (total[:-1] / total[-1]).float(), strict=True))
        if COUNTED in self.names:
            curves[f"{self.prefix}loss"] /= curves.pop(f"{self.prefix}{COUNTED}")
        self.non_scalar_values = {}
        for name, metric in self._measured():
            # some metrics look at the outputs only here
            with noted(f"the metric {name} cannot be computed; {WAY_OUT}"):
                try:
                    value = self.compute(metric)
                except ValueError:
                    if self.prefix != "train/" or total[-1] > 1:
                        raise
                    value = total.new_tensor(torch.nan)  # R2 of one sample
            parts = numbers(f"{self.prefix}{name}", value, self.classes)
            for curve, part in parts.items():
                if curve in curves:
                    raise UserError(
                        f"two curves have the name {curve!r}: rename the metric or the "
                        "value",
                        status=2,
                    )
                if isinstance(part, Tensor) and part.dim() == 0:
                    curves[curve] = part
                else:
                    self.non_scalar_values[curve.removeprefix(self.prefix)] = part
        curves[f"{self.prefix}num_samples"] = total[-1]
        return curves

    def _check(self, num: Tensor, reduce: Callable[[Tensor], Tensor]) -> None:
        """Raise UserError if targets are not class numbers. Print a line, once, if
        outputs that count as logits may be probabilities.

        num: The number of samples.
        """
        if reduce(self.num_broken) > 0:
            raise UserError(
                "a classification metric got targets that are not whole numbers from 0 "
                "to num_classes - 1",
                "give class numbers (argmax(1) of one-hot targets), round them, give "
                "the ignore_index of the loss to the metric, or take a metric of "
                "torchmetrics.regression",
            )
        if self.prefix == "train/" or not self.num_logits or self.is_told:
            return
        is_sure = (
            self.are_probabilities or reduce(torch.stack(self.num_logits).sum()) > 0
        )
        if num >= MIN_SAMPLES and not is_sure:
            self.is_told = True
            say(
                f"{self.prefix} outputs count as logits, as the loss or the task says, "
                "but all could be probabilities; if they are, set "
                "gives_probabilities = True in the class of the model"
            )

    def compute(self, metric: Metric) -> Any:
        """Return the value of a metric."""
        value = metric.compute()
        if is_converted(metric, self.are_probabilities) and depends_on_order(metric):
            return with_thresholds(value)
        return value

    def _measured(self) -> list[tuple[str, Metric]]:
        """Return the names and metrics if the metrics got a batch, else nothing.
        torchmetrics warns if a metric without a batch is computed."""
        return [*self.metrics.items()] if self.has_metrics else []

    def state(self) -> dict[str, Any]:
        """Return the sums and the states of the metrics for a checkpoint, on the CPU:
        other processes may not see the GPU of this one.

        Wrappers are left out, because their states are in other metrics. They start
        from zero after a resume.
        """
        self.flush()
        states = {}
        for name, metric in self._measured():
            if not isinstance(metric, WrapperMetric):
                states[name] = metric.metric_state
        state = {"names": self.names, "sums": self.sums, "metrics": states}
        return to_host(state)  # type: ignore[no-any-return]

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore a state from a checkpoint. Call this before the first batch.

        state: The result of `state`. The metrics may have changed since then: a new
            one starts from zero.
        """
        if state["sums"] is None:
            return
        self.merge(tuple(state["names"]), state["sums"], [], [])
        saved = state["metrics"]
        for name, metric in self.metrics.items():
            if name not in saved:
                continue
            # Metric.merge_state would divide a mean by the number of updates, which is
            # 0 here.
            for attribute in metric.metric_state:
                setattr(metric, attribute, saved[name][attribute])
        self.has_metrics = bool(saved)


def sums_of(values: Tensor, sizes: list[int]) -> Tensor:
    """Return (names + 1,): the sums over samples, and the number of samples. The dtype
    is float64, on Apple GPUs float32.

    values: (batches, names), means over each batch.
    sizes: The number of samples in each batch.
    """
    # Metal has no float64
    values = values.float() if values.is_mps else values.double()
    weights: Any = sizes[0]
    if len(set(sizes)) > 1:  # rare: copying a list to the GPU waits for it
        weights = values.new_tensor(sizes)[:, None]
    num_samples = values.new_full((1,), sum(sizes))
    return torch.cat([(values * weights).sum(0), num_samples])


def num_not_classes(metric: Metric, outputs: Tensor, targets: Tensor) -> Any:
    """Return how many targets of a metric are not class numbers. A metric with
    `validate_args` checks itself whether they are in its range."""
    num = (targets.long() != targets).sum()
    # One-hot targets: torchmetrics would take each 0 and 1 for a class. Outputs that
    # are class numbers may have the shape of the targets.
    if "Multiclass" in type(metric).__name__ and outputs.is_floating_point():
        num = num + int(outputs.shape == targets.shape)
    options = vars(metric)
    if not options.get("validate_args", True) and options.get("num_classes"):
        is_outside = (targets < 0) | (targets >= options["num_classes"])
        num = num + (is_outside & (targets != options["ignore_index"])).sum()
    return num


def counted_loss(loss: Tensor, targets: Any, index: int | None) -> dict[str, Tensor]:
    """Return the loss of a batch for `Accumulator.add`, weighted by the share of the
    targets that it counts.

    loss: The mean over the targets that are not `index`, one number.
    targets: Only integers are counted.
    """
    if index is None or not isinstance(targets, Tensor) or targets.is_floating_point():
        return {"loss": loss}
    share = (targets != index).to(loss.dtype).mean().reshape(loss.shape)
    # the mean over no target is NaN
    return {"loss": torch.where(share > 0, loss * share, 0), COUNTED: share}


def ignore_targets(metrics: MetricCollection, index: int | None) -> None:
    """Let all metrics ignore a target that can do so and name no `ignore_index`."""
    for part in metrics.modules():
        if index is not None and vars(part).get("ignore_index", index) is None:
            part.ignore_index = index  # type: ignore[assignment]


def concatenated(pairs: Pairs) -> Pairs:
    """Return the pairs as one pair of tensors, so that each metric is updated once.
    Return them as they are if they are not tensors, or if their shapes differ.

    pairs: The outputs and targets of each batch.
    """
    if not pairs:
        return []
    outputs, targets = zip(*pairs, strict=True)
    try:
        return [(torch.cat(outputs), torch.cat(targets))]
    except (TypeError, RuntimeError):  # not tensors, or of several shapes
        return pairs


def sees_batches(metric: Metric) -> bool:
    """Return whether a metric gets each batch in an update of its own. A wrapper does,
    because it may count its updates, as Running does. So does a metric whose class has
    `per_batch = True`."""
    return isinstance(metric, WrapperMetric) or getattr(metric, "per_batch", False)


def is_of(metric: Metric, packages: tuple[str, ...]) -> bool:
    """Return whether a metric is of one of the packages, such as
    "torchmetrics.regression", derived from such a metric, or a wrapper around one."""
    for part in metric.modules():
        if any(cls.__module__.startswith(packages) for cls in type(part).__mro__):
            return True
    return False


def numbers(name: str, value: Any, classes: Sequence[str]) -> dict[str, Any]:
    """Return the parts of a metric's value by name. The parts that become curves are
    tensors float32 ().

    A number is the curve NAME. The values of a dict are NAME_KEY. A vector with a value
    for each class becomes the curves STAGE_METRIC/CLASS, such as val_class_acc/cat:
    TensorBoard makes a group of all names with the same first part. Another vector
    becomes the curves NAME_0, NAME_1, ... if it has at most 100 values, or fewer values
    than there are classes. A longer vector, or a matrix, is returned as it is.

    name: STAGE/METRIC, such as val/class_acc.
    """
    if isinstance(value, dict):
        parts: dict[str, Any] = {}
        for key, part in value.items():
            parts |= numbers(f"{name}_{key}", part, classes)
        return parts
    try:
        tensor = torch.as_tensor(value).float()
    except (TypeError, ValueError, RuntimeError):  # such as None, or several matrices
        return {name: value}
    if tensor.numel() == 1:
        return {name: tensor.squeeze()}
    if tensor.dim() != 1 or len(tensor) > max(100, len(classes)):
        return {name: value}
    curves = [f"{name}_{i}" for i in range(len(tensor))]
    if len(tensor) == len(classes):
        group = name.replace("/", "_", 1)
        curves = [f"{group}/{class_name}" for class_name in classes]
    return dict(zip(curves, tensor, strict=True))


def as_curve_names(classes: Sequence[str]) -> list[str]:
    """Return the names in a form that all loggers and file names allow: "a b/c" becomes
    a_b_c. If two names are equal then, all get their index, such as a_0 and b_1."""
    names = [re.sub(r"[^\w.-]+", "_", name) for name in classes]
    if len({*names}) == len(names):
        return names
    return [f"{name}_{i}" for i, name in enumerate(names)]


def collection(
    metrics: Metrics | Metric | None,
    more: Mapping[str, Any] | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> MetricCollection:
    """Return a MetricCollection of the metrics that a user gave, and others. A dict
    keeps its order.

    metrics: The value of `BaseModule.metrics`. A single metric has the name of its
        class; None means no metric.
    more: Metrics to add, by name.
    defaults: Metrics that come first, by name. A metric of the same name in `metrics`
        takes the place of the default, and None leaves it out.
    """
    if isinstance(metrics, Metric):
        metrics = {type(metrics).__name__: metrics}
    named = {**(defaults or {}), **dict((metrics or {}).items())}
    for name, metric in (more or {}).items():
        if name in named:
            raise UserError(
                f"model.metrics.{name}: another argument adds this metric", status=2
            )
        named[name] = metric
    # Compute groups would take two metrics for one, if their states are equal in the
    # first batch.
    ordered = MetricCollection({}, compute_groups=False)
    for name, metric in named.items():
        if isinstance(metric, ClasswiseWrapper):  # its dict has other names
            metric = metric.metric
        if metric is not None:
            # all at once they would be sorted by name
            ordered.add_metrics({name: metric})
    return ordered
