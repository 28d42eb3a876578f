"""What `track` is told becomes means over samples and metrics, whole after an
interruption."""

import re
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import pytest
import torch
from example.classifier import Classifier
from lightning import Callback
from paths import Train
from stops import Terminate
from torch import Tensor
from torchmetrics import MetricCollection
from torchmetrics.classification import BinaryF1Score, MulticlassAccuracy
from written import curves

from lightbase.core.errors import UserError
from lightbase.core.metrics import Accumulator, collection, numbers

ONE = ("--trainer.max_epochs", 1)
METRICS = """
model:
  metrics:
    acc: {class_path: torchmetrics.classification.MulticlassAccuracy}
    f1: {class_path: torchmetrics.classification.MulticlassF1Score}
    auroc: {class_path: torchmetrics.classification.MulticlassAUROC}
"""


def first(tensors: Tensor) -> Tensor:
    """For `reduce` with one process."""
    return tensors


LINE = re.compile(r"Epoch (\d+) of .*train/loss ([\d.]+), train/acc ([\d.]+)")


def epoch_lines(shown: str) -> dict[str, tuple[float, float]]:
    """train/loss and train/acc of the lines that a file gets, by epoch."""
    return {
        epoch: (float(loss), float(acc)) for epoch, loss, acc in LINE.findall(shown)
    }


@pytest.mark.parametrize(
    ("at_batch", "every"),
    [
        (6, 5),
        *(pytest.param(*pair, marks=pytest.mark.slow) for pair in ((9, 5), (6, 100))),
    ],
)
@pytest.mark.linux
def test_a_run_that_is_stopped_in_an_epoch_has_the_curves_and_lines_of_a_whole_one(
    train, tmp_path, capsys, monkeypatch, at_batch, every
):
    (tmp_path / "metrics.yaml").write_text(METRICS)
    flags: Any = (
        "--config",
        tmp_path / "metrics.yaml",
        "--trainer.log_every_n_steps",
        every,
    )
    flags += ("--trainer.callbacks", "stops.Terminate")
    train(*flags, "--name", "whole")
    lines = epoch_lines(capsys.readouterr().out)
    monkeypatch.setattr(Terminate, "at_batch", at_batch)
    with pytest.raises(SystemExit):
        train(*flags)
    monkeypatch.setattr(Terminate, "at_batch", None)
    train(*flags, "--ckpt_path", "last")
    resumed, expected = (
        curves(tmp_path / name / "version_0") for name in ("tiny", "whole")
    )
    assert {"train/loss", "train/acc", "train/f1", "train/auroc"} <= expected.keys()
    assert resumed == expected
    assert epoch_lines(capsys.readouterr().out) == lines


# Of the points of three epochs with 19 steps each, by log interval: the last step of
# the mean, and the first one.
POINTS: dict[int, dict[int, int]] = {
    5: {4: 0, 9: 5, 14: 10, 18: 15, 19: 19, 24: 20, 29: 25, 34: 30, 37: 35, 39: 38}
    | {44: 40, 49: 45, 54: 50, 56: 55},
    13: {12: 0, 18: 13, 25: 19, 37: 26, 38: 38, 51: 39, 56: 52},
    100: {18: 0, 37: 19, 56: 38},
}


@pytest.mark.parametrize(
    "every", [13, *(pytest.param(every, marks=pytest.mark.slow) for every in (5, 100))]
)
def test_an_epochs_line_and_its_points_are_means_of_its_samples(
    train, trained, tmp_path, capsys, every
):
    schedule: Any = ("--trainer.max_epochs", 3, "--model.scheduler", "ExponentialLR")
    schedule += (
        "--model.scheduler_args.gamma",
        0.9,
        "--model.scheduler_interval",
        "step",
    )
    single = curves(trained(*schedule, "--trainer.log_every_n_steps", 1)[0])
    capsys.readouterr()
    train(*schedule, "--trainer.log_every_n_steps", every)
    found = curves(tmp_path / "tiny" / "version_0")
    lines = epoch_lines(capsys.readouterr().out)
    assert list(lines) == ["1", "2", "3"]
    for name, of_line in (("train/loss", 0), ("train/acc", 1)):
        each = [value for _, value in single[name]]
        for epoch, line in enumerate(lines.values()):
            assert line[of_line] == pytest.approx(
                mean(each[19 * epoch : 19 * epoch + 19]), abs=6e-5
            )
        assert dict(found[name]) == {
            step: pytest.approx(mean(each[first : step + 1]), rel=1e-5)
            for step, first in POINTS[every].items()
        }
    assert found["lr"] == [single["lr"][step] for step in POINTS[every]]


