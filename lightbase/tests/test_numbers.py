"""The accumulator: means over samples and metrics. Metrics of each class, wrappers,
collections, metrics that are no curves; what a metric gets."""

import json
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from example.classifier import Classifier
from example.data.synthetic import SyntheticImages
from paths import fails, script
from torch import nn
from torchmetrics import (
    MeanAbsoluteError,
    Metric,
    MetricCollection,
    MinMaxMetric,
    PearsonCorrCoef,
    R2Score,
)
from torchmetrics.classification import (
    BinaryF1Score,
    MulticlassAccuracy,
    MultilabelAveragePrecision,
)
from torchmetrics.wrappers import BootStrapper, Running
from written import curves

import lightbase
from lightbase.config.errors import UserError
from lightbase.data.module import BaseDataModule
from lightbase.model.metrics import Accumulator, as_curve_names, collection, numbers
from lightbase.model.module import num_samples
from lightbase.model.predictions import columns_of, confusion

HERE = "test_numbers"
LOSS = {"loss": torch.tensor(1.0)}


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
    assert resumed["total"] == pytest.approx(whole["total"])
    assert resumed["r"].item() == pytest.approx(whole["r"].item(), abs=1e-6)
    changed = {"r": PearsonCorrCoef(), "mae": MeanAbsoluteError()}
    found = result(measured(changed, outputs[40:], targets[40:], (20,), saved))
    assert found["r"] == resumed["r"]
    assert found["mae"] == pytest.approx((outputs - targets)[40:].abs().mean().item())


def test_outputs_may_have_several_shapes() -> None:
    """As with images of several sizes and a class for each pixel."""
    metric = MulticlassAccuracy(3, average="micro")
    accumulator = Accumulator(collection({"acc": metric}))
    for side in (2, 3):
        batch = torch.randn(4, 3, side, side), torch.randint(3, (4, side, side))
        accumulator.add(4, {"loss": torch.tensor(1.0)}, *batch)
        metric.update(*batch)
    assert result(accumulator)["acc"] == metric.compute()


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.array([1.0, 2.0]), {"m_0": 1.0, "m_1": 2.0}),
        (torch.ones(1, 1, dtype=torch.int32), {"m": 1.0}),
        (torch.tensor([1.0, 2.0, 4.0]), {"m/x": 1.0, "m/y": 2.0, "m/z": 4.0}),
        ({"mean": 1.0, "map": {"s": 2.0}}, {"m_mean": 1.0, "m_map_s": 2.0}),
    ],
)
def test_numbers_vectors_and_dicts_are_curves(value, expected):
    parts = numbers("m", value, ["x", "y", "z"])
    assert {name: number.item() for name, number in parts.items()} == expected
    # Lightning warns of other types
    assert all(number.dtype == torch.float32 for number in parts.values())


def test_other_values_are_handed_on_and_names_of_classes_fit() -> None:
    for value in (torch.zeros(3, 3), torch.zeros(101), None):
        assert numbers("m", value, ["x", "y", "z"])["m"] is value
    assert as_curve_names(["a b", "c", "Käse"]) == ["a_b", "c", "Käse"]
    assert as_curve_names(["a b", "a/b", "a_b_0"]) == ["a_b_0", "a_b_1", "a_b_0_2"]


def test_a_name_is_refused_that_another_curve_has() -> None:
    accumulator = measured(
        {"loss": MeanAbsoluteError()}, torch.ones(60), torch.ones(60)
    )
    with pytest.raises(UserError, match="two curves have the name 'loss'"):
        result(accumulator)


def test_metrics_with_equal_states_in_the_first_batch_stay_two() -> None:
    """As of a network that is not trained. torchmetrics' compute groups would take them
    for one."""
    metrics = {"low": BinaryF1Score(0.5), "high": BinaryF1Score(0.7)}
    outputs, targets = torch.rand(100), torch.randint(2, (100,))
    outputs[:50] *= 0.1
    found = result(measured(MetricCollection(metrics), outputs, targets, (50, 50)))
    for name, metric in metrics.items():
        assert found[name] == metric.clone()(outputs, targets)


def test_metrics_keep_their_order_and_the_names_that_the_user_gave() -> None:
    accuracy = MulticlassAccuracy(3)
    pair = {"b": accuracy, "a": accuracy.clone()}
    nested = {"both": MetricCollection(pair), "z": accuracy.clone()}
    assert list(collection(pair)) == ["b", "a"]
    assert list(collection(accuracy)) == ["MulticlassAccuracy"]
    assert list(collection(None)) == []
    assert list(collection({"b": accuracy}, defaults={"a": accuracy})) == ["a", "b"]
    assert list(collection({"b": accuracy, "a": None}, {}, {"a": accuracy})) == ["b"]
    assert {*collection(MetricCollection(pair, prefix="x_"))} == {"x_a", "x_b"}
    assert {*collection(nested)} == {"both_a", "both_b", "z"}
    labels = torch.randint(3, (60,))
    wrapped = {"m": MinMaxMetric(accuracy)}
    found = result(measured(wrapped, torch.randn(60, 3), labels))
    assert {"m_raw", "m_min", "m_max"} < found.keys()


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
    # class numbers as outputs have the shape of their targets, too
    numbers = result(
        measured({"acc": accuracy}, logits.argmax(1), one_hot.argmax(1).float())
    )
    assert 0 <= numbers["acc"] <= 1


class BoxCountError(MeanAbsoluteError):
    """Takes a list with a dict for each sample, as a metric of detection does."""

    def update(self, preds: Any, target: Any) -> None:
        counts = [[len(sample["boxes"]) for sample in x] for x in (preds, target)]
        super().update(*map(torch.Tensor, counts))


