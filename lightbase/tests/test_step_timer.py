"""Where a step's time goes: each phase is found, the phases add up to the wall time,
validations are left out."""

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
from lightbase.extras.step_timer import PHASES, PhaseClock, StepTimer, Times

SLEEP_S = 0.004


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
    """The timer, and the wall time of the training, and of its steps without
    validations."""

    timer: StepTimer
    wall: float
    steps: float

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        Keep.timer = next(cb for cb in trainer.callbacks if isinstance(cb, StepTimer))
        self.start, self.validation = time.perf_counter(), 0.0

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.validation_start = time.perf_counter()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self.validation += time.perf_counter() - self.validation_start

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        Keep.wall = time.perf_counter() - self.start
        Keep.steps = Keep.wall - self.validation


def times_of_training() -> Times:
    times = Keep.timer.times
    assert times
    return times


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
    train(
        *FLAGS,
        "--trainer.log_every_n_steps",
        1 if phase == "logging" else 5,
        "--trainer.accumulate_grad_batches",
        num_batches,
    )
    times = times_of_training()
    assert times.total() + times.rest == pytest.approx(Keep.wall, rel=0.05, abs=0.003)
    assert times.phases[phase] > 0.99 * times.num_steps * SLEEP_S
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
    train(*FLAGS, *slow.split())
    times = times_of_training()
    assert times.rest > 2 * times.total()
    # Lightning does more than lies between the two hooks
    assert times.total() < Keep.steps + 0.01
    assert times.total() + times.rest == pytest.approx(Keep.wall, rel=0.05)
    assert times.shares()["transfer_transforms"] > 0.3


@pytest.mark.slow
def test_what_lies_between_epochs_is_no_part_of_a_step(train, capsys, monkeypatch):
    figures: list[Figure] = []
    log_figure = lambda trainer, tag, figure: figures.append(figure)  # noqa: E731
    monkeypatch.setattr(step_timer, "log_figure", log_figure)
    delay(monkeypatch, Keep, "on_train_epoch_end", 1)  # as a large checkpoint
    train(*FLAGS, "--trainer.max_epochs", 1)
    (pie,) = figures
    shown = capsys.readouterr().out
    (line,) = re.findall(r"Where the time of training went .*", shown)
    step_ms, rest_s = map(
        float, re.findall(r"steps of ([\d.]+) ms, without ([\d.]+) s", line)[0]
    )
    assert rest_s == pytest.approx(1, abs=0.5)
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
        clock.start("[Callback]StepTimer.on_train_epoch_end")
        seconds = clock.times(num_calls).phases
        assert seconds["other"] == 0
        ratio = sum(forwards[:num_calls]) / 4 / num_calls
        assert seconds["forward"] / seconds["backward"] == pytest.approx(ratio)


def test_on_a_gpu_some_calls_of_a_long_epoch_are_timed_by_events(monkeypatch):
    clock = gpu_clock(monkeypatch)
    turn(clock, [6] * 99 + [2] * 55)  # before the first one the loader starts
    assert StandInEvent.waits == 0  # within the epoch
    assert [phase for phase, *_ in clock.marks].count(
        ""
    ) == 105  # and 100, 111, 122, 133 and 144
    clock.start("[Callback]StepTimer.on_train_epoch_end")
    times = clock.times(154)
    assert StandInEvent.waits == 1
    assert 0.05 < times.total() < 0.1  # what the GPU had left belongs to the steps
    seconds = times.phases
    forward = (99 * 6 + 55 * 2) / 154  # of a call
    assert seconds["forward"] / seconds["backward"] == pytest.approx(forward / 4)
    assert seconds["backward"] / seconds["data_loading"] == pytest.approx(4)
    assert seconds["transfer_transforms"] / seconds["data_loading"] == pytest.approx(2)


@pytest.mark.gpu
@pytest.mark.skipif(
    "SIMGPU_FOLDER" in os.environ, reason="a simulated GPU has no speed"
)
def test_a_slow_network_is_found_on_a_gpu(train: Train) -> None:
    heavy = f"--trainer.accelerator gpu --model.net {HERE}.HeavyForward --data.num_train 20000"
    train(*FLAGS, *heavy.split())
    # its kernels run long after they were launched
    assert times_of_training().shares()["forward"] > 0.6


@pytest.mark.gpu
def test_a_slow_reader_is_found_on_a_gpu_in_a_short_epoch(train, monkeypatch):
    delay(monkeypatch, TensorBatches, "__getitems__", 0.12)
    flags = "--trainer.accelerator gpu --data.resident false --data.num_train 540"
    train(*FLAGS, *flags.split())
    times = times_of_training()
    assert times.num_steps == 2 * 30
    assert times.phases["data_loading"] > 2 * 2 * 0.12  # reads 20 batches at once


class HeavyForward(MLP):
    def __init__(self, sizes: list[int]) -> None:
        super().__init__(sizes)
        self.weight = nn.Parameter(torch.randn(4096, 4096), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for _ in range(10):
                self.weight @ self.weight
        return super().forward(x)
