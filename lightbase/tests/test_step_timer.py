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
from lightning import Callback
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor, nn

from lightbase.core.batches import TensorBatches
from lightbase.extras import step_timer
from lightbase.extras.step_timer import PHASES, PhaseClock, StepTimer

SLEEP_S = 0.01


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


HERE = "test_step_timer"
FLAGS = f"--step_timer true --trainer.callbacks {HERE}.Keep --num_threads 1"
SLOW: dict[str, tuple[Any, str, float]] = {
    # reads many batches at once
    "data_loading": (TensorBatches, "__getitems__", 30 * SLEEP_S),
    "transfer_transforms": (SyntheticImages, "normalize", SLEEP_S),
    "forward": (MLP, "forward", SLEEP_S),
    "backward": (Tensor, "backward", SLEEP_S),
    "optimizer": (torch.optim.Adam, "step", SLEEP_S),
    "logging": (TensorBoardLogger, "log_metrics", 2 * SLEEP_S),
    "other": (Keep, "on_train_batch_start", SLEEP_S),
}


@pytest.mark.parametrize("phase", SLOW)
def test_what_is_slow_is_found(train, capsys, monkeypatch, phase):
    delay(monkeypatch, *SLOW[phase])
    result = train(
        FLAGS, f"--trainer.log_every_n_steps {1 if phase == 'logging' else 5}"
    )
    timer = Keep.timer
    seconds = 1e-3 * timer.step_ms * result["steps"]
    assert seconds == pytest.approx(Keep.steps, rel=0.1, abs=0.02)
    assert timer.shares[phase] * timer.step_ms > 0.99e3 * SLEEP_S
    shown = capsys.readouterr().out
    assert "\nAdvice: " in shown
    table = dict(re.findall(r"^  (\w+) +([\d.]+)% .* ms$", shown, re.M))
    assert [*table] == [*PHASES]
    assert max(table, key=lambda label: float(table[label])) == phase
    assert sum(map(float, table.values())) == pytest.approx(100, abs=0.5)


def test_validations_and_what_lies_between_epochs_are_left_out(
    train, monkeypatch, capsys
):
    figures: list[Any] = []
    monkeypatch.setattr(step_timer, "log_figure", lambda *args: figures.append(args[2]))
    delay(monkeypatch, *SLOW["transfer_transforms"])
    delay(monkeypatch, Keep, "on_train_epoch_end", 1)  # as a large checkpoint
    result = train(FLAGS, "--data.val_fraction 0.6 --trainer.val_check_interval 2")
    seconds = 1e-3 * Keep.timer.step_ms * result["steps"]
    # Lightning does more than lies between the two hooks
    assert seconds < Keep.steps + 0.01
    assert Keep.timer.shares["transfer_transforms"] > 0.3
    (pie,) = figures
    shown = capsys.readouterr().out
    step_ms = pie.get_suptitle().removeprefix("a step of ")
    assert f"training went (steps of {step_ms}):" in shown
    labels = [text.get_text().split()[0] for text in pie.legends[0].get_texts()]
    assert labels == [*PHASES]


def test_it_rests_beside_another_profiler(train, capsys):
    profiler = "lightning.pytorch.profilers.SimpleProfiler"
    train(f"--step_timer true --trainer.profiler {profiler}")
    shown = capsys.readouterr().out
    assert "Step timer: off beside the SimpleProfiler" in shown
    assert "Where the time of training went" not in shown


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


@pytest.mark.parametrize(
    "forwards",
    [
        [30],
        [30, *[3] * 19, 60, *[3] * 9],  # two are slow, as for a loader
        [6] * 99 + [2] * 55,  # timed: also 100, 111, 122, 133 and 144
    ],
    ids=len,
)
def test_on_a_gpu_calls_are_timed_by_events(monkeypatch, forwards):
    waits: list[int] = []
    monkeypatch.setattr(torch.cuda, "Event", StandInEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append(1))
    clock = PhaseClock(torch.device("cuda"))
    actions = ("train_dataloader_next", "batch_to_device", "training_step")
    clock.start("run_training_epoch")
    for forward in forwards:
        seconds = dict(zip(actions, (1, 2, forward), strict=True))
        for action in seconds:
            clock.start(action)
            StandInEvent.now += seconds[action]
            clock.stop(action)
    assert not waits  # within the epoch
    clock.start("[Callback]StepTimer.on_train_epoch_end")
    assert len(waits) == 1
    num = len(forwards)
    expected = {"data_loading": num, "transfer_transforms": 2 * num}
    expected["forward"] = sum(forwards)
    for phase, total in clock.seconds.items():
        assert total == pytest.approx(expected.get(phase, 0)), phase


@pytest.mark.gpu
@pytest.mark.skipif(
    "SIMGPU_FOLDER" in os.environ, reason="a simulated GPU has no speed"
)
def test_a_slow_network_is_found_on_a_gpu(train):
    heavy = f"--model.net {HERE}.HeavyForward --data.num_train 20000"
    train(FLAGS, heavy, "--trainer.accelerator gpu")
    # its kernels run long after they were launched
    assert Keep.timer.shares["forward"] > 0.6


class HeavyForward(MLP):
    def __init__(self, sizes: list[int]) -> None:
        super().__init__(sizes)
        self.weight = nn.Parameter(torch.randn(4096, 4096), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for _ in range(10):
                self.weight @ self.weight
        return super().forward(x)
