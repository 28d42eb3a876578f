"""What a user's subclass of the Classifier or BaseModule assigns and overrides takes
effect, and breaks nothing."""

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from example.classifier import Classifier
from example.data.synthetic import SyntheticImages
from example.models.mlp import MLP
from lightning import Callback, Trainer
from paths import ACCELERATOR, fails, script
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
    def __init__(self, **kwargs: Any) -> None:
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
    def __init__(self, kind: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.lr = 0.05
        self.metrics = {}
        self.scheduler = "StepLR"
        self.scheduler_args = {"step_size": 1}
        if kind == "name":
            self.optimizer = "SGD"
        else:
            self.optimizer = SGD(self.parameters(), lr=0.05)
            self.scheduler = StepLR(self.optimizer, step_size=1)


STEPS = "--model.optimizer SGD --model.lr 0.05 --model.scheduler StepLR"
STEPS += " --model.scheduler_args.step_size 1"


@pytest.mark.parametrize("kind", ["name", "object"])
def test_the_optimizer_and_the_scheduler_that_are_assigned_train_and_resume(
    train, trained, tmp_path, kind
):
    flags = f"--model {HERE}.OwnOptimizer --model.kind {kind}"
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

    def __init__(self, **kwargs: Any) -> None:
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

    def configure_callbacks(self) -> list[Any]:
        return []


def count(*_: Any, **__: Any) -> None:
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


# without the engine


def make_classifier(**options: Any) -> Classifier:
    return Classifier(MLP([12, 4]), num_classes=4, **options)


@pytest.mark.filterwarnings(
    r"ignore:`isinstance\(treespec, LeafSpec\)`:FutureWarning"
)  # a call inside Lightning 2.6
def test_a_plain_trainer_has_the_curves_too(tmp_path: Path) -> None:
    data = SyntheticImages((3, 2, 2), 4, num_train=100, num_test=20, batch_size=10)
    model = make_classifier()
    trainer = Trainer(
        accelerator=ACCELERATOR,
        devices=1,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=5,
        default_root_dir=tmp_path,
    )
    trainer.fit(model, data)
    names = {"train/loss", "train/acc", "val/loss", "val/acc"}
    assert names <= trainer.callback_metrics.keys()
    assert trainer.test(model, data, verbose=False)[0]["test/num_samples"] == 20


@pytest.mark.slow
def test_an_evaluation_leaves_the_compiled_training_as_it_is() -> None:
    sizes: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        sizes.extend(value for value in inputs if isinstance(value, torch.SymInt))
        return graph.forward

    torch.compiler.reset()
    importlib.import_module("torch._dynamo").register_backend(backend, name="sizes")
    model = make_classifier(compile_net="sizes")
    model.trainer = Trainer(accelerator="cpu", logger=False)
    model.prepare_net(trains=True)
    for num_samples in (4, 8, 4, 3):
        model.net(torch.rand(num_samples, 3, 2, 2))
    assert sizes == []
