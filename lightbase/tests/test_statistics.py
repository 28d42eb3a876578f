"""Metrics against references, and intervals by simulation, on generated numbers."""

from functools import partial

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn import metrics as sk
from tasks import ends_of, measured
from torch import nn
from torchmetrics import classification as tc
from torchmetrics import regression as tr

from lightbase.model.intervals import interval, wilson
from lightbase.model.metrics import (
    Accumulator,
    collection,
    counted_loss,
    ignore_targets,
)

pytestmark = pytest.mark.slow
SIZES = (1, 32)
"""Batch sizes. The last batch is smaller."""


def values_of(metrics, outputs, targets, size):
    """Return the values over all batches of this size, with the cross-entropy."""
    accumulator = Accumulator(collection(metrics))
    ignore_targets(accumulator.metrics, -100)
    for x, y in zip(outputs.split(size), targets.split(size), strict=True):
        losses = {"loss": torch.tensor(0.0)}
        if y.ndim == 1 and not y.is_floating_point():
            losses = counted_loss(nn.functional.cross_entropy(x, y), y, -100)
        accumulator.add(len(x), losses, x, y)
    found = accumulator.result(lambda sums: sums)
    return {name: value.item() for name, value in found.items()}


def multiclass(outputs, targets):
    """Return the values that scikit-learn has."""
    counts = targets != -100
    scores, true = outputs[counts], targets[counts]
    shares = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
    predicted = scores.argmax(1)
    f1 = partial(sk.f1_score, true, predicted)
    return {
        "loss": sk.log_loss(true, shares),
        "acc": sk.accuracy_score(true, predicted),
        "top2": sk.top_k_accuracy_score(true, scores, k=2),
        "balanced": sk.balanced_accuracy_score(true, predicted),
        "kappa": sk.cohen_kappa_score(true, predicted),
        "auroc": sk.roc_auc_score(true, shares, multi_class="ovr"),
        "ap": sk.average_precision_score(np.eye(4)[true], shares),
        "recall": sk.recall_score(true, predicted, average="weighted"),
        "f1": f1(average="macro"),
        **{f"each_{i}": value for i, value in enumerate(f1(average=None))},
    }


def multiclass_metrics():
    return {
        "acc": tc.MulticlassAccuracy(4, average="micro", validate_args=False),
        "top2": tc.MulticlassAccuracy(4, 2, "micro", validate_args=False),
        "balanced": tc.MulticlassAccuracy(4),
        "kappa": tc.MulticlassCohenKappa(4),
        "auroc": tc.MulticlassAUROC(4),
        "ap": tc.MulticlassAveragePrecision(4),
        "recall": tc.MulticlassRecall(4, average="weighted"),
        "f1": tc.MulticlassF1Score(4),
        "each": tc.MulticlassF1Score(4, average=None),
    }


def multilabel(outputs, targets):
    predicted = outputs > 0
    return {
        "loss": 0,
        "acc": (predicted == targets).mean(),
        "exact": sk.accuracy_score(targets, predicted),
        "f1": sk.f1_score(targets, predicted, average="macro"),
        "auroc": sk.roc_auc_score(targets, outputs),
        "ap": sk.average_precision_score(targets, outputs),
        "ranking": sk.label_ranking_loss(targets, outputs),
    }


def multilabel_metrics():
    return {
        "acc": tc.MultilabelAccuracy(4, average="micro"),
        "exact": tc.MultilabelExactMatch(4),
        "f1": tc.MultilabelF1Score(4),
        "auroc": tc.MultilabelAUROC(4),
        "ap": tc.MultilabelAveragePrecision(4),
        "ranking": tc.MultilabelRankingLoss(4),
    }


def regression(outputs, targets):
    return {
        "loss": 0,
        "mae": sk.mean_absolute_error(targets, outputs),
        "rmse": sk.root_mean_squared_error(targets, outputs),
        "r2": sk.r2_score(targets, outputs),
        "pearson": stats.pearsonr(targets, outputs).statistic,
        "spearman": stats.spearmanr(targets, outputs).statistic,
    }


def regression_metrics():
    return {
        "mae": tr.MeanAbsoluteError(),
        "rmse": tr.MeanSquaredError(squared=False),
        "r2": tr.R2Score(),
        "pearson": tr.PearsonCorrCoef(),
        "spearman": tr.SpearmanCorrCoef(),
    }


TASKS = {
    multiclass: multiclass_metrics,
    multilabel: multilabel_metrics,
    regression: regression_metrics,
}


def samples(task, seed):
    """Return outputs and targets that agree more often than by chance."""
    generator = torch.Generator().manual_seed(seed)
    num = 101 + 10 * seed
    outputs, errors = torch.randn(2, num, 4, generator=generator)
    noisy = outputs + errors
    if task == regression:
        return outputs[:, 0], noisy[:, 0]
    if task == multilabel:
        return outputs, (noisy > 0).long()
    targets = noisy.argmax(1)
    targets[torch.rand(num, generator=generator) < 0.2] = -100
    return outputs, targets


@pytest.mark.filterwarnings("ignore:Metric `Spearman")
@pytest.mark.parametrize("task", TASKS)
def test_values_of_metrics_are_those_of_scikit_learn(task):
    """The loss too, whatever the batch size."""
    for seed in range(4):
        outputs, targets = samples(task, seed)
        expected = task(outputs.numpy(), targets.numpy())
        for size in SIZES:
            found = values_of(TASKS[task](), outputs, targets, size)
            del found["num_samples"]
            assert found == pytest.approx(expected, abs=2e-5), (seed, size)


