"""Metrics of outputs that are logits, against scikit-learn, and of constants."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from sklearn import metrics as sklearn_metrics
from torch import Tensor, nn
from torchmetrics import MeanAbsoluteError, MeanSquaredError
from torchmetrics import classification as of_classes
from torchmetrics.wrappers import MinMaxMetric

from lightbase.model.metrics import Accumulator, collection
from lightbase.model.module import BaseModule
from lightbase.model.scores import (
    add_constants,
    gives_probabilities,
    is_converted,
    log_odds,
)

SCALES = (0.01, 0.3, 1, 30, 300)

NUM = 800


def values(
    metrics: Any,
    outputs: Tensor,
    targets: Tensor,
    size: int = 800,
    are_probabilities: bool = False,
) -> dict[str, float]:
    """Return the metrics of batches of this size, by name."""
    sums = Accumulator(collection(metrics), "val/", are_probabilities=are_probabilities)
    for x, y in zip(outputs.split(size), targets.split(size), strict=True):
        sums.add(len(x), {"loss": torch.zeros(())}, x, y)
    points = sums.result(lambda total: total)
    return {name.removeprefix("val/"): float(x) for name, x in points.items()}


def logits_like(targets: Tensor, scale: float) -> Tensor:
    """Return logits of samples with these classes or labels. With a small scale all of
    them lie in [0, 1], where torchmetrics would take them for probabilities."""
    hot = targets
    if targets.dim() == 1:
        hot = nn.functional.one_hot(targets)
    logits = (torch.randn(hot.shape) + 1.2 * hot) * scale
    if scale < 0.1:
        logits = logits.clamp(-0.4, 0.4) + 0.5
    return logits


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("num", [2, 5, 20])
@pytest.mark.parametrize("size", [1, NUM])
def test_metrics_of_classes_are_those_of_scikit_learn(
    num: int, scale: float, size: int
) -> None:
    targets = torch.randint(num, (NUM,))
    logits = logits_like(targets, scale)
    z = logits.double()
    odds = np.stack(
        [z[:, k] - z[:, torch.arange(num) != k].logsumexp(1) for k in range(num)], 1
    )
    shares = z.softmax(1).numpy()
    sure = shares.max(1)
    bins = np.clip((sure * 15).astype(int), 0, 14)
    right = shares.argmax(1) == targets.numpy()
    gaps = [abs((right - sure)[bins == b].sum()) for b in range(15)]
    hot = nn.functional.one_hot(targets, num).numpy()
    found = values(
        {
            "auroc": of_classes.MulticlassAUROC(num),
            "ap": of_classes.MulticlassAveragePrecision(num),
            "acc": of_classes.MulticlassAccuracy(num, average="micro"),
            "ece": of_classes.MulticlassCalibrationError(num, n_bins=15),
        },
        logits,
        targets,
        size,
    )
    del found["loss"], found["num_samples"]
    assert found == pytest.approx(
        {
            "auroc": sklearn_metrics.roc_auc_score(hot, odds),
            "ap": sklearn_metrics.average_precision_score(hot, odds),
            "acc": right.mean(),
            "ece": sum(gaps) / NUM,
        },
        abs=5e-5,
    )


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("size", [1, NUM])
def test_metrics_of_labels_are_those_of_scikit_learn(scale: float, size: int) -> None:
    targets = torch.randint(2, (NUM, 3))
    logits = logits_like(targets, scale)
    labels = {
        "auroc": of_classes.MultilabelAUROC(3),
        "ap": of_classes.MultilabelAveragePrecision(3),
        "f1": of_classes.MultilabelF1Score(3),
        "lrap": of_classes.MultilabelRankingAveragePrecision(3),
    }
    found = values(labels, logits, targets, size)
    x, y, predicted = logits.numpy(), targets.numpy(), (logits > 0).numpy()
    expected = {
        "auroc": sklearn_metrics.roc_auc_score(y, x),
        "ap": sklearn_metrics.average_precision_score(y, x),
        "f1": sklearn_metrics.f1_score(y, predicted, average="macro"),
        "lrap": sklearn_metrics.label_ranking_average_precision_score(y, x),
    }
    binary = {
        "auroc_1": of_classes.BinaryAUROC(),
        "acc_1": of_classes.BinaryAccuracy(),
        "best_1": MinMaxMetric(of_classes.BinaryAveragePrecision()),
    }
    found |= values(binary, logits[:, 0], targets[:, 0], size)
    expected["auroc_1"] = sklearn_metrics.roc_auc_score(y[:, 0], x[:, 0])
    expected["acc_1"] = sklearn_metrics.accuracy_score(y[:, 0], predicted[:, 0])
    expected["best_1_raw"] = sklearn_metrics.average_precision_score(y[:, 0], x[:, 0])
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, abs=5e-5), name


def test_thresholds_of_a_curve_are_probabilities() -> None:
    targets = torch.randint(2, (NUM,))
    logits = targets * 60.0 + 20 * torch.randn(NUM)
    sums = Accumulator(
        collection({"roc": of_classes.BinaryROC()}), are_probabilities=False
    )
    sums.add(NUM, {"loss": torch.zeros(())}, logits, targets)
    sums.result(lambda total: total)
    fpr, tpr, thresholds = sums.non_scalar_values["roc"]
    order = logits.double().sort(descending=True)
    assert torch.allclose(thresholds[1:], order.values.sigmoid(), atol=1e-12)
    assert len(fpr) == NUM + 1  # each sample has a step of its own
    right = targets[order.indices].cumsum(0) / targets.sum()
    assert torch.allclose(tpr[1:].double(), right.double(), atol=1e-6)


def test_log_odds_have_no_ties() -> None:
    logits = torch.tensor([[400.0, 0, -3], [401, 0, -3], [-400, 2, 2]]).double()
    odds = log_odds(logits)
    without = torch.tensor([[0.0, -3], [0, -3], [2, 2]]).double().logsumexp(1)
    assert torch.allclose(odds[:, 0], logits[:, 0] - without, rtol=1e-12)
    assert odds[0, 1] > odds[1, 1]


class Model(BaseModule):
    def __init__(self, criterion: Any, task: Any = None) -> None:
        super().__init__(nn.Identity(), criterion)
        self.task = task


def test_the_loss_or_the_task_says_what_outputs_are() -> None:
    assert gives_probabilities(Model(nn.BCELoss()))
    assert gives_probabilities(Model(nn.BCEWithLogitsLoss())) is False
    assert gives_probabilities(Model(nn.NLLLoss(), "regression")) is False
    assert gives_probabilities(Model(nn.L1Loss(), "multiclass")) is False
    assert gives_probabilities(Model(nn.MSELoss(), "regression")) is None
    model = Model(nn.CrossEntropyLoss(), "multiclass")
    model.gives_probabilities = True
    assert gives_probabilities(model)


def test_probabilities_stay_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    targets = torch.randint(2, (NUM,))
    shares = logits_like(targets[:, None], 1).sigmoid()[:, 0]
    metrics = {"acc": of_classes.BinaryAccuracy(), "auroc": of_classes.BinaryAUROC()}
    expected = ((shares > 0.5) == targets).double().mean().item()
    assert values(metrics, shares, targets, 80, True)["acc"] == pytest.approx(expected)
    assert not capsys.readouterr().out
    values(metrics, shares, targets, 80)
    assert "gives_probabilities = True" in capsys.readouterr().out


def test_a_constant_prediction_is_measured_beside_the_network() -> None:
    targets = torch.tensor([0, 1, 1, 2, -100])
    metrics = collection(
        {
            "acc": of_classes.MulticlassAccuracy(3, average="micro", ignore_index=-100),
            "class_acc": of_classes.MulticlassAccuracy(3, average=None),
            "top2": of_classes.MulticlassAccuracy(3, average="micro", top_k=2),
            "mse": MeanSquaredError(),
        }
    )
    add_constants(metrics, {"largest_class": torch.tensor(1)})
    assert {*metrics} == {"acc", "class_acc", "top2", "mse", "acc_largest_class"}
    del metrics["class_acc"], metrics["top2"], metrics["mse"]
    assert values(metrics, torch.randn(5, 3), targets, 2)[
        "acc_largest_class"
    ] == pytest.approx(0.5)
    numbers = torch.tensor([[1.0, 10], [3, 20]])
    errors = collection({"mae": MeanAbsoluteError(), "mse": MeanSquaredError()})
    add_constants(errors, {"training_mean": torch.tensor([2.0, 12])})
    found = values(errors, torch.zeros(2, 2), numbers, 2)
    assert found["mae_training_mean"] == pytest.approx((1 + 2 + 1 + 8) / 4)
    assert found["mse_training_mean"] == pytest.approx((1 + 4 + 1 + 64) / 4)
    assert math.isclose(found["mae"], 34 / 4)


def test_without_a_known_loss_classes_have_logits_and_labels_are_left_alone() -> None:
    metric = of_classes.MulticlassAUROC(3)
    assert is_converted(metric, None)
    assert is_converted(MinMaxMetric(metric), None)
    assert not is_converted(of_classes.BinaryAUROC(), None)
    assert not is_converted(of_classes.MulticlassF1Score(3), False)


def test_the_mean_of_channels_is_predicted_for_each_step() -> None:
    targets = torch.randn(6, 5, 2) + torch.tensor([0.0, 100])
    errors = collection({"mae": MeanAbsoluteError()})
    mean = targets.mean((0, 1))
    add_constants(errors, {"training_mean": mean})
    found = values(errors, torch.zeros_like(targets), targets, 3)
    expected = (targets - mean).abs().mean().item()
    assert found["mae_training_mean"] == pytest.approx(expected, rel=1e-5)
