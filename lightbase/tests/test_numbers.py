"""Metrics of each class, wrappers, collections, metrics that are no curves; what a
metric gets."""

import json
from typing import Any

import pytest
import torch
import yaml
from example.classifier import Classifier
from example.data.synthetic import SyntheticImages
from paths import script
from torch import Tensor
from torch.optim import SGD
from torchmetrics import MeanAbsoluteError, MetricCollection, MinMaxMetric
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassF1Score,
    MultilabelAveragePrecision,
)
from torchmetrics.wrappers import BootStrapper, Running
from written import curves

from lightbase.core.errors import UserError
from lightbase.core.metrics import Accumulator, as_curve_names, collection

HERE = "test_numbers"


class Named(SyntheticImages):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.classes = ["cat", "a b/c", "dog", "d:g"]


def test_each_class_has_an_accuracy_beside_the_usual_one(train, tmp_path, capsys):
    train("--data", f"{HERE}.Named", "--trainer.max_epochs", 1)
    # the checkpoint of a run without them resumes with them
    flags = ("--model.per_class", "true", "--model.top_k", 2)
    result = train("--ckpt_path", "last", *flags, "--trainer.max_epochs", 3)
    shown = capsys.readouterr().out
    names = [f"test_class_acc/{name}" for name in ("cat", "a_b_c", "dog", "d_g")]
    assert set(names) == {key for key in result if key.startswith("test_class_acc")}
    assert result["test/acc"] <= result["test/top2"] <= 1
    lines = [
        line.split()
        for line in shown.splitlines()
        if line.startswith("  test_class_acc/")
    ]
    assert [float(value) for _, value in lines] == sorted(
        float(value) for _, value in lines
    )
    assert "class_acc" not in "".join(
        line for line in shown.splitlines() if line.startswith(("Epoch", "Test"))
    )
    folder = tmp_path / "tiny" / "version_0"
    assert json.loads((folder / "metrics.json").read_text()) == result
    assert {f"{stage}_class_acc/cat" for stage in ("train", "val", "test")} <= curves(
        folder
    ).keys()
    again = script("evaluate").main(
        ["--ckpt_path", str(folder / "checkpoints" / "best.ckpt")]
    )
    assert again == {
        key: value for key, value in result.items() if key.startswith("test")
    }


def test_names_of_classes_fit_into_names_of_curves() -> None:
    assert as_curve_names(["a b", "a/b", "c", "Käse"]) == [
        "a_b_0",
        "a_b_1",
        "c",
        "Käse",
    ]


def test_top_k_over_the_number_of_classes_is_refused(train, capsys):
    with pytest.raises(SystemExit) as caught:
        train("--model.top_k", 5)
    assert caught.value.code == 2
    assert capsys.readouterr().err.endswith(
        "top_k 5: there are 4 classes; give fewer\n"
    )


def measured(metrics: Any, outputs: Any, targets: Any) -> dict[str, Any]:
    accumulator = Accumulator(collection(metrics))
    for batch in (slice(0, 30), slice(30, None)):
        accumulator.add(30, {"loss": torch.tensor(1.0)}, outputs[batch], targets[batch])
    return accumulator.result(lambda tensor: tensor)


def test_a_classification_metric_gets_float_targets_as_labels() -> None:
    """As BCEWithLogitsLoss needs them; a metric of numbers beside it gets floats."""
    logits, targets = torch.randn(60, 3), torch.randint(2, (60, 3))
    metrics = {"ap": MultilabelAveragePrecision(3), "mae": MeanAbsoluteError()}
    result = measured(metrics, logits, targets.float())
    assert result["ap"] == MultilabelAveragePrecision(3)(logits, targets)
    assert result["mae"] == pytest.approx((logits - targets).abs().mean().item())


def test_targets_that_are_no_labels_are_refused_and_metrics_of_numbers_take_them() -> (
    None
):
    outputs, targets = torch.rand(60, 3), torch.rand(60, 3)
    assert measured({"mae": MeanAbsoluteError()}, outputs, targets)["mae"] < 1
    with pytest.raises(UserError, match="got targets that are no whole numbers"):
        measured({"ap": MultilabelAveragePrecision(3)}, outputs, targets)


class BoxCountError(MeanAbsoluteError):
    """Takes a list with a dict for each sample, as a metric of detection does."""

    def update(self, preds: Any, target: Any) -> None:
        nums = [
            [float(len(sample["boxes"])) for sample in side] for side in (preds, target)
        ]
        super().update(*map(torch.tensor, nums))


def test_outputs_may_be_lists() -> None:
    boxes = [{"boxes": torch.zeros(i % 4, 4)} for i in range(60)]
    assert (
        measured({"num": BoxCountError()}, boxes, boxes[1:] + boxes[:1])["num"] == 1.5
    )


def test_collections_and_wrappers_keep_the_names_that_the_user_gave() -> None:
    outputs, targets = torch.randn(60, 3), torch.randint(3, (60,))

    def pair(**affixes: str) -> MetricCollection:
        return MetricCollection(
            {"a": MulticlassAccuracy(3), "f": MulticlassF1Score(3)}, **affixes
        )

    usual = {"loss", "num_samples"}
    for metrics, expected in [
        (pair(prefix="x_"), {"x_a", "x_f"}),
        (pair(postfix="_y"), {"a_y", "f_y"}),
        ({"both": pair(), "z": MulticlassAccuracy(3)}, {"both_a", "both_f", "z"}),
        ({"m": MinMaxMetric(MulticlassAccuracy(3))}, {"m_raw", "m_min", "m_max"}),
    ]:
        assert measured(metrics, outputs, targets).keys() - usual == expected