SHARES = (0.5, 0.9, 0.99)
NUMBERS = (50, 200, 1000)


def test_the_interval_of_an_accuracy_has_the_coverage_of_wilsons():
    """The coverage is computed, not simulated. With 50 samples and the accuracy 0.99 it
    is 0.911: the number of mistakes is nearly always 0, 1 or 2, and without 2 no 92 to
    98 % can be reached. Clopper and Pearson's interval has 0.986 there."""
    module = measured({"acc": tc.MulticlassAccuracy(2, average="micro")})
    for num in NUMBERS:
        ends = np.array([wilson(right / num, num) for right in range(num + 1)])
        for right in (0, num // 2, num - 1, num):
            targets = (torch.arange(num) >= right).long()
            outputs = torch.eye(2)[torch.zeros(num, dtype=torch.int64)]
            found = ends_of(module, outputs, targets)["test/acc"]
            assert found == pytest.approx(tuple(ends[right]), abs=1e-6)
        for share in SHARES:
            covers = (ends[:, 0] <= share) & (share <= ends[:, 1])
            coverage = stats.binom.pmf(np.arange(num + 1), num, share)[covers].sum()
            if (num, share) == (50, 0.99):
                assert coverage == pytest.approx(0.9106, abs=1e-4)
            else:
                assert 0.92 <= coverage <= 0.98, (num, share)


def f1(counts):
    """Return the F1 of class 1. counts: (2, 2), true classes and predicted ones."""
    return float(2 * counts[1, 1] / (2 * counts[1, 1] + counts[0, 1] + counts[1, 0]))


def interval_of_f1(counts):
    """Return the interval of the report for these counts, (2, 2). Equal samples are
    computed once, which `intervals` does not know."""
    left_out = []
    for true, predicted in np.argwhere(counts):
        changed = counts.copy()
        changed[true, predicted] -= 1
        left_out += [f1(changed)] * counts[true, predicted]
    rarest = counts.sum(1).min()
    return interval(tc.BinaryF1Score(), f1(counts), np.array(left_out), rarest, np.inf)


@pytest.mark.parametrize(("num", "share"), [*zip(NUMBERS, SHARES[::-1], strict=True)])
def test_the_interval_of_f1_covers_the_true_value(num, share):
    """Two classes of equal frequency. `share` of the predictions are right, so the true
    F1 is `share`."""
    rng = np.random.default_rng(num)
    shares = np.array([share, 1 - share, 1 - share, share]) / 2
    tests = rng.multinomial(num, shares, size=2000).reshape(-1, 2, 2)
    known = {}
    num_covered = 0
    for counts in tests:
        key = counts.tobytes()
        if key not in known:
            known[key] = interval_of_f1(counts)
        low, high = known[key]
        num_covered += low <= share <= high
    assert 0.92 <= num_covered / len(tests) <= 0.98
    true, predicted = torch.tensor([[0, 0, 1, 1], [0, 1, 0, 1]])
    repeats = torch.as_tensor(tests[0].flatten())
    pair = predicted.repeat_interleave(repeats), true.repeat_interleave(repeats)
    module = measured({"f1": tc.BinaryF1Score(validate_args=False)})
    found = ends_of(module, pair[0].float(), pair[1])["test/f1"]
    assert found == pytest.approx(known[tests[0].tobytes()], abs=2e-3)


@pytest.mark.parametrize(("num", "kind"), [(50, "exponential"), (200, "normal")])
def test_the_interval_of_a_mean_covers_the_true_value(num, kind):
    """MAE of normal errors, and skewed losses."""
    rng = np.random.default_rng(num)
    values, mean = rng.exponential(size=(2000, num)), 1.0
    if kind == "normal":
        values, mean = np.abs(rng.normal(size=(2000, num))), (2 / np.pi) ** 0.5
    ends, mae = [], tr.MeanAbsoluteError()
    for row in values:
        left_out = (row.sum() - row) / (num - 1)
        ends.append(interval(mae, row.mean(), left_out, num, np.inf))
    coverage = np.mean([low <= mean <= high for low, high in ends])
    assert 0.92 <= coverage <= 0.98
    errors = torch.as_tensor(values[0])
    module = measured({"mae": tr.MeanAbsoluteError()})
    found = ends_of(module, errors, torch.zeros(num))["test/mae"]
    assert found == pytest.approx(ends[0], rel=1e-3)


def test_the_interval_of_samples_in_groups_covers_the_true_value():
    """30 patients with 10 samples each. The accuracy differs from patient to patient,
    with a correlation of 0.3 within a patient."""
    rng, share = np.random.default_rng(0), 0.8
    groups = np.repeat(np.arange(30), 10)
    module = measured({"acc": tc.BinaryAccuracy(validate_args=False)})
    spread = 1 / 0.3 - 1
    num_covered = {True: 0, False: 0}
    for _ in range(200):
        accuracies = rng.beta(share * spread, (1 - share) * spread, size=30)
        is_right = torch.as_tensor(rng.random(300) < accuracies[groups])
        pair = is_right.float(), torch.ones(300, dtype=torch.int64)
        low, high = ends_of(module, *pair, groups)["test/acc"]
        num_covered[True] += low <= share <= high
        low, high = wilson(is_right.double().mean().item(), 300)
        num_covered[False] += low <= share <= high
    error = 3 * (0.95 * 0.05 / 200) ** 0.5
    assert 0.92 - error <= num_covered[True] / 200 <= 0.98 + error
    assert num_covered[False] / 200 < 0.85  # as if the samples were independent
