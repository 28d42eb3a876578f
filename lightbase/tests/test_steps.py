"""Several optimiser steps in one call: the same weights, curves and counts as one step
at a time."""

from pathlib import Path
from typing import Any

import pytest
import torch
from example.classifier import Classifier
from example.data.synthetic import SyntheticImages
from lightning import Callback, LightningDataModule, LightningModule
from paths import ACCELERATOR, Train
from test_training import checkpoint, curves, equal, weights
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightbase.core.curves import MayMissSteps
from lightbase.extras.transforms import random_crop, random_flip

SETTINGS: dict[str, tuple[object, ...]] = {
    "a step that is skipped": ("--model", "test_steps.SkipsSome"),
    "random changes": ("--data", "test_steps.Changed"),
    "all samples": ("--data.drop_last", "false", "--data.num_workers", 1),
    "warm-up": (
        *(
            "--model.scheduler",
            "WarmupCosineLR",
            "--model.scheduler_args.warmup_steps",
            9,
        ),
        *("--model.scheduler_interval", "step", "--trainer.log_every_n_steps", 1),
    ),
    "plateau": (
        "--model.scheduler",
        "ReduceLROnPlateau",
        "--model.scheduler_args.patience",
        0,
    ),
    "the same batches": (
        "--trainer.overfit_batches",
        3,
        "--trainer.log_every_n_steps",
        2,
    ),
    "own logging": ("--model", "test_steps.LogsItself"),
}


class LogsItself(Classifier):
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("own/every_step", loss)
        self.log("own/both", 2 * loss, on_step=True, on_epoch=True)
        self.log("own/index", float(batch_idx), on_step=False, on_epoch=True)
        return loss


class SkipsSome(Classifier):
    def training_step(self, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor] | None:  # type: ignore[override]
        loss = self.criterion(self.net(batch[0]), batch[1])
        return (
            None if self.global_step % 3 == 1 else {"loss": loss, "more": loss.detach()}
        )


class Changed(SyntheticImages):
    def augment(self, inputs: Tensor) -> Tensor:
        return random_flip(random_crop(inputs, 1))


