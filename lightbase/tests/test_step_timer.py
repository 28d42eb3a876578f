"""Where a step's time goes: each phase is found, the phases add up to the time of the
steps, validations are left out. What the advice at the end makes of it."""

import os
import re
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from example.classifier import Classifier
from example.data.synthetic import SyntheticImages
from example.models.mlp import MLP
from lightning import Callback
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor

from lightbase.data.loader import TensorBatches
from lightbase.watch.step_timer import PHASES, PhaseClock, StepTimer, advice

HERE = "test_step_timer"
FLAGS = f"--step_timer table --trainer.callbacks {HERE}.Keep --num_threads 1"


class Clock:
    """Stands in for time.perf_counter: only calls that were delayed take any time."""

    now = 0.0

    def __call__(self) -> float:
        return self.now

    def delay(self, monkeypatch: Any, owner: Any, method: str, seconds: float) -> None:
        """Let each call of a method take so long."""
        original = getattr(owner, method)

        def delayed(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            self.now += seconds
            return result

        monkeypatch.setattr(owner, method, delayed)


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
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock)
    delays_s = {phase: 0.005 * (i + 1) for i, phase in enumerate(SLOW)}
    delays_s["logging"] = 0.07  # enough for advice
    for phase, (owner, method) in SLOW.items():
        seconds = delays_s[phase]
        if phase == "data_loading":
            seconds *= 19
        clock.delay(monkeypatch, owner, method, seconds)
    clock.delay(monkeypatch, Keep, "on_train_epoch_end", 0.5)  # as a large checkpoint
    flags = "--trainer.log_every_n_steps 1 --trainer.max_epochs 1"
    train(FLAGS, flags, "--trainer.val_check_interval 10")
    timer = Keep.timer
    assert 19e-3 * timer.step_ms == pytest.approx(Keep.steps)
    shown = capsys.readouterr().out
    table = dict(re.findall(r"^(\w+) .* ([\d.]+) ms$", shown, re.M))
    assert [*table] == [*PHASES]
    assert {phase: float(table[phase]) for phase in SLOW} == pytest.approx(
        {phase: 1e3 * seconds for phase, seconds in delays_s.items()}, abs=1e-3
    )
    assert sum(timer.shares.values()) == pytest.approx(1)
    assert "\nAdvice: Logging and callbacks took" in shown
    assert 0.5 < timer.of_training < 1


def test_it_rests_beside_another_profiler(train, capsys):
    profiler = "lightning.pytorch.profilers.SimpleProfiler"
    train(f"--step_timer true --trainer.profiler {profiler}")
    shown = capsys.readouterr().out
    assert "Step timer: off beside the SimpleProfiler" in shown
    assert "Where the time of training went" not in shown


class ByHand(Classifier):
    """Lightning's profiler hears nothing of the backward of manual optimization."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        self.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        self.optimizers().step()


def test_the_backward_of_manual_optimization_is_timed(train):
    train(FLAGS, f"--model {HERE}.ByHand --trainer.max_epochs 1")
    assert Keep.timer.shares["backward"] > 0


class StandInEvent:
    """A CUDA event of a GPU that works off what it was given, later than the CPU gives
    it."""

    now = 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = StandInEvent.now

    def elapsed_time(self, end: "StandInEvent") -> float:
        return 1e3 * (end.at - self.at)


def pass_steps(clock: PhaseClock, forwards: list[int]) -> None:
    """Steps that load for 1 s, copy for 2 s, and run the network for so many
    seconds."""
    clock.start("run_training_epoch")
    for forward in forwards:
        seconds = {"train_dataloader_next": 1, "batch_to_device": 2}
        seconds["training_step"] = forward
        for action, time_s in seconds.items():
            clock.start(action)
            StandInEvent.now += time_s
            clock.stop(action)


def test_on_a_gpu_calls_are_timed_by_events(monkeypatch):
    waits: list[int] = []
    monkeypatch.setattr(torch.cuda, "Event", StandInEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append(1))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", bool)
    clock = PhaseClock(torch.device("cuda"))
    # timed are the first 20, with the start of the loader, and 20 of the 180 others
    pass_steps(clock, [60] + [6] * 18 + [2] * 180)
    assert not waits  # within the epoch
    clock.start("[Callback]StepTimer.on_train_epoch_end")
    assert len(waits) == 1
    seconds = {phase: round(total, 3) for phase, total in clock.seconds.items()}
    expected = {"data_loading": 199, "transfer_transforms": 398}
    expected["forward"] = 60 + 6 * 18 + 2 * 180
    assert seconds == dict.fromkeys(PHASES, 0) | expected


def advised(busy_shares: Any = (), **shares: float) -> str:
    """The advice after a training whose phases had these shares."""
    timer = StepTimer()
    timer.shares = dict.fromkeys(PHASES, 0.0) | shares
    return advice(SimpleNamespace(callbacks=[timer]), busy_shares)


def test_advice_is_for_a_fifth_of_the_training() -> None:
    assert advised(logging=0.25)
    timer = StepTimer()
    timer.shares = dict.fromkeys(PHASES, 0.0) | {"logging": 0.25, "forward": 0.75}
    timer.of_training = 0.7  # the rest are validations
    assert advice(SimpleNamespace(callbacks=[timer]), []) == ""
    assert advised(logging=0.19) == advised(data_loading=0.19) == ""
    assert advised(optimizer=0.2, other=0.19) == ""


def test_on_an_idle_gpu_the_advice_is_about_the_gpu() -> None:
    # as mnist_mlp.yaml on an H200: it waits for Python, not for the curves
    text = advised([0.07], logging=0.25, optimizer=0.3, other=0.2)
    assert text.startswith("The GPU was idle 93% of the time: the network is small; ")
    assert "try --cuda_graphs true" in text
    assert advised([0.7], logging=0.25).startswith("Logging")
    # it may also wait for data
    assert advised([0.07], data_loading=0.5).startswith("Steps waited for data")


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
