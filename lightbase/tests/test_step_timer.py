"""Where a step's time goes: each phase is found, the phases add up to the time of the
steps, validations are left out. What the advice at the end makes of it."""

import os
import re
import time
from typing import Any

import pytest
import torch
from example.data.synthetic import SyntheticImages
from example.models.mlp import MLP
from lightning import Callback
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor

from lightbase.data.loader import TensorBatches
from lightbase.watch.step_timer import PHASES, StepTimer

HERE = "test_step_timer"
FLAGS = f"--step_timer table --trainer.callbacks {HERE}.Keep --num_threads 1"


def delay(monkeypatch: Any, owner: Any, method: str, seconds: float) -> None:
    """Let each call of a method take so much longer."""
    original = getattr(owner, method)

    def slow(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        time.sleep(seconds)
        return result

    monkeypatch.setattr(owner, method, slow)


class Keep(Callback):
    """The timer, and the wall time of the epochs without their validations."""

    timer: StepTimer
    steps = 0.0

    def on_train_start(self, trainer: Any, _: Any) -> None:
        (Keep.timer,) = (x for x in trainer.callbacks if isinstance(x, StepTimer))
        Keep.steps = 0.0

    def on_train_epoch_start(self, *_: Any) -> None:
        Keep.steps -= time.perf_counter()

    def on_train_epoch_end(self, *_: Any) -> None:
        Keep.steps += time.perf_counter()

    on_validation_start = on_train_epoch_end
    on_validation_end = on_train_epoch_start


SLOW: dict[str, tuple[Any, str]] = {
    "data_loading": (TensorBatches, "__getitems__"),  # reads an epoch at once
    "transfer_transforms": (SyntheticImages, "normalize"),
    "forward": (MLP, "forward"),
    "backward": (Tensor, "backward"),
    "optimizer": (torch.optim.Adam, "step"),
    "other": (Keep, "on_train_batch_start"),
    "logging": (TensorBoardLogger, "log_metrics"),
}


def test_each_phase_is_found_and_what_lies_between_steps_is_left_out(
    train, monkeypatch, capsys
):
    delays_s = {phase: 0.005 * (i + 1) for i, phase in enumerate(SLOW)}
    delays_s["logging"] = 0.07  # enough for advice
    for phase, (owner, method) in SLOW.items():
        seconds = delays_s[phase]
        if phase == "data_loading":
            seconds *= 19
        delay(monkeypatch, owner, method, seconds)
    delay(monkeypatch, Keep, "on_train_epoch_end", 0.5)  # as a large checkpoint
    flags = "--trainer.log_every_n_steps 1 --trainer.max_epochs 1"
    train(FLAGS, flags, "--trainer.val_check_interval 10")
    timer = Keep.timer
    assert 19e-3 * timer.step_ms == pytest.approx(Keep.steps, rel=0.1)
    shown = capsys.readouterr().out
    table = dict(re.findall(r"^(\w+) .* ([\d.]+) ms$", shown, re.M))
    assert [*table] == [*PHASES]
    assert sorted(PHASES, key=lambda phase: float(table[phase])) == [*SLOW]
    assert all(float(table[phase]) >= 990 * delays_s[phase] for phase in SLOW)
    assert sum(timer.shares.values()) == pytest.approx(1)
    assert "\nAdvice: Logging and callbacks took" in shown
    assert 0.5 < timer.of_training < 1


@pytest.mark.gpu
@pytest.mark.skipif(
    "SIMGPU_FOLDER" in os.environ, reason="a simulated GPU has no speed"
)
def test_a_slow_network_is_found_on_a_gpu(train, monkeypatch):
    forward = MLP.forward

    def slow(net: MLP, x: Tensor) -> Tensor:
        torch.cuda._sleep(10_000_000)  # some ms, long after it was launched
        return forward(net, x)

    monkeypatch.setattr(MLP, "forward", slow)
    train(FLAGS, "--trainer.accelerator gpu")
    assert Keep.timer.shares["forward"] > 0.6