class Plain(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.loss = nn.MSELoss()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(self.layer(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(self.layer(batch[0]), batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


class PlainData(LightningDataModule):
    def train_dataloader(self) -> DataLoader[Any]:
        x = torch.randn(150, 4, generator=torch.Generator().manual_seed(0))
        return DataLoader(
            TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8, shuffle=True
        )

    def val_dataloader(self) -> DataLoader[Any]:
        x = torch.randn(20, 4, generator=torch.Generator().manual_seed(1))
        return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8)


@pytest.mark.filterwarnings(
    "ignore:`training_step` returned `None`"
)  # SkipsSome means it
@pytest.mark.parametrize(
    "name",
    [
        *[*SETTINGS][:2],
        *(pytest.param(name, marks=pytest.mark.slow) for name in [*SETTINGS][2:]),
    ],
)
def test_several_steps_at_once_change_nothing(train, trained, tmp_path, name, capsys):
    flags = ("--trainer.max_epochs", 3, *SETTINGS[name])
    folder, one = trained(*flags)
    several = train(*flags, "--name", "several", "--steps_per_execution", 4)
    folders = folder, tmp_path / "several" / "version_0"
    assert equal(*map(weights, folders))
    assert equal(*(weights(folder, "best") for folder in folders))
    assert curves(folders[0]) == curves(folders[1])
    assert {**one, "train_seconds": 0} == {**several, "train_seconds": 0}
    assert checkpoint(folders[1])["global_step"] == one["steps"]
    assert "One step at a time" not in capsys.readouterr().out


def test_a_plain_module_with_a_plain_loader_trains_the_same(
    train: Train, tmp_path: Path
) -> None:
    config = tmp_path / "plain.yaml"
    config.write_text(
        "model: test_steps.Plain\ndata: test_steps.PlainData\n"
        f"trainer: {{accelerator: {ACCELERATOR}, max_epochs: 3}}"
    )
    flags = "--trainer.log_every_n_steps 5 --monitor val_loss --step_timer false"
    for name, num_steps in (("one", 1), ("several", 4)):
        steps = (
            "--steps_per_execution",
            num_steps,
            "--device_monitor",
            "false",
            "--name",
            name,
        )
        train(*flags.split(), *steps, config=str(config))
    folders = tmp_path / "one" / "version_0", tmp_path / "several" / "version_0"
    assert equal(*map(weights, folders))
    assert curves(folders[0]) == curves(folders[1])


class Stops(Classifier):
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.trainer.should_stop = batch_idx == 9
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("flag", "value", "num_steps"),
    [
        ("model", "test_steps.Stops", 10),
        ("trainer.max_steps", 1, 1),
        ("trainer.max_steps", 31, 31),
    ],
)
def test_training_ends_in_the_middle_of_a_call(train, tmp_path, flag, value, num_steps):
    for name, steps in (("one", 1), ("several", 8)):
        flags = (f"--{flag}", value, "--steps_per_execution", steps, "--name", name)
        assert train(*flags)["steps"] == num_steps
    assert equal(
        *(weights(tmp_path / name / "version_0") for name in ("one", "several"))
    )


def test_a_run_stopped_between_two_calls_goes_on_to_the_same_weights(
    train, tmp_path, monkeypatch
):
    text = "--trainer.callbacks test_training.Terminate --steps_per_execution 4"
    flags = (*text.split(), "--trainer.max_epochs", 3)
    train(*flags, "--name", "whole")
    monkeypatch.setattr("test_training.Terminate.at_batch", 11)
    with pytest.raises(SystemExit):
        train(*flags, "--name", "cut")
    folders = tmp_path / "whole" / "version_0", tmp_path / "cut" / "version_0"
    assert checkpoint(folders[1])["global_step"] == 19 + 3 * 4
    monkeypatch.setattr("test_training.Terminate.at_batch", None)
    train(*flags, "--name", "cut", "--ckpt_path", "last")
    assert equal(*map(weights, folders))
    assert curves(folders[0]) == curves(folders[1])


class Seen:
    """Counts how often a hook is called."""

    calls = 0

    @classmethod
    def count(cls, *_: Any) -> None:
        cls.calls += 1


class HookedModel(Classifier):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        Seen.count()


class Hooked(Callback):
    def on_train_batch_end(self, *_: Any) -> None:
        Seen.count()


class ByHand(Classifier):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.automatic_optimization = False

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        loss = super().training_step(batch, batch_idx)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        Seen.count()


class OwnSGD(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        Seen.count()
        return super().step(closure)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--trainer.accumulate_grad_batches", 2), "trainer.accumulate_grad_batches 2"),
        (("--trainer.gradient_clip_val", 0.5), "trainer.gradient_clip_val 0.5"),
        (
            ("--model.optimizer", "LBFGS", "--trainer.limit_train_batches", 3),
            "the optimiser LBFGS",
        ),
        (("--model.optimizer", "test_steps.OwnSGD"), "the optimiser OwnSGD"),
        (
            ("--model", "test_steps.HookedModel"),
            "on_before_optimizer_step of HookedModel",
        ),
        (("--model", "test_steps.ByHand"), "the manual optimisation of ByHand"),
        (("--trainer.callbacks", "test_steps.Hooked"), "on_train_batch_end of Hooked"),
    ],
)
@pytest.mark.slow
def test_what_needs_single_steps_gets_them_and_says_so(
    train, tmp_path, flags, named, capsys, monkeypatch
):
    import test_steps  # as the command line imports it

    monkeypatch.setattr(test_steps.Seen, "calls", 0)
    flags = (*flags, "--trainer.log_every_n_steps", 1)
    several = train(*flags, "--steps_per_execution", 4, "--name", "several")
    line = f"One step at a time: --steps_per_execution 4 does not go with {named}"
    assert line in capsys.readouterr().out
    if "test_steps." in str(flags):
        assert test_steps.Seen.calls >= several["steps"] == 38
    one = train(*flags, "--name", "one")
    assert {**one, "train_seconds": 0} == {**several, "train_seconds": 0}


class Relaxed(MayMissSteps):
    def on_train_batch_end(self, *_: Any) -> None:
        Seen.count()


def test_a_callback_may_say_that_it_need_not_see_every_step(train, monkeypatch, capsys):
    import test_steps

    monkeypatch.setattr(test_steps.Seen, "calls", 0)
    train("--trainer.callbacks", "test_steps.Relaxed", "--steps_per_execution", 4)
    assert test_steps.Seen.calls == 2 * 5  # 19 steps an epoch
    assert "One step at a time" not in capsys.readouterr().out
