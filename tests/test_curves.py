"""What `track` is told becomes means over samples and metrics, whole after an interruption."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_training import Terminate, curves
from torch import Tensor
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy

from project.base.curves import Means, collection, numbers
from project.classifier import Classifier

Train = Callable[..., dict[str, Any]]
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


@pytest.mark.parametrize("at_batch", [6, 9], ids=["between log steps", "on a log step"])
@pytest.mark.parametrize("every", [5, 100])
def test_a_run_that_is_stopped_in_an_epoch_has_the_curves_of_a_whole_one(
    train: Train, tmp_path: Path, at_batch: int, every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "metrics.yaml").write_text(METRICS)
    flags = ("--config", tmp_path / "metrics.yaml", "--trainer.callbacks", "test_training.Terminate")
    flags += ("--trainer.log_every_n_steps", every)
    train(*flags, "--name", "whole")
    monkeypatch.setattr(Terminate, "at_batch", at_batch)
    with pytest.raises(SystemExit):
        train(*flags)
    monkeypatch.setattr(Terminate, "at_batch", None)
    train(*flags, "--ckpt_path", "last")
    found, expected = (curves(tmp_path / name / "version_0") for name in ("tiny", "whole"))
    assert {"train/loss", "train/acc", "train/f1", "train/auroc"} <= expected.keys()
    assert found == expected


def test_an_epoch_shorter_than_the_log_interval_has_one_point_at_its_end(train: Train, tmp_path: Path) -> None:
    for every in (19, 100):
        train("--trainer.log_every_n_steps", every, "--name", f"every_{every}")
    at_end, by_interval = (curves(tmp_path / f"every_{every}" / "version_0") for every in (100, 19))
    for name in ("train/loss", "train/acc"):
        assert [step for step, _ in at_end[name]] == [18, 37]
        assert at_end[name] == by_interval[name]


def test_points_between_two_log_steps_go_on_over_the_end_of_an_epoch(train: Train, tmp_path: Path) -> None:
    train("--trainer.log_every_n_steps", 1, "--name", "every_step")
    train("--trainer.log_every_n_steps", 10)
    single, found = (curves(tmp_path / name / "version_0")["train/loss"] for name in ("every_step", "tiny"))
    assert [step for step, _ in found] == [9, 19, 29]
    for step, value in found:
        last_ten = [loss for _, loss in single[step - 9 : step + 1]]
        assert value == pytest.approx(sum(last_ten) / 10, rel=1e-5)


def test_no_point_is_written_where_nothing_is_to_be_logged(train: Train, tmp_path: Path) -> None:
    train("--trainer.log_every_n_steps", 1, "--trainer.max_steps", 3)
    assert [step for step, _ in curves(tmp_path / "tiny" / "version_0")["train/loss"]] == [0, 1, 2]


class WithEntropy(Classifier):
    """Tracks a value of its own; no metrics of training."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.net(batch[0])
        loss = self.criterion(logits, batch[1])
        self.track("train", loss, entropy=-(logits.softmax(1) * logits.log_softmax(1)).sum(1).mean())
        return loss


def test_values_of_the_users_are_curves_and_metrics_need_outputs(train: Train, tmp_path: Path) -> None:
    train("--model", "test_curves.WithEntropy")
    found = curves(tmp_path / "tiny" / "version_0")
    assert {tag for tag in found if tag.startswith("train/")} == {"train/loss", "train/entropy"}
    assert 0 < found["train/entropy"][0][1] < 1.4
    assert "val/acc" in found


def test_means_are_over_samples_not_batches() -> None:
    means = Means(MetricCollection({}))
    means.add(3, {"loss": torch.tensor(1.0)}, None, None)
    means.add(1, {"loss": torch.tensor(5.0)}, None, None)
    assert means.result(first) == {"loss": 2, "num_samples": 4}
    means.reset()
    assert means.result(first) == {}


def test_a_loss_that_is_no_number_stays_one() -> None:
    means = Means(MetricCollection({}))
    for value in (1.0, float("nan")):
        means.add(1, {"loss": torch.tensor(value)}, None, None)
    assert means.result(first)["loss"].isnan()


def test_other_names_in_between_are_refused() -> None:
    means = Means(MetricCollection({}))
    means.add(1, {"loss": torch.tensor(1.0)}, None, None)
    with pytest.raises(ValueError, match=r"loss, extra now and loss before"):
        means.add(1, {"loss": torch.tensor(1.0), "extra": torch.tensor(1.0)}, None, None)


@pytest.mark.parametrize("sizes", [(4, 4, 4), (4, 4, 1)])
def test_metrics_do_not_depend_on_how_samples_are_batched(sizes: tuple[int, ...]) -> None:
    outputs, targets = torch.randn(sum(sizes), 3), torch.randint(3, (sum(sizes),))
    means = Means(MetricCollection({"acc": MulticlassAccuracy(3, average="micro")}))
    for x, y in zip(outputs.split(sizes), targets.split(sizes), strict=True):
        means.add(len(x), {"loss": torch.tensor(1.0)}, x, y)
    assert means.result(first)["acc"] == pytest.approx((outputs.argmax(1) == targets).float().mean().item())


def test_outputs_of_several_shapes_are_measured_one_after_the_other() -> None:
    """As with images of several sizes and a class for each pixel."""
    means = Means(MetricCollection({"acc": MulticlassAccuracy(3, average="micro")}))
    num_right = num = 0
    for side in (2, 3):
        outputs, targets = torch.randn(4, 3, side, side), torch.randint(3, (4, side, side))
        means.add(4, {"loss": torch.tensor(1.0)}, outputs, targets)
        num_right += int((outputs.argmax(1) == targets).sum())
        num += targets.numel()
    assert means.result(first)["acc"] == pytest.approx(num_right / num)


def test_a_state_and_what_came_after_it_make_a_whole() -> None:
    batches = [(torch.randn(4, 3), torch.randint(3, (4,))) for _ in range(4)]

    def make(chosen: list[tuple[Tensor, Tensor]]) -> Means:
        means = Means(MetricCollection({"acc": MulticlassAccuracy(3)}))
        for x, y in chosen:
            means.add(4, {"loss": x.mean()}, x, y)
        return means

    resumed = make([])
    resumed.add_state(make(batches[:2]).state(), torch.device("cpu"))
    for x, y in batches[2:]:
        resumed.add(4, {"loss": x.mean()}, x, y)
    whole = make(batches).result(first)
    found = resumed.result(first)
    assert {name: value.item() for name, value in found.items()} == {
        name: pytest.approx(value.item()) for name, value in whole.items()
    }


def test_what_is_no_number_is_no_curve() -> None:
    found = numbers({"a": torch.tensor(1.0), "b": torch.tensor([1.0, 2.0]), "c": torch.zeros(3, 3), "d": 4, "e": "x"})
    assert {name: float(value) for name, value in found.items()} == {"a": 1, "b_0": 1, "b_1": 2, "d": 4}


def test_a_metric_of_nothing_is_no_curve() -> None:
    means = Means(MetricCollection({"mean": MeanMetric()}))
    means.add(1, {"loss": torch.tensor(1.0)}, None, None)
    assert means.result(first).keys() == {"loss", "num_samples"}


def test_metrics_keep_their_order() -> None:
    metrics = {name: MulticlassAccuracy(3) for name in ("b", "a", "c")}
    assert list(collection(metrics)) == ["b", "a", "c"]
    assert list(collection(None)) == list(collection({})) == []
    assert list(collection(metrics["a"])) == ["MulticlassAccuracy"]
