"""The outputs of a network as scores for metrics, and the score of a constant.

torchmetrics decides by the values of one update whether it got logits or probabilities,
and makes probabilities in float32, where a margin above 17 becomes 1: the order of
confident predictions is lost (its issues 2195, 2329, 2819). Here `gives_probabilities`
decides once, and `scores_for` keeps the order.
"""

import re
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import (
    MeanAbsoluteError,
    MeanSquaredError,
    Metric,
    MetricCollection,
)
from torchmetrics.classification import BinaryAccuracy, MulticlassAccuracy
from torchmetrics.wrappers.abstract import WrapperMetric

from lightbase.data.tensors import map_tensors

OF_LOGITS = (
    nn.CrossEntropyLoss,
    nn.NLLLoss,
    nn.BCEWithLogitsLoss,
    nn.MultiLabelSoftMarginLoss,
    nn.SoftMarginLoss,
)
"""Losses of logits. The log-probabilities that NLLLoss takes are logits, too."""

OF_ORDER = re.compile("PrecisionRecallCurve|Ranking|CoverageError")
"""Metrics that depend on the order of the scores only, such as AUROC, which is derived
from a curve. With the option `thresholds` they depend on the scores themselves."""

OF_SHARES = re.compile("MulticlassCalibrationError|MulticlassHingeLoss")
"""Other metrics of several classes that take the probabilities of all classes."""

OF_CLASSES = ("multiclass", "multilabel", "segmentation", "text")
"""Tasks of a BaseModule whose outputs are logits, unless its loss takes others."""

SCORES_DTYPE = torch.float32 if torch.backends.mps.is_available() else torch.float64
"""Apple GPUs have no float64."""

CONSTANTS: dict[str, tuple[type[Metric], ...]] = {
    "largest_class": (MulticlassAccuracy, BinaryAccuracy),
    "training_mean": (MeanAbsoluteError, MeanSquaredError),
}
"""{name of a constant prediction: metrics that it is measured with}. A metric of the
test has the name METRIC_CONSTANT, such as acc_largest_class."""


def gives_probabilities(module: Any) -> bool | None:
    """Return whether the outputs of a BaseModule are probabilities, or None if nobody
    knows. Its attribute `gives_probabilities` says so, else its loss, else its task."""
    if module.gives_probabilities is not None:
        return bool(module.gives_probabilities)
    if isinstance(module.criterion, nn.BCELoss):
        return True
    if isinstance(module.criterion, OF_LOGITS) or module.task in OF_CLASSES:
        return False
    return None


def is_converted(metric: Metric, are_probabilities: bool | None) -> bool:
    """Return whether `scores_for` converts the outputs for a metric of
    torchmetrics.classification. It does not for a metric that takes the largest of
    several classes, and for a label if nobody knows what the outputs are."""
    names = names_of(metric)
    if "Multiclass" in names:
        return bool(OF_ORDER.search(names) or OF_SHARES.search(names))
    is_known = are_probabilities is not None
    return is_known and ("Binary" in names or "Multilabel" in names)


def scores_for(metric: Metric, outputs: Tensor, are_probabilities: bool | None) -> Any:
    """Return the outputs as a metric takes them that `is_converted`: as probabilities
    in float64, or `squashed` log-odds for a metric of the order.

    outputs: Floats (N,) or (N, classes or labels, ...).
    are_probabilities: See `gives_probabilities`.
    """
    scores = outputs.to(SCORES_DTYPE)
    is_multiclass = "Multiclass" in names_of(metric)
    if depends_on_order(metric):
        if are_probabilities:
            return squashed(scores.logit())
        return squashed(log_odds(scores) if is_multiclass else scores)
    if are_probabilities:
        return scores
    return scores.softmax(1) if is_multiclass else scores.sigmoid()


def names_of(metric: Metric) -> str:
    """Return the names of the classes of a metric, and of the metric in a wrapper."""
    return " ".join(cls.__name__ for x in metric.modules() for cls in type(x).__mro__)


