"""The accumulator: means over samples and metrics. Metrics of each class, wrappers,
collections, metrics that are no curves; what a metric gets."""

import json
from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics
import yaml
from example.classifier import Classifier
from example.data.synthetic import SyntheticImages
from paths import fails, script
from torch import nn
from torchmetrics import (
    MeanAbsoluteError,
    Metric,
    MetricCollection,
    PearsonCorrCoef,
)
from torchmetrics.classification import (
    BinaryF1Score,
    MulticlassAccuracy,
    MultilabelAveragePrecision,
)
from torchmetrics.wrappers import BootStrapper, Running
from written import checkpoint_file, curves

import lightbase
from lightbase.config.errors import UserError
from lightbase.data.module import BaseDataModule
from lightbase.model.metrics import Accumulator, collection
from lightbase.model.module import num_samples
from lightbase.model.predictions import columns_of, confusion

HERE = "test_numbers"


def result(accumulator: Accumulator) -> dict[str, Any]:
    """Return the values in one process."""
    return accumulator.result(lambda sums: sums)


def measured(
    metrics: Any,
    outputs: Any,
    targets: Any,
    sizes: tuple[int, ...] = (30, 30),
    saved: dict[str, Any] | None = None,
) -> Accumulator:
    """Return an accumulator that has got batches of these sizes. The loss of a batch is
    its index.

    saved: A state that it restores first.
    """
    accumulator = Accumulator(collection(metrics))
    if saved:
        accumulator.load_state(saved)
    start = 0
    for i, size in enumerate(sizes):
        batch = slice(start, start + size)
        loss = {"loss": torch.tensor(float(i))}
        accumulator.add(size, loss, outputs[batch], targets[batch])
        start += size
    return accumulator


def test_means_and_metrics_do_not_depend_on_how_samples_are_batched() -> None:
    outputs, targets = torch.randn(60, 3), torch.randint(3, (60,))
    metrics = {"acc": MulticlassAccuracy(3, average="micro")}
    expected = (outputs.argmax(1) == targets).float().mean().item()
    for sizes, loss in (((20, 20, 20), 1), ((40, 20), 1 / 3)):
        accumulator = measured(metrics, outputs, targets, sizes)
        found = {name: value.item() for name, value in result(accumulator).items()}
        values = {"loss": loss, "acc": expected, "num_samples": 60}
        assert found == pytest.approx(values)
        accumulator.reset()
        assert result(accumulator) == {}
    # a state, and what came after it
    saved = measured(metrics, outputs, targets, (40,)).state()
    resumed = measured(metrics, outputs[40:], targets[40:], (20,), saved)
    assert result(resumed)["acc"] == pytest.approx(expected)
    with pytest.raises(ValueError, match=r"\['mae'\] now and \['loss'\] before"):
        resumed.add(1, {"mae": torch.tensor(1.0)}, None, None)


class MeanOfRanks(Metric):
    """The sum of the targets in this process, then the mean over the processes."""

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros(()), dist_reduce_fx="mean")

    def update(self, preds: Any, target: Any) -> None:
        self.total = self.total + target.sum()

    def compute(self) -> Any:
        return self.total


def test_a_state_that_is_a_mean_over_processes_goes_on_as_it_was() -> None:
    outputs, targets = torch.randn(60), torch.randn(60)
    metrics = {"total": MeanOfRanks(), "r": PearsonCorrCoef()}
    saved = measured(metrics, outputs, targets, (40,)).state()
    resumed = result(measured(metrics, outputs[40:], targets[40:], (20,), saved))
    whole = result(measured(metrics, outputs, targets, (40, 20)))
    assert resumed["total"].item() == pytest.approx(whole["total"].item(), abs=1e-5)
    assert resumed["r"].item() == pytest.approx(whole["r"].item(), abs=1e-6)


