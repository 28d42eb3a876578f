"""What a user's subclass of the Classifier or BaseModule assigns and overrides takes
effect, and breaks nothing."""

from typing import Any

import pytest
import torch
from example.classifier import Classifier
from lightning import Callback
from paths import fails, script
from stops import Terminate
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR
from torchmetrics.classification import MulticlassF1Score
from written import checkpoint_file, curves, equal, weights

HERE = "test_system"
ONE_EPOCH = "--trainer.max_epochs 1 --trainer.log_every_n_steps 1"


# what a subclass assigns


class Smoothed(Classifier):
    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        self.criterion = nn.CrossEntropyLoss(label_smoothing=0.5)
        self.metrics = MulticlassF1Score(4)


def test_the_criterion_and_the_metric_that_are_assigned_count(train, tmp_path):
    """As if they were flags."""
    result = train(f"--model {HERE}.Smoothed", ONE_EPOCH)
    flags = "--model.criterion torch.nn.CrossEntropyLoss --name flags"
    flags += " --model.criterion.label_smoothing 0.5 --model.metrics.MulticlassF1Score"
    by_flags = train(flags, "torchmetrics.classification.MulticlassF1Score", ONE_EPOCH)
    assert result | {"train_seconds": 0} == by_flags | {"train_seconds": 0}
    folders = [tmp_path / name / "version_0" for name in ("tiny", "flags")]
    assert equal(*map(weights, folders))
    again = script("evaluate").main(["--ckpt_path", str(checkpoint_file(folders[0]))])
    assert again.keys() == {"test/loss", "test/num_samples", "test/MulticlassF1Score"}
    assert again.items() <= result.items()


class OwnOptimizer(Classifier):
    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        self.metrics = {}
        self.optimizer = SGD(self.parameters(), lr=0.05)
        self.scheduler = StepLR(self.optimizer, step_size=1)


STEPS = "--model.optimizer SGD --model.lr 0.05 --model.scheduler StepLR"
STEPS += " --model.scheduler_args.step_size 1"


def test_the_optimizer_and_the_scheduler_that_are_assigned_train_and_resume(
    train, trained, tmp_path
):
    flags = f"--model {HERE}.OwnOptimizer"
    flags += " --trainer.log_every_n_steps 19"
    train(flags, "--trainer.max_epochs 1")
    result = train(flags, "--ckpt_path last --trainer.max_epochs 2")
    folder = tmp_path / "tiny" / "version_0"
    # a fused step rounds otherwise
    torch.testing.assert_close(weights(folder), weights(trained(STEPS)[0]))
    rates = [rate for _, rate in curves(folder)["lr"]]
    assert rates == pytest.approx([0.05, 0.005])
    tests = {name for name in result if name.startswith("test/")}
    assert tests == {"test/loss", "test/num_samples"}


class OwnGroups(Classifier):
    which = "layers.1"

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        self.parameter_groups = {self.which: {"lr": 0.1}}


def test_groups_that_the_code_has_changed_are_refused_in_a_resume(
    train, capsys, monkeypatch
):
    train(f"--model {HERE}.OwnGroups", ONE_EPOCH)
    monkeypatch.setattr(OwnGroups, "which", "layers.3")
    run = lambda: train("--ckpt_path last --trainer.max_epochs 2")  # noqa: E731
    error = fails(capsys, 2, run)
    assert "OwnGroups has the parameter_groups {'layers.3': {'lr': 0.1}}" in error


# what a subclass overrides


class NoSuper(Classifier):
    """Every hook that the curves, the schedule and the resume could have lived in,
    without super()."""

    num_calls = 0

    def configure_callbacks(self):
        return []


def count(*_, **__):
    NoSuper.num_calls += 1


HOOKS = {"setup", "teardown", *(name for name in vars(Callback) if name[:3] == "on_")}
for name in HOOKS:
    setattr(NoSuper, name, count)


def test_hooks_may_be_overridden_without_super(train, tmp_path, monkeypatch):
    flags = "--model.scheduler ReduceLROnPlateau --model.scheduler_args.patience 0"
    flags += " --model.scheduler_args.threshold 1000 --trainer.max_epochs 3"
    flags += (
        " --model.scheduler_args.threshold_mode abs --model.scheduler_args.mode max"
    )
    plain = train(flags, "--name plain")
    flags += f" --model {HERE}.NoSuper --trainer.callbacks stops.Terminate"
    monkeypatch.setattr(Terminate, "at_batch", 7)
    with pytest.raises(SystemExit):
        train(flags)
    monkeypatch.setattr(Terminate, "at_batch", None)
    monkeypatch.setattr(NoSuper, "num_calls", 0)
    resumed = train(flags, "--ckpt_path last")
    assert NoSuper.num_calls > 100
    assert resumed | {"train_seconds": 0} == plain | {"train_seconds": 0}
    folders = [tmp_path / name / "version_0" for name in ("tiny", "plain")]
    assert equal(*map(weights, folders))
    points, expected = map(curves, folders)
    assert points == expected
    # after a validation that is not good enough
    assert points["lr"][-1][1] == pytest.approx(1e-3)
