"""Where a step's time goes: each phase is found, the phases add up to the time of the
steps, validations are left out."""

import os
import re
import time
from typing import Any

import pytest
import torch
from example.data.synthetic import SyntheticImages
from example.models.mlp import MLP
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from matplotlib.figure import Figure
from paths import Train
from torch import Tensor, nn

from lightbase.core.batches import TensorBatches
from lightbase.extras import step_timer
from lightbase.extras.step_timer import PHASES, PhaseClock, StepTimer

SLEEP_S = 0.01


def delay(
    monkeypatch: pytest.MonkeyPatch, owner: Any, method: str, seconds: float
) -> None:
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

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        Keep.timer = next(cb for cb in trainer.callbacks if isinstance(cb, StepTimer))
        Keep.steps = 0.0

    def on_train_epoch_start(
        self, trainer: Trainer, pl_module: LightningModule
    ) -> None:
        Keep.steps -= time.perf_counter()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        Keep.steps += time.perf_counter()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        Keep.steps += time.perf_counter()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        Keep.steps -= time.perf_counter()


HERE = "test_step_timer"
FLAGS = (
    "--step_timer",
    "true",
    "--trainer.callbacks",
    f"{HERE}.Keep",
    "--num_threads",
    1,
)
SLOW: dict[str, tuple[Any, str, float]] = {
    "data_loading": (
        TensorBatches,
        "__getitems__",
        30 * SLEEP_S,
    ),  # reads many batches at once
    "transfer_transforms": (SyntheticImages, "normalize", SLEEP_S),
    "forward": (MLP, "forward", SLEEP_S),
    "backward": (Tensor, "backward", SLEEP_S),
    "optimizer": (torch.optim.Adam, "step", SLEEP_S),
    "logging": (TensorBoardLogger, "log_metrics", 2 * SLEEP_S),
    "other": (Keep, "on_train_batch_start", SLEEP_S),
}