def num_logits(metric: Metric, outputs: Tensor) -> Tensor:
    """Return how many outputs are no probabilities: outside [0, 1], or the outputs of a
    sample whose sum over all classes is not 1."""
    num = ((outputs < 0) | (outputs > 1)).sum()
    if "Multiclass" in names_of(metric):
        num = num + ((outputs.sum(1) - 1).abs() > 1e-3).sum()
    return num


def depends_on_order(metric: Metric) -> bool:
    """Return whether a metric depends on nothing but the order of the scores."""
    has_thresholds = any(
        getattr(part, "thresholds", None) is not None for part in metric.modules()
    )
    return not has_thresholds and bool(OF_ORDER.search(names_of(metric)))


def log_odds(logits: Tensor) -> Tensor:
    """Return log p / (1 - p) of the probability of each class, in the same shape
    (N, classes, ...). It has the order of the probabilities, and no ties near 0 or
    1."""
    total = logits.logsumexp(1, keepdim=True)
    others = total + torch.log(-torch.expm1(logits - total))
    # only the largest p may be near 1, where 1 - p has no digits
    largest = logits.argmax(1, keepdim=True)
    without = logits.scatter(1, largest, -torch.inf).logsumexp(1, keepdim=True)
    return logits - others.scatter(1, largest, without)


def squashed(odds: Tensor) -> Tensor:
    """Return numbers in [0, 1] in the same order. For torchmetrics they are
    probabilities; float64 keeps all differences of float32 up to 1e8."""
    return 0.5 + odds.atan() / torch.pi


def with_thresholds(value: Any) -> Any:
    """Return the value of a metric of `squashed` scores. The last part of a tuple has
    the thresholds; they become probabilities."""
    if not isinstance(value, tuple):
        return value
    return (*value[:-1], map_tensors(as_threshold, value[-1]))


def as_threshold(score: Tensor) -> Tensor:
    # a score above 1 stands for no threshold
    shares = ((score - 0.5) * torch.pi).tan().sigmoid()
    return torch.where(score <= 1, shares, score)


class Constant(WrapperMetric):
    """A metric of the same prediction for all samples: what a network has to beat.

    metric: One of the types in `CONSTANTS`.
    prediction: The largest class of the training part, int64 (), or the mean of its
        targets, (...), as the targets (N, ...).
    """

    def __init__(self, metric: Metric, prediction: Tensor) -> None:
        super().__init__()
        self.metric = metric
        self.prediction = prediction

    def update(self, outputs: Any, targets: Tensor) -> None:  # type: ignore[override]
        prediction = self.prediction.to(targets)
        num = prediction.dim()
        if targets.shape[targets.dim() - num :] != prediction.shape:
            # `transform_batch` has changed the targets
            prediction = prediction.double().mean().to(targets)
        # torchmetrics needs a tensor of its own
        self.metric.update(prediction.expand_as(targets).contiguous(), targets)

    def compute(self) -> Any:
        return self.metric.compute()

    def reset(self) -> None:
        super().reset()
        self.metric.reset()


def constant_name(constant: str) -> str:
    """Return a key of `CONSTANTS` as text."""
    return f"the {constant.replace('_', ' ')} alone"


def add_constants(metrics: MetricCollection, predictions: dict[str, Tensor]) -> None:
    """Add the metrics of constant predictions. Accuracies of single classes, or of the
    k likeliest, have none.

    predictions: {key of `CONSTANTS`: prediction}.
    """
    for name, metric in [*metrics.items()]:
        options = vars(metric)
        if options.get("average", "micro") != "micro" or options.get("top_k", 1) > 1:
            continue
        for constant, prediction in predictions.items():
            if isinstance(metric, CONSTANTS[constant]):
                constant_metric = Constant(metric.clone(), prediction)
                metrics.add_metrics({f"{name}_{constant}": constant_metric})