class LastLoss(Callback):
    """What a callback that watches train/loss, such as EarlyStopping, sees at the end
    of an epoch."""

    seen: float

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        LastLoss.seen = trainer.callback_metrics["train/loss"].item()


def test_callbacks_see_the_mean_of_the_epoch(train: Train, tmp_path: Path) -> None:
    train(
        *ONE,
        "--trainer.log_every_n_steps",
        1,
        "--trainer.callbacks",
        "test_curves.LastLoss",
    )
    losses = [
        value for _, value in curves(tmp_path / "tiny" / "version_0")["train/loss"]
    ]
    assert LastLoss.seen == pytest.approx(mean(losses), rel=1e-5)


class WithEntropy(Classifier):
    """Tracks a value of its own; no metrics of training."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.net(batch[0])
        loss = self.criterion(logits, batch[1])
        self.track(
            "train",
            loss,
            entropy=-(logits.softmax(1) * logits.log_softmax(1)).sum(1).mean(),
        )
        return loss

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.track("test", self.criterion(self(batch[0]), batch[1]))


def test_values_of_the_users_are_curves_and_metrics_need_outputs(train, tmp_path):
    result = train("--model", "test_curves.WithEntropy", *ONE)
    # without outputs and targets the samples of the batches are counted: the last one
    # is smaller
    assert result["test/num_samples"] == 75
    usual = train(*ONE, "--name", "usual")
    assert result["test/loss"] == pytest.approx(usual["test/loss"], rel=1e-6)
    found = curves(tmp_path / "tiny" / "version_0")
    assert {tag for tag in found if tag.startswith("train/")} == {
        "train/loss",
        "train/entropy",
    }
    assert 0 < found["train/entropy"][0][1] < 1.4
    assert "val/acc" in found


def test_other_names_in_between_are_refused() -> None:
    means = Accumulator(MetricCollection({}))
    means.add(1, {"loss": torch.tensor(1.0)}, None, None)
    with pytest.raises(
        ValueError, match=r"\['loss', 'extra'\] now and \['loss'\] before"
    ):
        means.add(
            1, {"loss": torch.tensor(1.0), "extra": torch.tensor(1.0)}, None, None
        )


@pytest.mark.parametrize("sizes", [(4, 4, 4), (4, 4, 1)])
def test_means_and_metrics_do_not_depend_on_how_samples_are_batched(
    sizes: tuple[int, ...],
) -> None:
    outputs, targets = torch.randn(sum(sizes), 3), torch.randint(3, (sum(sizes),))
    means = Accumulator(
        MetricCollection({"acc": MulticlassAccuracy(3, average="micro")})
    )
    for x, y in zip(outputs.split(sizes), targets.split(sizes), strict=True):
        means.add(len(x), {"loss": x.mean()}, x, y)
    result = means.result(first)
    assert result["acc"] == pytest.approx(
        (outputs.argmax(1) == targets).float().mean().item()
    )
    assert result["loss"] == pytest.approx(outputs.mean().item())
    assert result["num_samples"] == sum(sizes)
    means.reset()
    assert means.result(first) == {}


def test_outputs_of_several_shapes_are_measured_one_after_the_other() -> None:
    """As with images of several sizes and a class for each pixel."""
    means = Accumulator(
        MetricCollection({"acc": MulticlassAccuracy(3, average="micro")})
    )
    num_right = num = 0
    for side in (2, 3):
        outputs, targets = (
            torch.randn(4, 3, side, side),
            torch.randint(3, (4, side, side)),
        )
        means.add(4, {"loss": torch.tensor(1.0)}, outputs, targets)
        num_right += int((outputs.argmax(1) == targets).sum())
        num += targets.numel()
    assert means.result(first)["acc"] == pytest.approx(num_right / num)


def test_a_state_and_what_came_after_it_make_a_whole() -> None:
    batches = [(torch.randn(4, 3), torch.randint(3, (4,))) for _ in range(4)]

    def make(chosen: list[tuple[Tensor, Tensor]]) -> Accumulator:
        means = Accumulator(MetricCollection({"acc": MulticlassAccuracy(3)}))
        for x, y in chosen:
            means.add(4, {"loss": x.mean()}, x, y)
        return means

    resumed = make([])
    resumed.add_state(make(batches[:2]).state())
    for x, y in batches[2:]:
        resumed.add(4, {"loss": x.mean()}, x, y)
    whole = make(batches).result(first)
    found = resumed.result(first)
    assert {name: value.item() for name, value in found.items()} == {
        name: pytest.approx(value.item()) for name, value in whole.items()
    }


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (True, {"m": 1.0}),
        (np.float32(2.5), {"m": 2.5}),
        (np.array([1.0, 2.0]), {"m_0": 1.0, "m_1": 2.0}),
        (torch.ones(1, 1, dtype=torch.int32), {"m": 1.0}),
        (torch.tensor([1.0, 2.0, 4.0]), {"m/x": 1.0, "m/y": 2.0, "m/z": 4.0}),
        ({"mean": 1.0, "map": {"s": 2.0}}, {"m_mean": 1.0, "m_map_s": 2.0}),
        *(
            (x, {})
            for x in (
                torch.zeros(3, 3),
                torch.zeros(101),
                None,
                "x",
                (torch.zeros(2), 1),
            )
        ),
    ],
    ids=repr,
)
def test_numbers_vectors_and_dicts_are_curves_and_the_rest_is_handed_on(
    value, expected
):
    parts = numbers("m", value, ["x", "y", "z"])
    if not expected:
        assert parts["m"] is value
    else:
        assert {name: number.item() for name, number in parts.items()} == expected
        # Lightning warns of other types
        assert all(number.dtype == torch.float32 for number in parts.values())


class TracksAcc(Classifier):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        logits = self.net(batch[0])
        self.track("val", self.criterion(logits, batch[1]), logits, batch[1], acc=7.0)


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        (
            "val/loss",
            ("--model.metrics.loss", "torchmetrics.classification.MulticlassAccuracy"),
        ),
        ("val/acc", ("--model", "test_curves.TracksAcc")),
    ],
)
def test_a_name_that_another_curve_has_is_refused(train, tmp_path, capsys, name, flags):
    with pytest.raises(SystemExit) as caught:
        train(*flags)
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert f"two curves have the name {name!r}" in error
    assert len(error.splitlines()) == 1
    assert not list(tmp_path.glob("*/version_*"))


class StepsByHand(Classifier):
    """Steps its optimizer and its schedule before `track`."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        loss = self.criterion(self(batch[0]), batch[1])
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.lr_schedulers().step()  # type: ignore[union-attr]
        self.track("train", loss)