METRIC = "torchmetrics.classification.Multiclass"


def test_wrappers_and_matrices_of_a_yaml_are_curves_and_files(train, tmp_path, capsys):
    wrappers = "torchmetrics.wrappers"
    # what the data knows is filled in one level deep
    options = {"average": "none", "num_classes": 4}
    recall = {"class_path": f"{METRIC}Recall", "init_args": options}
    f1 = {"class_path": f"{METRIC}F1Score", "init_args": {"num_classes": 4}}
    metrics = {
        "acc": {"class_path": f"{METRIC}Accuracy", "init_args": {"average": "micro"}},
        "each": {
            "class_path": f"{wrappers}.ClasswiseWrapper",
            "init_args": {"metric": recall},
        },
        "sure": {
            "class_path": f"{wrappers}.BootStrapper",
            "init_args": {"base_metric": f1},
        },
        "confusion": f"{METRIC}ConfusionMatrix",
        "roc": f"{METRIC}ROC",
    }
    config = tmp_path / "metrics.yaml"
    config.write_text(yaml.safe_dump({"model": {"metrics": metrics}}))
    flags = (
        "--config",
        config,
        "--data",
        f"{HERE}.Named",
        "--figures_every_n_epochs",
        1,
    )
    result = train(*flags, "--trainer.max_epochs", 1)
    folder = tmp_path / "tiny" / "version_0"
    points = curves(folder)
    assert {
        "val/sure_mean",
        "val/sure_std",
        "val_each/cat",
        "train_each/d_g",
    } <= points.keys()
    rows = torch.tensor(
        json.loads((folder / "metrics" / "test_confusion.json").read_text())
    )
    assert rows.trace() / rows.sum() == pytest.approx(result["test/acc"], abs=1e-6)
    recalls = rows.diagonal() / rows.sum(1)
    assert result["test_each/dog"] == pytest.approx(recalls[2].item(), abs=1e-6)
    files = {
        f"{stage}_{name}.json"
        for stage in ("val", "test")
        for name in ("confusion", "roc")
    }
    assert {path.name for path in (folder / "metrics").iterdir()} == files
    assert len(json.loads((folder / "metrics" / "val_roc.json").read_text())) == 3
    out = capsys.readouterr().out
    assert (
        out.count("Metric roc is no curve: its values are in metrics/val_roc.json\n")
        == 1
    )


class Groups(Classifier):
    """Two optimizers, one of them with two groups."""

    def __init__(self, kind: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.kind = kind
        self.automatic_optimization = kind == "one"

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.kind == "two":
            self.manual_backward(loss)
            for optimizer in self.optimizers():
                optimizer.step()
                optimizer.zero_grad()
        return loss

    def configure_optimizers(self) -> Any:
        first, *others = self.net.parameters()
        groups = [{"params": [first], "lr": 0.5}, {"params": others, "name": "others"}]
        optimizers = [SGD(groups, lr=0.25)]
        if self.kind == "two":
            optimizers = [SGD([first], lr=0.5), SGD(groups[1:], lr=0.25)]
        return optimizers


OF_YAML = (
    "--model.lr",
    0.25,
    "--model.parameter_groups",
    '{"layers.1.weight": {lr: 0.5}}',
)


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        (OF_YAML, ["layers.1.weight", "rest"]),
        (("--model", f"{HERE}.Groups", "--model.kind", "one"), ["group_0", "others"]),
        (
            ("--model", f"{HERE}.Groups", "--model.kind", "two"),
            ["optimizer_0", "others"],
        ),
    ],
    ids=["a yaml", "one optimizer", "two optimizers"],
)
def test_each_parameter_group_has_a_line_and_a_curve(
    train, tmp_path, capsys, flags, names
):
    train(*flags, "--trainer.max_epochs", 1)
    train("--ckpt_path", "last", "--trainer.max_epochs", 2)
    line = f"Parameter group {names[0]}: 1 parameter tensors, lr 0.5\n"
    assert capsys.readouterr().out.count(line) == 2
    points = curves(tmp_path / "tiny" / "version_0")
    assert {name for name in points if name.startswith("lr")} == {
        f"lr/{name}" for name in names
    }
    for name, rate in zip(names, (0.5, 0.25), strict=True):
        steps, rates = zip(*points[f"lr/{name}"], strict=True)
        assert set(rates) == {rate}
        assert steps[-1] > 30  # also after the resume


def test_a_wrapper_sees_each_batch_and_leaves_the_random_numbers_of_the_training() -> (
    None
):
    wrappers = {
        "last": Running(MeanAbsoluteError(), 3),
        "sure": BootStrapper(MeanAbsoluteError()),
    }
    accumulator, state = Accumulator(collection(wrappers)), torch.get_rng_state()
    for i in range(5):
        accumulator.add(
            8, {"loss": torch.zeros(())}, torch.full((8,), float(i)), torch.zeros(8)
        )
    assert (
        accumulator.result(lambda sums: sums)["last"] == 3
    )  # of the batches 2, 3 and 4
    assert torch.equal(torch.get_rng_state(), state)
