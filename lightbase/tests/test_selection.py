"""By which metric best.ckpt is chosen, and which is better."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from example.classifier import Classifier
from example.models.mlp import MLP
from lightning import LightningModule
from paths import ACCELERATOR
from plain import PlainModule
from torchmetrics.classification import MulticlassAccuracy, MulticlassHammingDistance
from written import checkpoint, curves, refused

from lightbase.model.monitor import better

F1_FIRST = (
    "{f1: torchmetrics.classification.MulticlassF1Score, "
    "acc: torchmetrics.classification.MulticlassAccuracy}"
)
REGRESSION = "--model example.regressor.Regressor --data small.Numbers"
# so high a rate that no epoch is like the one before
WILD = "--trainer.max_epochs 4 --model.lr 0.5"


def saved(folder: Path) -> tuple[str | None, str | None]:
    config = yaml.safe_load((folder / "config.yaml").read_text())
    return config["monitor"], config["monitor_mode"]


def best_epoch(folder: Path) -> int:
    return checkpoint(folder, "best")["epoch"]


@pytest.mark.parametrize(
    ("flags", "monitor", "choose"),
    [
        ((REGRESSION, "--model.net.sizes [10,1]"), "lowest val/mae", min),
        (("--model.metrics", F1_FIRST), "highest val/f1", max),
    ],
)
def test_the_first_metric_selects_the_best_epoch(
    train, tmp_path, capsys, flags, monitor, choose
):
    train(*flags, WILD)
    out = capsys.readouterr().out
    assert f"Best epoch: the one with the {monitor}\n" in out
    folder = tmp_path / "tiny" / "version_0"
    values = [value for _, value in curves(folder)[monitor.split()[1]]]
    assert best_epoch(folder) == values.index(choose(values))
    assert saved(folder) == ("auto", None)


class Energetic(Classifier):
    """Logs a value whose name does not say whether more is better."""

    def on_validation_epoch_end(self) -> None:
        self.log("val/energy", (-1.0) ** self.current_epoch)  # 1, -1, 1, ...


def test_a_name_that_does_not_tell_needs_a_mode(train, tmp_path, capsys):
    flags = "--model test_selection.Energetic --monitor val/energy"
    assert "--monitor_mode" in refused(capsys, tmp_path, lambda: train(flags))
    train(flags, "--monitor_mode min")
    folder = tmp_path / "tiny" / "version_0"
    assert best_epoch(folder) == 1
    assert saved(folder) == ("val/energy", "min")


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


class Rises(PlainModule):
    """Its loss is the lowest in the second epoch."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", abs(self.current_epoch - 1.0))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def test_a_plain_module_has_its_last_epoch_or_that_of_monitor(train, tmp_path):
    config = tmp_path / "plain.yaml"
    config.write_text(
        "model: test_selection.Rises\ndata: plain.PlainData\n"
        "device_monitor: false\nstep_timer: false\n"
        f"trainer: {{accelerator: {ACCELERATOR}, max_epochs: 3}}"
    )
    for name, flags, epoch in (("plain", "", 2), ("loss", "--monitor val_loss", 1)):
        train(f"--name {name} {flags}", config=str(config))
        assert best_epoch(tmp_path / name / "version_0") == epoch


class Ties(Classifier):
    """Has the same val/acc in each epoch, and the lowest val/loss in the third."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = torch.tensor([0.5, 0.4, 0.2, 0.3][self.current_epoch])
        self.track("val", loss, torch.zeros(len(batch[1]), 4), batch[1] * 0)


def test_of_equal_epochs_the_one_with_the_lower_loss_is_the_best(
    train, tmp_path, capsys
):
    flags = f"--model {__name__}.Ties --trainer.num_sanity_val_steps 0"
    train(flags, "--trainer.max_epochs 2")
    train(flags, "--trainer.max_epochs 4", "--ckpt_path", "last")
    folder = tmp_path / "tiny" / "version_0"
    assert best_epoch(folder) == 2
    out = capsys.readouterr().out
    assert "Best epoch: 2 of 2, val/acc 1\n" in out
    assert "Best epoch: 3 of 4, val/acc 1\n" in out


def test_what_cannot_be_compared_is_not_chosen(train, capsys):
    matrix = "{m: torchmetrics.classification.MulticlassConfusionMatrix}"
    train("--model.metrics", matrix, "--trainer.fast_dev_run true")
    assert "Best epoch: the one with the lowest val/loss\n" in capsys.readouterr().out
