"""Several optimiser steps in one call: the same weights, curves and counts as one step at a time."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import Callback, LightningModule, Trainer
from test_training import checkpoint, curves, equal, weights
from torch import Tensor

from project.classifier import Classifier
from project.engine import cuda_graph, steps
from project.engine.cuda_graph import GraphedStep

Train = Callable[..., dict[str, Any]]

SETTINGS: dict[str, tuple[object, ...]] = {
    "plain": (),
    "all samples": ("--data.drop_last", "false"),
    "workers": ("--data.num_workers", 1),
    "bf16": ("--trainer.precision", "bf16-mixed"),
    "cosine": ("--model.scheduler", "CosineAnnealingLR"),
    "warm-up": (
        *("--model.scheduler", "WarmupCosineLR", "--model.scheduler_args.warmup_steps", 9),
        *("--model.scheduler_interval", "step"),
    ),
    "plateau": ("--model.scheduler", "ReduceLROnPlateau", "--model.scheduler_args.patience", 0),
    "every step logged": ("--trainer.log_every_n_steps", 1),
}


@pytest.mark.parametrize("num_steps", [4, 50])
@pytest.mark.parametrize("name", list(SETTINGS))
def test_several_steps_at_once_change_nothing(train: Train, tmp_path: Path, num_steps: int, name: str) -> None:
    flags = ("--trainer.max_epochs", 3, *SETTINGS[name])
    one = train(*flags, "--name", "one")
    several = train(*flags, "--name", "several", "--steps_per_execution", num_steps)
    folders = tmp_path / "one" / "version_0", tmp_path / "several" / "version_0"
    assert equal(*map(weights, folders))
    assert equal(*(weights(folder, "best") for folder in folders))
    assert curves(folders[0]) == curves(folders[1])
    assert {**one, "train_seconds": 0} == {**several, "train_seconds": 0}
    assert checkpoint(folders[1])["global_step"] == one["steps"]


@pytest.mark.parametrize("max_steps", [1, 12, 31, 38])
def test_training_ends_at_max_steps(train: Train, tmp_path: Path, max_steps: int) -> None:
    for name, num_steps in (("one", 1), ("several", 8)):
        flags = ("--trainer.max_steps", max_steps, "--steps_per_execution", num_steps)
        assert train(*flags, "--name", name)["steps"] == max_steps
    assert equal(weights(tmp_path / "one" / "version_0"), weights(tmp_path / "several" / "version_0"))


def test_random_numbers_are_drawn_as_in_single_steps(train: Train, tmp_path: Path, cifar10_dir: Path) -> None:
    flags = ("--data", "project.data.cifar10.CIFAR10", "--data.data_dir", cifar10_dir, "--data.batch_size", 16)
    flags += ("--data.random_crop", 2, "--data.random_flip", "true")
    flags += ("--model.net", "project.models.cnn.CIFAR10CNN")
    train(*flags, "--name", "one")
    train(*flags, "--name", "several", "--steps_per_execution", 5)
    assert equal(weights(tmp_path / "one" / "version_0"), weights(tmp_path / "several" / "version_0"))


def test_a_run_stopped_between_two_calls_goes_on_to_the_same_weights(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    flags = ("--trainer.max_epochs", 3, "--trainer.callbacks", "test_training.Terminate", "--steps_per_execution", 4)
    train(*flags, "--name", "whole")
    monkeypatch.setattr("test_training.Terminate.at_batch", 2)
    with pytest.raises(SystemExit):
        train(*flags, "--name", "cut")
    folders = tmp_path / "whole" / "version_0", tmp_path / "cut" / "version_0"
    assert checkpoint(folders[1])["global_step"] == 19 + 3 * 4
    monkeypatch.setattr("test_training.Terminate.at_batch", None)
    train(*flags, "--name", "cut", "--ckpt_path", "last")
    assert equal(*map(weights, folders))
    assert curves(folders[0]) == curves(folders[1])


def test_a_finished_run_goes_on(train: Train, tmp_path: Path) -> None:
    flags = ("--steps_per_execution", 6, "--model.scheduler", "CosineAnnealingLR")
    train(*flags, "--trainer.max_epochs", 2)
    train(*flags, "--trainer.max_epochs", 4, "--ckpt_path", "last")
    train(*flags, "--trainer.max_epochs", 4, "--name", "whole")
    found, expected = (checkpoint(tmp_path / name / "version_0") for name in ("tiny", "whole"))
    assert found["global_step"] == expected["global_step"] == 76
    assert found["lr_schedulers"][0]["last_epoch"] == 4


def test_going_on_with_another_number_is_refused(train: Train, capsys: pytest.CaptureFixture[str]) -> None:
    train("--steps_per_execution", 6)
    for other in ((), ("--steps_per_execution", 6, "--trainer.gradient_clip_val", 1)):
        with pytest.raises(SystemExit) as caught:
            train("--ckpt_path", "last", "--trainer.max_epochs", 4, *other)
        assert caught.value.code == 1
        assert "go on with --steps_per_execution 6" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--trainer.accumulate_grad_batches", 2), "trainer.accumulate_grad_batches 2"),
        (("--trainer.gradient_clip_val", 0.5), "trainer.gradient_clip_val 0.5"),
        (("--trainer.limit_train_batches", 3), "trainer.limit_train_batches 3"),
        (("--trainer.val_check_interval", 0.5), "trainer.val_check_interval 0.5"),
        (("--trainer.overfit_batches", 1), "trainer.overfit_batches 1"),
        (("--trainer.fast_dev_run", "true"), "trainer.fast_dev_run True"),
        (("--model.optimizer", "LBFGS"), "model.optimizer LBFGS"),
        (("--model", "test_steps.OwnStep"), "the training_step of OwnStep"),
    ],
)
def test_what_needs_single_steps_gets_them_and_says_so(
    train: Train,
    tmp_path: Path,
    flags: tuple[object, ...],
    named: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    flags = (*flags, "--trainer.log_every_n_steps", 1)
    several = train(*flags, "--steps_per_execution", 4, "--name", "several")
    assert f"One step at a time: --steps_per_execution 4 does not go with {named}" in capsys.readouterr().out
    one = train(*flags, "--name", "one")
    assert {**one, "train_seconds": 0} == {**several, "train_seconds": 0}


class OwnStep(Classifier):
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return 2 * self.loss(*batch)


class Ask(Callback):
    answer: Any = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        Ask.answer = trainer.estimated_stepping_batches


@pytest.mark.parametrize("limits", [(), ("--trainer.max_steps", 23), ("--trainer.max_epochs", -1)])
def test_the_estimated_number_of_steps_is_that_of_single_steps(
    train: Train, monkeypatch: pytest.MonkeyPatch, limits: tuple[object, ...]
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    limits = (*limits, "--trainer.max_steps", 30) if -1 in limits else limits
    answers = []
    for num_steps in (1, 4):
        train("--trainer.callbacks", "test_steps.Ask", "--steps_per_execution", num_steps, *limits)
        import test_steps

        answers.append(test_steps.Ask.answer)
    assert answers[0] == answers[1] == {(): 38, 2: 23, 4: 30}[len(limits) or ()]


class StandIn:
    """For a GPU in tests of GraphedStep: a capture runs nothing, a replay runs what was captured."""

    replays = 0

    @classmethod
    def capture(cls, function: Callable[[], None]) -> Callable[[], None]:
        def replay() -> None:
            cls.replays += 1
            function()

        return replay


@pytest.fixture
def graphs_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    StandIn.replays = 0
    monkeypatch.setattr(cuda_graph, "capture", StandIn.capture)
    monkeypatch.setattr(cuda_graph, "on_side_stream", lambda function: function())
    make = steps.step_maker
    monkeypatch.setattr("project.classifier.step_maker", lambda module, _: make(module, True))


@pytest.mark.usefixtures("graphs_on_the_cpu")
def test_a_graph_takes_batches_of_one_shape_after_the_warm_up() -> None:
    seen: list[list[float]] = []
    step = GraphedStep(lambda x, y: seen.append([*x.tolist(), *y.tolist()]))
    batches = [
        (torch.full((size,), float(i)), torch.full((size,), -float(i))) for i, size in enumerate([2] * 6 + [1, 2])
    ]
    for x, y in batches:
        step(x, y)
    assert seen == [[*x.tolist(), *y.tolist()] for x, y in batches]
    assert StandIn.replays == 8 - cuda_graph.WARM_UP - 1


@pytest.mark.usefixtures("graphs_on_the_cpu")
@pytest.mark.parametrize(
    "flags",
    [
        (),
        ("--model.optimizer", "SGD", "--model.optimizer_args.momentum", 0.9),
        ("--data.drop_last", "false"),
        ("--model.scheduler", "WarmupCosineLR", "--model.scheduler_interval", "step"),
        ("--model.scheduler", "CosineAnnealingLR"),
    ],
)
def test_graphed_steps_change_nothing(
    train: Train, tmp_path: Path, flags: tuple[object, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    train(*flags, "--steps_per_execution", 5, "--trainer.max_epochs", 3, "--name", "graph")
    assert StandIn.replays > 30
    train(*flags, "--trainer.max_epochs", 3, "--name", "plain")
    folders = tmp_path / "plain" / "version_0", tmp_path / "graph" / "version_0"
    for name, value in weights(folders[0]).items():
        torch.testing.assert_close(weights(folders[1])[name], value, rtol=1e-5, atol=1e-6)
    found, expected = curves(folders[1]), curves(folders[0])
    for tag in ("train/loss", "lr", "val/loss"):
        assert found[tag] == [(step, pytest.approx(value, rel=1e-4)) for step, value in expected[tag]]


def test_a_graph_needs_several_steps(train: Train, capsys: pytest.CaptureFixture[str]) -> None:
    for flags in ((), ("--steps_per_execution", 4, "--trainer.gradient_clip_val", 1)):
        with pytest.raises(SystemExit) as caught:
            train("--cuda_graph", "true", *flags)
        assert caught.value.code == 2
        assert "--cuda_graph true needs --steps_per_execution over 1" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("flags", [(), ("--model.optimizer", "SGD", "--model.scheduler", "CosineAnnealingLR")])
def test_a_cuda_graph_changes_nothing(train: Train, tmp_path: Path, flags: tuple[object, ...], precision: str) -> None:
    flags = (*flags, "--trainer.accelerator", "gpu", "--trainer.precision", precision, "--trainer.max_epochs", 3)
    flags += ("--steps_per_execution", 5)
    for name, graph in (("plain", "false"), ("graph", "true")):
        train(*flags, "--cuda_graph", graph, "--name", name)
    plain, graphed = (weights(tmp_path / name / "version_0") for name in ("plain", "graph"))
    for name, value in plain.items():
        torch.testing.assert_close(graphed[name], value, rtol=1e-3, atol=1e-4)
    train(*flags, "--cuda_graph", "true", "--name", "graph", "--ckpt_path", "last", "--trainer.max_epochs", 4)