def test_metrics_with_equal_states_in_the_first_batch_stay_two() -> None:
    """As of a network that is not trained. torchmetrics' compute groups would take them
    for one."""
    metrics = {"low": BinaryF1Score(0.5), "high": BinaryF1Score(0.7)}
    outputs, targets = torch.rand(100), torch.randint(2, (100,))
    outputs[:50] *= 0.1
    found = result(measured(MetricCollection(metrics), outputs, targets, (50, 50)))
    for name, metric in metrics.items():
        assert found[name] == metric.clone()(outputs, targets)


def test_a_classification_metric_gets_float_targets_as_labels() -> None:
    """As BCEWithLogitsLoss needs them; a metric of numbers beside it gets floats."""
    logits, targets = torch.randn(60, 3), torch.randint(2, (60, 3))
    metrics = {"ap": MultilabelAveragePrecision(3), "mae": MeanAbsoluteError()}
    found = result(measured(metrics, logits, targets.float()))
    assert found["ap"] == MultilabelAveragePrecision(3)(logits, targets)
    assert found["mae"] == pytest.approx((logits - targets).abs().mean().item())
    with pytest.raises(UserError, match="got targets that are not whole numbers"):
        result(measured(metrics, logits, torch.rand(60, 3)))
    one_hot = torch.eye(3)[targets[:, 0]]
    accuracy = MulticlassAccuracy(3, validate_args=False)
    with pytest.raises(RuntimeError, match="argmax"):  # its accuracy would be wrong
        result(measured({"acc": accuracy}, logits, one_hot))


def test_a_wrapper_sees_each_batch_and_leaves_the_random_numbers_of_the_training() -> (
    None
):
    metrics = {
        "last": Running(MeanAbsoluteError(), 3),
        "sure": BootStrapper(MeanAbsoluteError()),
    }
    state = torch.get_rng_state()
    outputs = torch.arange(5.0).repeat_interleave(8)
    found = result(measured(metrics, outputs, torch.zeros(40), (8,) * 5))
    assert found["last"] == 3  # of the batches 2, 3 and 4
    assert torch.equal(torch.get_rng_state(), state)


class Sizes(MeanOfRanks):
    """Notes the number of samples in each update."""

    def __init__(self, per_batch: bool) -> None:
        super().__init__()
        self.per_batch, self.sizes = per_batch, []

    def update(self, preds: Any, target: Any) -> None:
        self.sizes.append(len(target))
        super().update(preds, target)


def test_a_metric_that_asks_for_it_sees_each_batch_and_the_others_do_not() -> None:
    metrics = {"batches": Sizes(True), "joined": Sizes(False)}
    outputs = torch.zeros(40)
    curve = measured(metrics, outputs, outputs, (8, 20, 12))
    result(curve)
    found = [curve.metrics[name].sizes for name in metrics]
    assert found == [[8, 20, 12], [40]]


class Named(SyntheticImages):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.classes = ["cat", "a b/c", "dog", "d:g"]


def test_each_class_has_an_accuracy_beside_the_usual_one(train, tmp_path, capsys):
    train(f"--data {HERE}.Named --trainer.max_epochs 1")
    # the checkpoint of a run without them resumes with them
    flags = "--model.per_class true --model.top_k 2 --trainer.max_epochs 2"
    result = train("--ckpt_path last", flags)
    shown = capsys.readouterr().out
    names = {f"test_class_acc/{name}" for name in ("cat", "a_b_c", "dog", "d_g")}
    assert names == {key for key in result if key.startswith("test_class_acc")}
    assert result["test/acc"] <= result["test/top2"] <= 1
    lines = [line.split() for line in shown.splitlines() if "test_class_acc/" in line]
    values = [value for _, value in lines]  # of no line of an epoch
    assert values == sorted(values)
    assert len(values) == 4
    folder = tmp_path / "tiny" / "version_0"
    assert {"train_class_acc/cat", "val_class_acc/cat"} <= curves(folder).keys()
    again = script("evaluate").main(["--ckpt_path", str(checkpoint_file(folder))])
    assert again.items() <= result.items()
    error = fails(capsys, 2, lambda: train("--model.top_k 5"))
    assert "top_k 5: there are 4 classes; give fewer" in error


