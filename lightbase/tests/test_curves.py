"""What `track` is told becomes means over samples and metrics, whole after an
interruption."""

import re
from statistics import mean

import pytest
from example.classifier import Classifier
from lightning import Callback
from stops import Terminate
from torch.distributions import Categorical
from torch.optim import Adam
from torch.optim.lr_scheduler import ExponentialLR
from written import curves

# train/loss and train/acc
LINE = re.compile(r"^\d+/\d+ +([\d.]+) +([\d.]+) ", re.MULTILINE)
METRICS = """
model:
  metrics:
    acc: {class_path: torchmetrics.classification.MulticlassAccuracy}
    auroc: {class_path: torchmetrics.classification.MulticlassAUROC}
"""


@pytest.mark.linux
def test_a_run_that_is_stopped_in_an_epoch_has_the_curves_and_lines_of_a_whole_one(
    train, tmp_path, capsys, monkeypatch
):
    (tmp_path / "metrics.yaml").write_text(METRICS)
    flags = ("--config", tmp_path / "metrics.yaml")
    flags += ("--trainer.callbacks stops.Terminate",)
    train(*flags, "--name whole")
    lines = LINE.findall(capsys.readouterr().out)
    monkeypatch.setattr(Terminate, "at_batch", 6)
    with pytest.raises(SystemExit):
        train(*flags)
    monkeypatch.setattr(Terminate, "at_batch", None)
    train(*flags, "--ckpt_path last")
    expected = curves(tmp_path / "whole" / "version_0")
    assert {"train/loss", "train/acc", "train/auroc"} <= expected.keys()
    assert curves(tmp_path / "tiny" / "version_0") == expected
    assert LINE.findall(capsys.readouterr().out) == lines


# Of the points of three epochs with 19 steps each, with a log step every 13: the last
# step of the mean, and the first one.
POINTS = {12: 0, 18: 13, 25: 19, 37: 26, 38: 38, 51: 39, 56: 52}


class EpochLosses(Callback):
    """What a callback that watches train/loss, such as EarlyStopping, sees at the end
    of an epoch."""

    seen: list[float] = []

    def on_train_epoch_end(self, trainer, pl_module):
        self.seen.append(trainer.callback_metrics["train/loss"].item())


def test_the_line_and_the_points_of_an_epoch_are_means_of_its_samples(
    train, tmp_path, capsys
):
    schedule = "--trainer.max_epochs 3 --model.scheduler ExponentialLR"
    schedule += " --model.scheduler_args.gamma 0.9 --model.scheduler_interval step"
    train(schedule, "--trainer.log_every_n_steps 1 --name single")
    single = curves(tmp_path / "single" / "version_0")
    capsys.readouterr()
    flags = "--trainer.log_every_n_steps 13 --trainer.callbacks test_curves.EpochLosses"
    train(schedule, flags)
    found = curves(tmp_path / "tiny" / "version_0")
    losses, accuracies = zip(*LINE.findall(capsys.readouterr().out), strict=True)
    for name, of_lines in (("train/loss", losses), ("train/acc", accuracies)):
        each = [value for _, value in single[name]]
        means = [mean(each[start : start + 19]) for start in (0, 19, 38)]
        assert [*map(float, of_lines)] == pytest.approx(means, rel=6e-4)
        assert dict(found[name]) == {
            step: pytest.approx(mean(each[first : step + 1]), rel=1e-5)
            for step, first in POINTS.items()
        }
        if name == "train/loss":
            assert EpochLosses.seen == pytest.approx(means, rel=1e-5)
    assert found["lr"] == [single["lr"][step] for step in POINTS]


class WithEntropy(Classifier):
    """Tracks a value of its own, and no metrics. Steps its optimizer and its schedule
    by hand, before `track`."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        logits = self(batch[0])
        loss = self.criterion(logits, batch[1])
        self.manual_backward(loss)
        self.optimizers().step()
        self.lr_schedulers().step()
        self.track("train", loss, entropy=Categorical(logits=logits).entropy().mean())

    def test_step(self, batch, batch_idx):
        self.track("test", self.criterion(self(batch[0]), batch[1]))

    def configure_optimizers(self):
        adam = Adam(self.parameters(), lr=0.01)
        return [adam], [ExponentialLR(adam, 0.5)]


def test_values_of_the_users_are_curves_and_a_step_by_hand_has_its_rate(
    train, tmp_path
):
    flags = "--trainer.max_epochs 1 --trainer.log_every_n_steps 1"
    result = train("--model test_curves.WithEntropy", flags)
    # without outputs and targets the samples of the batches are counted: the last one
    # is smaller
    assert result["test/num_samples"] == 75
    found = curves(tmp_path / "tiny" / "version_0")
    names = {name for name in found if name.startswith("train/")}
    assert names == {"train/loss", "train/entropy"}
    assert 0 < found["train/entropy"][0][1] < 1.4
    rates = [rate for _, rate in found["lr"]]
    assert rates[:3] == pytest.approx([0.01, 0.005, 0.0025])
