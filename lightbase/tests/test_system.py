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
from lightning import Callback, Trainer, seed_everything
from paths import ACCELERATOR, fails, script
from stops import Terminate
from torch import nn
from torchmetrics.classification import MulticlassF1Score
from written import checkpoint_file, curves, equal, weights

from lightbase.core.batches import EpochBatchSampler

HERE = "test_system"
ONE_EPOCH = "--trainer.max_epochs 1 --trainer.log_every_n_steps 1"


# what a subclass assigns


class Smoothed(Classifier):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.criterion = nn.CrossEntropyLoss(label_smoothing=0.5)
        self.metrics = MulticlassF1Score(4)


def test_the_criterion_and_the_metric_that_are_assigned_count(train, tmp_path):
    """Against a plain loop over the same batches."""
    result = train(f"--model {HERE}.Smoothed", ONE_EPOCH)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.5)
    seed_everything(42, workers=True)
    data = SyntheticImages((3, 8, 8), 4, num_train=350, num_test=75, noise=0.05)
    data.setup("fit")
    data.setup("test")
    net = MLP([192, 16, 4])
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    losses = []
    for indices in EpochBatchSampler(315, 16, shuffle=True, drop_last=True, seed=42):
        x, y = data.splits["train"].__getitems__(indices)
        loss = criterion(net(data.normalize(x)), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    folder = tmp_path / "tiny" / "version_0"
    found = [value for _, value in curves(folder)["train/loss"]]
    assert found == pytest.approx(losses, rel=1e-4)
    x, y = data.splits["test"].inputs, data.splits["test"].targets
    logits = net(data.normalize(x)).detach()
    loss = criterion(logits, y).item()
    assert result["test/loss"] == pytest.approx(loss, rel=1e-4)
    f1 = MulticlassF1Score(4)(logits, y).item()
    assert result["test/MulticlassF1Score"] == pytest.approx(f1)
    best = str(checkpoint_file(folder))
    again = script("evaluate").main(["--ckpt_path", best])
    assert again.keys() == {"test/loss", "test/num_samples", "test/MulticlassF1Score"}
    assert again.items() <= result.items()


class OwnOptimizer(Classifier):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.lr = 0.05
        self.metrics = {}
        self.optimizer = "SGD"
        self.scheduler = "StepLR"
        self.scheduler_args = {"step_size": 1}


STEPS = "--model.optimizer SGD --model.lr 0.05 --model.scheduler StepLR"
STEPS += " --model.scheduler_args.step_size 1"


def test_the_optimizer_and_the_scheduler_that_are_assigned_train_and_resume(
    train, trained, tmp_path
):
    flags = f"--model {HERE}.OwnOptimizer --trainer.log_every_n_steps 19"
    train(flags, "--trainer.max_epochs 1")
    result = train(flags, "--ckpt_path last --trainer.max_epochs 2")
    folder = tmp_path / "tiny" / "version_0"
    assert equal(weights(folder), weights(trained(STEPS)[0]))
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
