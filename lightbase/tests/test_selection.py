"""By which metric best.ckpt is chosen, and which is better."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from example.classifier import Classifier
from example.models.mlp import MLP
from lightning import LightningModule
from paths import ACCELERATOR, argv
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy, MulticlassHammingDistance
from written import checkpoint, curves

from lightbase.core.checks import better

REGRESSION = argv(
    "--model example.regressor.Regressor --data small.Numbers --model.net.sizes [10,1]"
)
F1_FIRST = (
    "{f1: torchmetrics.classification.MulticlassF1Score, "
    "acc: torchmetrics.classification.MulticlassAccuracy}"
)
# so high a rate that no epoch is like the one before
WILD = ("--trainer.max_epochs", 4, "--model.lr", 0.5)


def saved(folder: Path) -> tuple[str | None, str | None]:
    config = yaml.safe_load((folder / "config.yaml").read_text())
    return config["monitor"], config["monitor_mode"]


def best_epoch(folder: Path) -> int:
    return checkpoint(folder, "best")["epoch"]


@pytest.mark.parametrize(
    ("flags", "text"),
    [(REGRESSION, "lowest val/mae"), (("--model.metrics", F1_FIRST), "highest val/f1")],
)
def test_the_first_metric_selects_the_best_epoch(train, tmp_path, capsys, flags, text):
    train(*flags, *WILD)
    assert f"Best epoch: the one with the {text}\n" in capsys.readouterr().out
    folder = tmp_path / "tiny" / "version_0"
    better, monitor = text.split()
    values = [value for _, value in curves(folder)[monitor]]
    assert best_epoch(folder) == values.index(
        min(values) if better == "lowest" else max(values)
    )
    assert saved(folder) == ("auto", None)


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


def test_torchmetrics_or_the_name_says_which_is_better() -> None:
    metrics: Any = {
        "wrong/acc": MulticlassHammingDistance(4),
        "acc": MulticlassAccuracy(4),
    }
    model = Classifier(MLP([2, 4]), metrics=metrics, num_classes=4)
    assert [better(f"val/{name}", model) for name in metrics] == ["min", "max"]
    names = ("val/loss", "val/pixel_error", "val_loss", "val/top5_acc", "val/AUROC")
    modes = ["min", "min", "min", "max", "max"]
    assert [better(monitor, LightningModule()) for monitor in names] == modes


class Plain(LightningModule):
    """Lightning's own ways, nothing of ours."""

    def __init__(self) -> None:
        super().__init__()
        self.net = MLP([192, 4])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/acc", (self.net(batch[0]).argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


@pytest.fixture
def plain(tmp_path: Path) -> str:
    """A config without what the Classifier takes."""
    config = tmp_path / "plain.yaml"
    config.write_text(
        """
name: plain
model: test_selection.Plain
data:
  class_path: example.data.synthetic.SyntheticImages
  init_args:
    {image_shape: [3, 8, 8], num_classes: 4, num_train: 350, num_test: 75,
     batch_size: 16}
device_monitor: false
step_timer: false
figures_every_n_epochs: 0
trainer: {accelerator: CPU, max_epochs: 4, log_every_n_steps: 5}
""".replace("CPU", ACCELERATOR)
    )
    return str(config)


def test_a_plain_module_has_its_last_epoch_or_that_of_monitor(
    train, tmp_path, plain, capsys
):
    train(config=plain)
    folder = tmp_path / "plain" / "version_0"
    assert best_epoch(folder) == 3
    assert "best.ckpt is the last epoch (no --monitor)\n" in capsys.readouterr().out
    train("--monitor val/acc --name by_acc", config=plain)
    folder = tmp_path / "by_acc" / "version_0"
    scores = [value for _, value in curves(folder)["val/acc"]]
    assert best_epoch(folder) == scores.index(max(scores))


def test_no_monitor_is_the_last_epoch(train, tmp_path, capsys):
    train("--monitor", "null", *WILD)
    folder = tmp_path / "tiny" / "version_0"
    assert best_epoch(folder) == 3
    assert saved(folder) == (None, None)
    with pytest.raises(SystemExit) as caught:
        train("--monitor", "null", "--patience", 2)
    assert caught.value.code == 2
    assert "--patience 2 needs" in capsys.readouterr().err
