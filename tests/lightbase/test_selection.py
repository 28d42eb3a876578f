"""By which metric best.ckpt is chosen, and which is better."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from example.classifier import Classifier
from example.models.mlp import MLP
from lightning import LightningModule
from paths import argv
from test_training import checkpoint, curves
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy, MulticlassHammingDistance

from lightbase.errors import UserError
from lightbase.run.selection import better, first_metric

Train = Callable[..., dict[str, Any]]
REGRESSION = argv(
    "--model example.regressor.Regressor --data small.Numbers --model.net.sizes [10,1]"
)
# so high a rate that no epoch is like the one before
WILD = ("--trainer.max_epochs", 4, "--model.lr", 0.5)


def saved(folder: Path) -> tuple[str | None, str | None]:
    config = yaml.safe_load((folder / "config.yaml").read_text())
    return config["monitor"], config["monitor_mode"]


def best_epoch(folder: Path) -> int:
    return checkpoint(folder, "best")["epoch"]


def test_the_lowest_error_is_the_best(train, tmp_path, capsys):
    train(*REGRESSION, *WILD)
    assert "lowest val/mae" in capsys.readouterr().out
    folder = tmp_path / "tiny" / "version_0"
    errors = [value for _, value in curves(folder)["val/mae"]]
    assert best_epoch(folder) == errors.index(min(errors))
    assert saved(folder) == ("auto", None)


def test_the_first_metric_is_the_default_and_the_highest_f1_the_best(train, tmp_path, capsys):
    text = "{f1: {class_path: torchmetrics.classification.MulticlassF1Score}, acc: {class_path: "
    train("--model.metrics", text + "torchmetrics.classification.MulticlassAccuracy}}", *WILD)
    folder = tmp_path / "tiny" / "version_0"
    scores = [value for _, value in curves(folder)["val/f1"]]
    assert best_epoch(folder) == scores.index(max(scores))
    assert "highest val/f1" in capsys.readouterr().out


def test_without_a_metric_of_a_flag_it_is_the_first_the_loss_or_acc() -> None:
    model = Classifier(MLP([2, 4]), num_classes=4)
    assert first_metric(model) == "acc"
    model.metrics = {}
    assert first_metric(model) == "loss"
    assert first_metric(LightningModule()) == "acc"


class Energetic(Classifier):
    """Logs a value whose name does not say whether more is better."""

    def on_validation_epoch_end(self) -> None:
        self.log("val/energy", (-1.0) ** self.current_epoch)  # 1, -1, 1, ...


def test_a_name_that_does_not_tell_needs_a_mode(train, tmp_path, capsys):
    flags = ("--model", "test_selection.Energetic", "--monitor", "val/energy")
    with pytest.raises(SystemExit) as caught:
        train(*flags)
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert "--monitor_mode" in error
    assert len(error.splitlines()) <= 2
    assert not list(tmp_path.iterdir())
    for mode, epoch in (("min", 1), ("max", 0)):
        train(*flags, "--monitor_mode", mode, "--name", mode)
        assert best_epoch(tmp_path / mode / "version_0") == epoch
        assert saved(tmp_path / mode / "version_0") == ("val/energy", mode)


@pytest.mark.parametrize(
    ("metric", "mode"),
    [
        ("MulticlassF1Score", "max"),
        ("MulticlassCalibrationError", "min"),
        ("MulticlassHammingDistance", "min"),
    ],
)
def test_torchmetrics_is_asked_whatever_the_name(metric: str, mode: str) -> None:
    import torchmetrics.classification

    own = getattr(torchmetrics.classification, metric)(num_classes=4)
    model = Classifier(MLP([2, 4]), metrics={"quality": own}, num_classes=4)
    assert better("val/quality", model) == mode


def test_a_metric_with_a_slash_in_its_name_is_not_taken_for_another_one() -> None:
    metrics: Any = {"wrong/acc": MulticlassHammingDistance(4), "acc": MulticlassAccuracy(4)}
    model = Classifier(MLP([2, 4]), metrics=metrics, num_classes=4)
    assert [better(f"val/{name}", model) for name in metrics] == ["min", "max"]


@pytest.mark.parametrize(
    ("monitor", "mode"),
    [
        ("val/loss", "min"),
        ("val/top5_acc", "max"),
        ("val/pixel_error", "min"),
        ("val/AUROC", "max"),
        ("val_loss", "min"),
        ("val/f1", "max"),
    ],
)
def test_names_in_use_need_no_mode(monitor: str, mode: str) -> None:
    assert better(monitor, LightningModule()) == mode


def test_other_names_are_refused() -> None:
    with pytest.raises(UserError, match="higher or a lower") as caught:
        better("val/energy", LightningModule())
    assert caught.value.status == 2


class Plain(LightningModule):
    """Lightning's own ways, nothing of ours. logs: what validation logs: the share of right
    predictions."""

    def __init__(self, logs: str = "val/acc", lr: float = 0.5) -> None:
        super().__init__()
        self.net = MLP([192, 4])
        self.logs, self.lr = logs, lr

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log(self.logs, (self.net(batch[0]).argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


@pytest.fixture
def plain(tmp_path: Path) -> str:
    """A config without what the Classifier takes."""
    config = tmp_path / "plain.yaml"
    config.write_text("""
name: plain
model: test_selection.Plain
data:
  class_path: example.data.synthetic.SyntheticImages
  init_args: {image_shape: [3, 8, 8], num_classes: 4, num_train: 350, num_test: 75, batch_size: 16}
device_monitor: false
step_timer: false
figures_every_n_epochs: 0
trainer: {accelerator: cpu, max_epochs: 4, log_every_n_steps: 5}
""")
    return str(config)


def test_a_plain_module_is_compared_by_its_accuracy(train, tmp_path, plain):
    train(config=plain)
    folder = tmp_path / "plain" / "version_0"
    scores = [value for _, value in curves(folder)["val/acc"]]
    assert best_epoch(folder) == scores.index(max(scores))


def test_who_logs_no_such_metric_has_the_last_epoch_and_a_line_with_those_that_there_are(
    train, tmp_path, plain, capsys
):
    train("--model.logs val_hits", config=plain)
    folder = tmp_path / "plain" / "version_0"
    assert best_epoch(folder) == 3
    shown = capsys.readouterr().out
    assert "best.ckpt is the last epoch, unless --monitor names one of val_hits\n" in shown
    train("--ckpt_path last --trainer.max_epochs 6", config=str(folder / "config.yaml"))
    assert best_epoch(folder) == 5


class Untested(Plain):
    validation_step = LightningModule.validation_step


@pytest.mark.filterwarnings("ignore:You passed in a `val_dataloader`")
def test_a_module_without_a_validation_has_its_last_epoch(train, tmp_path, plain, capsys):
    train("--model", "test_selection.Untested", config=plain)
    assert best_epoch(tmp_path / "plain" / "version_0") == 3
    assert "Validation: none (Untested has no validation_step)" in capsys.readouterr().out


def test_no_monitor_is_the_last_epoch(train, tmp_path, capsys):
    train("--monitor", "null", *WILD)
    folder = tmp_path / "tiny" / "version_0"
    assert best_epoch(folder) == 3
    assert saved(folder) == (None, None)
    with pytest.raises(SystemExit) as caught:
        train("--monitor", "null", "--patience", 2)
    assert caught.value.code == 2
    assert "--patience 2 needs" in capsys.readouterr().err