METRIC = "torchmetrics.classification.Multiclass"
METRICS = f"""
acc: {{class_path: {METRIC}Accuracy, init_args: {{average: micro}}}}
each:
  class_path: torchmetrics.wrappers.ClasswiseWrapper
  init_args:
    metric:
      class_path: {METRIC}Recall
      init_args: {{average: none, num_classes: 4}}
sure:
  class_path: torchmetrics.wrappers.BootStrapper
  init_args:
    base_metric: {{class_path: {METRIC}F1Score, init_args: {{num_classes: 4}}}}
confusion: {METRIC}ConfusionMatrix
roc: {METRIC}ROC
"""


def test_wrappers_and_matrices_of_a_yaml_are_curves_and_files(train, tmp_path, capsys):
    config = tmp_path / "metrics.yaml"
    metrics = yaml.safe_load(METRICS)
    config.write_text(yaml.safe_dump({"model": {"metrics": metrics}}))
    flags = f"--data {HERE}.Named --figures_every_n_epochs 1 --trainer.max_epochs 1"
    result = train("--config", config, flags)
    folder = tmp_path / "tiny" / "version_0"
    names = {"val/sure_mean", "val/sure_std", "val_each/cat", "train_each/d_g"}
    assert names <= curves(folder).keys()
    files = {x.name: json.loads(x.read_text()) for x in (folder / "metrics").iterdir()}
    rows = torch.tensor(files["test_confusion.json"])
    assert rows.trace() / rows.sum() == pytest.approx(result["test/acc"], abs=1e-6)
    recalls = rows.diagonal() / rows.sum(1)
    assert result["test_each/dog"] == pytest.approx(recalls[2].item(), abs=1e-6)
    assert files.keys() == {
        f"{stage}_{name}.json"
        for stage in ("val", "test")
        for name in ("confusion", "roc")
    }
    assert len(files["val_roc.json"]) == 3


@pytest.mark.parametrize(
    ("targets", "outputs", "inputs", "num"),
    [
        # several targets, of each sample a number
        ((torch.zeros(9), torch.zeros(9)), torch.zeros(9, 2), torch.zeros(9), 9),
        # detection: a dict for each of four images of several sizes
        ([{"boxes": torch.zeros(3, 4)}] * 4, None, [torch.zeros(3, 8, 9)] * 4, 4),
        (None, None, (torch.zeros(8), torch.zeros(8)), 8),
    ],
)
def test_the_samples_of_a_batch_are_counted(targets, outputs, inputs, num):
    assert num_samples(targets, outputs, (inputs, targets)) == num


NUM_CLASSES = 4


class Ignored(BaseDataModule):
    """Images (N, 6, 5, 5) and masks. A third of the pixels has no class."""

    def __init__(self, ignored: int, sides: tuple[int, ...], **options: Any) -> None:
        super().__init__(**options)
        self.ignored = ignored
        self.sides = sides

    def load(self, split: str) -> Any:  # type: ignore[override]
        generator = torch.Generator().manual_seed(len(split))
        x = torch.randn(60, 6, *self.sides, generator=generator)
        y = x[:, :NUM_CLASSES].argmax(1)
        y[torch.rand(y.shape, generator=generator) < torch.rand(())] = self.ignored
        y[:8] = self.ignored  # a batch without a target
        return x, y


class WithinALoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.loss = nn.CrossEntropyLoss(ignore_index=255)

    def forward(self, logits: Any, targets: Any) -> Any:
        return self.loss(logits, targets)


class NotNamed(nn.Module):
    def forward(self, logits: Any, targets: Any) -> Any:
        targets = targets.where(targets != 255, -100)
        return nn.functional.cross_entropy(logits, targets)


OF_255 = MulticlassAccuracy(4, average="micro", ignore_index=255)