def test_the_rate_of_a_step_by_hand_is_that_of_its_step(train, tmp_path):
    flags = "--model test_curves.StepsByHand --model.scheduler ExponentialLR"
    flags += " --model.scheduler_args.gamma 0.5 --trainer.log_every_n_steps 1"
    train(flags, *ONE)
    rates = [rate for _, rate in curves(tmp_path / "tiny" / "version_0")["lr"]]
    assert rates[:3] == pytest.approx([0.01, 0.005, 0.0025])


class LogsLosses(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("train/loss", 100.0)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val/loss", 100.0)
        return super().validation_step(batch, batch_idx)


def test_of_a_name_that_is_logged_too_the_value_of_track_counts(train, tmp_path):
    flags = ("--trainer.log_every_n_steps", 5, "--monitor", "val/loss")
    train(*flags, "--model", "test_curves.LogsLosses")
    found = curves(tmp_path / "tiny" / "version_0")
    for name in ("train/loss", "val/loss"):
        assert all(value < 10 for _, value in found[name])
        assert len(dict(found[name])) == len(found[name])


def test_metrics_with_equal_states_in_the_first_batch_stay_two() -> None:
    """As of a network that is not trained. torchmetrics' compute groups would take them
    for one."""
    metrics = {
        "low": BinaryF1Score(threshold=0.5),
        "high": BinaryF1Score(threshold=0.7),
    }
    outputs, targets = torch.rand(100), torch.randint(2, (100,))
    for given in (metrics, MetricCollection(metrics)):
        means = Accumulator(collection(given).clone())
        for scale in (0.1, 1):
            means.reset()
            means.add(100, {"loss": torch.tensor(0.0)}, scale * outputs, targets)
            result = means.result(first)
        for name, metric in metrics.items():
            assert result[name] == metric.clone()(outputs, targets)


@pytest.mark.parametrize("name", ["recall@0.5", "update"])
def test_a_name_that_torch_does_not_take_is_two_lines_at_most(name: str) -> None:
    with pytest.raises(
        UserError, match=re.escape(f"model.metrics: {name!r}")
    ) as caught:
        collection({name: MulticlassAccuracy(3)})
    assert caught.value.status == 2


def test_metrics_keep_their_order() -> None:
    metrics = {name: MulticlassAccuracy(3) for name in ("b", "a", "c")}
    assert list(collection(metrics)) == ["b", "a", "c"]
    assert list(collection(None)) == list(collection({})) == []
    assert list(collection(metrics["a"])) == ["MulticlassAccuracy"]