def test_outputs_may_be_lists() -> None:
    boxes = [{"boxes": torch.zeros(i % 4, 4)} for i in range(60)]
    shifted = boxes[1:] + boxes[:1]
    assert result(measured({"num": BoxCountError()}, boxes, shifted))["num"] == 1.5


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


class Sizes(Metric):
    """Its value is the number of samples in each update."""

    per_batch = True

    def __init__(self) -> None:
        super().__init__()
        self.add_state("sizes", [], dist_reduce_fx="cat")

    def update(self, preds: Any, target: Any) -> None:
        self.sizes.append(len(target))

    def compute(self) -> Any:
        return torch.tensor(self.sizes)


class Joined(Sizes):
    per_batch = False


def test_a_metric_that_asks_for_it_sees_each_batch_and_the_others_do_not() -> None:
    metrics = {"batches": Sizes(), "joined": Joined()}
    outputs = torch.zeros(40)
    curve = measured(metrics, outputs, outputs, (8, 20, 12))
    found = result(curve)
    assert [found[f"batches_{i}"] for i in range(3)] == [8, 20, 12]
    assert found["joined"] == 40
    curve.reset()
    curve.epoch = Accumulator(collection({"batches": Sizes(), "all": Joined()}))
    for _ in range(3):
        curve.add(5, {"loss": torch.tensor(0.0)}, outputs[:5], outputs[:5])
    curve.flush()
    assert curve.epoch.metrics["batches"].sizes == [5, 5, 5]
    assert curve.epoch.metrics["all"].sizes == [15]


class Named(SyntheticImages):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.classes = ["cat", "a b/c", "dog", "d:g"]


def test_each_class_has_an_accuracy_beside_the_usual_one(train, tmp_path, capsys):
    train(f"--data {HERE}.Named --trainer.max_epochs 1")
    # the checkpoint of a run without them resumes with them
    flags = "--model.per_class true --model.top_k 2 --trainer.max_epochs 3"
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
    assert json.loads((folder / "metrics.json").read_text()) == result
    assert {"train_class_acc/cat", "val_class_acc/cat"} <= curves(folder).keys()
    best = folder / "checkpoints" / "best.ckpt"
    again = script("evaluate").main(["--ckpt_path", str(best)])
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


def test_each_parameter_group_has_a_curve(train, tmp_path):
    groups = ("--model.parameter_groups", "{layers.1.weight: {lr: 0.5}}")
    train(*groups, "--model.lr 0.25 --trainer.max_epochs 1")
    train("--ckpt_path last --trainer.max_epochs 2")
    points = curves(tmp_path / "tiny" / "version_0")
    rates = {"lr/layers.1.weight": 0.5, "lr/rest": 0.25}
    assert {name for name in points if name.startswith("lr")} == {*rates}
    for name, rate in rates.items():
        assert {value for _, value in points[name]} == {rate}
        assert points[name][-1][0] > 30  # also after the resume


@pytest.mark.parametrize(
    ("targets", "outputs", "inputs", "num"),
    [
        (
            (torch.zeros(300), torch.zeros(300)),
            torch.zeros(300, 2),
            torch.zeros(300),
            300,
        ),
        ([torch.zeros(5)] * 2, [torch.zeros(5, 3)] * 2, torch.zeros(2, 5), 2),
        ((torch.zeros(5), torch.zeros(5)), None, [torch.zeros(5)] * 2, 5),
        ({"y": torch.zeros(7)}, None, None, 7),
        # detection: a dict for each of four images of several sizes
        ([{"boxes": torch.zeros(3, 4)}] * 4, None, [torch.zeros(3, 8, 9)] * 4, 4),
        ([{"boxes": torch.zeros(i, 4)} for i in (1, 2)], None, None, 2),
        (["a text", "b"], None, torch.zeros(2, 5), 2),
        ([torch.zeros(57)], [torch.zeros(57, 3)], [torch.zeros(57)], 1),
        (None, torch.zeros(6, 2), torch.zeros(9), 6),
        (None, None, (torch.zeros(8), torch.zeros(8)), 8),
        (None, None, None, 1),
    ],
)
def test_the_samples_of_a_batch_are_counted(targets, outputs, inputs, num):
    assert num_samples(targets, outputs, (inputs, targets)) == num


def test_r2_of_one_sample_is_nan_in_a_point_of_training() -> None:
    point = Accumulator(collection({"m": R2Score()}), "train/")
    point.add(1, LOSS, torch.ones(1), torch.ones(1))
    assert result(point)["train/m"].isnan()


def test_what_a_metric_cannot_take_is_refused_in_training_too() -> None:
    point = Accumulator(collection({"m": R2Score()}), "train/")
    point.add(2, LOSS, torch.zeros(2, 3), torch.zeros(2))
    with pytest.raises(RuntimeError, match=r"m got \(\(2, 3\), \(2,\)\)"):
        result(point)


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


class LogSoftmax(nn.Conv1d):
    def forward(self, x: Any) -> Any:
        return super().forward(x).log_softmax(1)


OF_255 = MulticlassAccuracy(4, average="micro", ignore_index=255)


@pytest.mark.parametrize(
    ("criterion", "metrics", "sides", "ignored"),
    [
        (None, None, (), -100),
        (nn.CrossEntropyLoss(ignore_index=0), None, (5,), 0),
        (nn.NLLLoss(), None, (5,), -100),
        (WithinALoss(), None, (5, 5), 255),
        (NotNamed(), None, (5,), -100),
        (NotNamed(), {"acc": OF_255}, (5,), 255),
    ],
)
def test_targets_that_the_loss_ignores_count_nowhere(
    criterion, metrics, sides, ignored, tmp_path
):
    nets = {0: nn.Linear, 1: LogSoftmax, 2: nn.Conv2d}
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