@pytest.mark.parametrize(
    ("criterion", "metrics", "sides", "ignored"),
    [
        (None, None, (), -100),
        (nn.CrossEntropyLoss(ignore_index=0), None, (5,), 0),
        (WithinALoss(), None, (5, 5), 255),
        (NotNamed(), {"acc": OF_255}, (5,), 255),
    ],
)
def test_targets_that_the_loss_ignores_count_nowhere(
    criterion, metrics, sides, ignored, tmp_path
):
    nets = [nn.Linear, nn.Conv1d, nn.Conv2d]
    net = nets[len(sides)](6, NUM_CLASSES, *sides[:1] and (1,))
    data = Ignored(ignored, sides, batch_size=8, val_fraction=0.2)
    module = Classifier(net, criterion, metrics, 4, per_class=True, top_k=2)
    module.task = "segmentation" if len(sides) == 2 else "multiclass"
    root = str(tmp_path)
    run = lightbase.train(
        module, data, max_epochs=1, default_root_dir=root, seed_everything=1
    )
    x, y = data.splits["test"].values
    logits = module.net(x).movedim(1, -1)[y != ignored]
    true, predicted = y[y != ignored], logits.argmax(1)
    is_near = (logits.topk(2).indices == true[:, None]).any(1)
    expected = {
        "test/loss": nn.functional.cross_entropy(logits, true).item(),
        "test/acc": (true == predicted).float().mean().item(),
        "test/class_acc_1": (predicted[true == 1] == 1).float().mean().item(),
        "test/top2": is_near.float().mean().item(),
    }
    for name, value in expected.items():
        assert run.metrics[name] == pytest.approx(value, abs=1e-6), name
    found = columns_of(module.task, module.net(x), y, module.ignored_target())
    counts = confusion(*found[:2], NUM_CLASSES)  # of the pictures and the report
    assert torch.equal(counts, confusion(true, predicted, NUM_CLASSES))


def test_targets_that_are_no_classes_are_refused() -> None:
    """Nobody knows that the loss ignores them."""
    metric = MulticlassAccuracy(3, average="micro", validate_args=False)
    for index in (-1, 3, 255):
        targets = torch.tensor([0, 1, index])
        with pytest.raises(UserError, match="from 0 to num_classes - 1"):
            result(measured({"acc": metric}, torch.randn(3, 3), targets, (3,)))
    assert Classifier(nn.Linear(2, 2), nn.BCEWithLogitsLoss()).ignored_target() is None


@pytest.mark.parametrize("mean", [0.0, 1e3, 3e5, 7e6])
def test_metrics_of_numbers_are_exact_for_a_large_mean(mean):
    """Compared with scikit-learn; torchmetrics alone gives an R2 of 1.0007 for
    0.9091."""
    sklearn = pytest.importorskip("sklearn.metrics")
    generator = torch.Generator().manual_seed(0)
    targets = mean + 7 * torch.randn(600, generator=generator)
    outputs = targets + 2 * torch.randn(600, generator=generator)
    metrics = {
        "r2": torchmetrics.R2Score(),
        "explained": torchmetrics.ExplainedVariance(),
        "mse": torchmetrics.MeanSquaredError(),
        "mae": torchmetrics.MeanAbsoluteError(),
        "pearson": torchmetrics.PearsonCorrCoef(),
        "running": Running(torchmetrics.R2Score(), window=100),
    }
    pair = targets.double().numpy(), outputs.double().numpy()
    expected = {
        "r2": sklearn.r2_score(*pair),
        "explained": sklearn.explained_variance_score(*pair),
        "mse": sklearn.mean_squared_error(*pair),
        "mae": sklearn.mean_absolute_error(*pair),
        "pearson": np.corrcoef(*pair)[0, 1],
        "running": sklearn.r2_score(*pair),
    }
    for sizes in ((600,), (7,) * 85 + (5,)):
        found = result(measured(metrics, outputs, targets, sizes))
        for name, value in expected.items():
            assert found[name].item() == pytest.approx(value, rel=1e-4), name
    # a resume goes on with the sums as they are
    state = measured(metrics, outputs[:300], targets[:300], (300,)).state()
    rest = measured(metrics, outputs[300:], targets[300:], (300,), saved=state)
    assert result(rest)["r2"].item() == pytest.approx(expected["r2"], rel=1e-4)