@pytest.mark.parametrize("phase", SLOW)
@pytest.mark.parametrize("num_batches", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_what_is_slow_is_found(train, capsys, monkeypatch, phase, num_batches):
    delay(monkeypatch, *SLOW[phase])
    result = train(
        *FLAGS,
        "--trainer.log_every_n_steps",
        1 if phase == "logging" else 5,
        "--trainer.accumulate_grad_batches",
        num_batches,
    )
    timer = Keep.timer
    seconds = 1e-3 * timer.step_ms * result["steps"]
    assert seconds == pytest.approx(Keep.steps, rel=0.1, abs=0.02)
    assert timer.shares[phase] * timer.step_ms > 0.99e3 * SLEEP_S
    shown = capsys.readouterr().out
    assert "\nAdvice: " in shown
    table = [line for line in shown.splitlines() if line.endswith(" ms")]
    assert [line[2:26].strip() for line in table] == [*PHASES]
    percents = {
        line[2:26].strip(): float(line.split("%")[0].split()[-1]) for line in table
    }
    assert max(percents, key=lambda label: percents[label]) == phase
    assert sum(percents.values()) == pytest.approx(100, abs=0.5)


def test_validations_are_left_out(
    train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    delay(monkeypatch, *SLOW["transfer_transforms"])
    slow = "--data.val_fraction 0.6 --trainer.val_check_interval 2"
    result = train(*FLAGS, *slow.split())
    seconds = 1e-3 * Keep.timer.step_ms * result["steps"]
    # Lightning does more than lies between the two hooks
    assert seconds < Keep.steps + 0.01
    assert Keep.timer.shares["transfer_transforms"] > 0.3


@pytest.mark.slow
def test_what_lies_between_epochs_is_no_part_of_a_step(train, capsys, monkeypatch):
    figures: list[Figure] = []
    log_figure = lambda trainer, tag, figure: figures.append(figure)  # noqa: E731
    monkeypatch.setattr(step_timer, "log_figure", log_figure)
    delay(monkeypatch, Keep, "on_train_epoch_end", 1)  # as a large checkpoint
    train(*FLAGS, "--trainer.max_epochs", 1)
    (pie,) = figures
    shown = capsys.readouterr().out
    (step_ms,) = map(float, re.findall(r"training went \(steps of ([\d.]+) ms", shown))
    assert step_ms < 1000 / 19  # of one epoch of 19 steps
    assert pie.get_suptitle() == f"a step of {step_ms:.2f} ms"
    table = re.findall(r"^  (\w+) +([\d.]+)%", shown, re.M)
    labels = [text.get_text() for text in pie.legends[0].get_texts()]
    assert labels == [f"{phase} {float(share):.0f}%" for phase, share in table]


def test_it_rests_beside_another_profiler(
    train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    train(
        "--step_timer",
        "true",
        "--trainer.profiler",
        "lightning.pytorch.profilers.SimpleProfiler",
    )
    shown = capsys.readouterr().out
    assert "Step timer: off beside the SimpleProfiler" in shown
    assert "Where the time of training went" not in shown


class StandInEvent:
    """A CUDA event of a GPU that works off what it was given, later than the CPU gives
    it."""

    now = 0.0
    waits = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = StandInEvent.now

    def elapsed_time(self, end: "StandInEvent") -> float:
        return 1e3 * (end.at - self.at)


def gpu_clock(monkeypatch: pytest.MonkeyPatch) -> PhaseClock:
    monkeypatch.setattr(torch.cuda, "Event", StandInEvent)

    def synchronize() -> None:
        StandInEvent.waits += 1
        time.sleep(0.05)

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    StandInEvent.now, StandInEvent.waits = 0.0, 0
    return PhaseClock(torch.device("cuda"))


def turn(clock: PhaseClock, forwards: list[float]) -> None:
    """An epoch of calls whose forward takes so many seconds."""
    clock.start("run_training_epoch")
    for forward in forwards:
        seconds_of = {"train_dataloader_next": 1, "batch_to_device": 2, "backward": 4}
        for action, seconds in (seconds_of | {"training_step": forward}).items():
            clock.start(action)
            StandInEvent.now += seconds
            clock.stop(action)


@pytest.mark.parametrize("num_calls", [1, 2, 30])
def test_in_a_short_epoch_on_a_gpu_each_call_is_timed(monkeypatch, num_calls):
    clock = gpu_clock(monkeypatch)
    forwards = [30, *[3] * 19, 60, *[3] * 9]  # two are slow, as for a loader
    for _ in range(3):
        turn(clock, forwards[:num_calls])
        shares = clock.shares()
        assert shares["other"] == 0
        ratio = sum(forwards[:num_calls]) / 4 / num_calls
        assert shares["forward"] / shares["backward"] == pytest.approx(ratio)


def test_on_a_gpu_some_calls_of_a_long_epoch_are_timed_by_events(monkeypatch):
    clock = gpu_clock(monkeypatch)
    turn(clock, [6] * 99 + [2] * 55)  # before the first one the loader starts
    assert StandInEvent.waits == 0  # within the epoch
    ends = [phase for phase, *_ in clock.marks].count("")
    assert ends == 105  # and 100, 111, 122, 133 and 144
    clock.start("[Callback]StepTimer.on_train_epoch_end")
    shares = clock.shares()
    assert StandInEvent.waits == 1
    # what the GPU had left belongs to the steps
    assert 0.05 < clock.step_seconds < 0.1
    forward = (99 * 6 + 55 * 2) / 154  # of a call
    assert shares["forward"] / shares["backward"] == pytest.approx(forward / 4)
    assert shares["backward"] / shares["data_loading"] == pytest.approx(4)
    assert shares["transfer_transforms"] / shares["data_loading"] == pytest.approx(2)


@pytest.mark.gpu
@pytest.mark.skipif(
    "SIMGPU_FOLDER" in os.environ, reason="a simulated GPU has no speed"
)
def test_a_slow_network_is_found_on_a_gpu(train: Train) -> None:
    heavy = f"--trainer.accelerator gpu --model.net {HERE}.HeavyForward --data.num_train 20000"
    train(*FLAGS, *heavy.split())
    # its kernels run long after they were launched
    assert Keep.timer.shares["forward"] > 0.6


@pytest.mark.gpu
def test_a_slow_reader_is_found_on_a_gpu_in_a_short_epoch(train, monkeypatch):
    delay(monkeypatch, TensorBatches, "__getitems__", 0.12)
    flags = "--trainer.accelerator gpu --data.resident false --data.num_train 540"
    result = train(*FLAGS, *flags.split())
    assert result["steps"] == 2 * 30
    seconds = 1e-3 * Keep.timer.step_ms * result["steps"]
    # reads 20 batches at once
    assert Keep.timer.shares["data_loading"] * seconds > 2 * 2 * 0.12


class HeavyForward(MLP):
    def __init__(self, sizes: list[int]) -> None:
        super().__init__(sizes)
        self.weight = nn.Parameter(torch.randn(4096, 4096), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for _ in range(10):
                self.weight @ self.weight
        return super().forward(x)
