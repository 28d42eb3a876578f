"""The time of a training, divided among the phases of its steps."""

import contextlib
import functools
import itertools
import time
from typing import Any, NamedTuple

import torch
from lightning import Callback, LightningModule
from lightning.pytorch.profilers import PassThroughProfiler

from lightbase.curves import log_values, newest_step, num_steps
from lightbase.ranks import say
from lightbase.watch import figures

PHASES = {
    "data_loading": "data loading",
    "transfer_transforms": "transfer and transforms",
    "forward": "forward",
    "backward": "backward",
    "optimizer": "optimiser",
    "logging": "logging",
    "other": "other",
}
"""{name in curves: label}.

Forward includes the loss and the sums for the curves; optimizer includes its schedule and clipping;
logging is curves and the progress bar; other is Lightning's loop and other callbacks.
"""
# On a GPU one call in 11 is timed. 11 divides none of the usual logging intervals.
SAMPLE_EVERY = 11
# An epoch's first calls, in which libraries set themselves up, count only if there are no others.
SETUP_CALLS = 2
# Timed calls whose events are not read yet. The queue of a GPU holds some 1,000 kernels: it has
# always finished a call that is 11 x 100 calls old.
NUM_UNREAD = 100
NOTHING = contextlib.nullcontext()


class Action(NamedTuple):
    """What the clock learns when Lightning begins or ends an action."""

    phase: str | None = None  # begins with the action
    state: str | None = None  # "steps", "validation" or "between" begins with it
    next_phase: str | None = None  # begins when the action ends; by default the phase before it


# by the last part of the name that Lightning's profiler gets
ACTIONS = {
    "run_training_epoch": Action(state="steps"),
    "train_dataloader_next": Action("data_loading", "steps", next_phase="other"),
    "on_before_batch_transfer": Action("transfer_transforms"),
    "batch_to_device": Action("transfer_transforms"),
    "training_step": Action("forward"),
    "backward": Action("backward"),
    "optimizer_step": Action("optimizer"),
    "optimizer_zero_grad": Action("optimizer"),
    "configure_gradient_clipping": Action("optimizer"),
    "lr_scheduler_step": Action("optimizer"),
    "on_train_batch_end": Action("logging", next_phase="logging"),  # then Lightning writes curves
    # no action encloses a whole validation: the next batch of the training ends it
    "on_validation_model_zero_grad": Action(state="validation"),
    "on_validation_start": Action(state="validation"),
    "on_train_epoch_end": Action(state="between"),
    # from lightbase/devices/strategies.py
    "transforms": Action("transfer_transforms"),
    "forward": Action("forward"),
    "logging": Action("logging"),
    "loop": Action("other"),
}


@functools.cache
def action_of(name: str) -> Action | None:
    """name: as Lightning gives it, such as "[Strategy]SingleDeviceStrategy.training_step"."""
    word = name.rpartition(".")[2]
    if word == "on_train_batch_end" and name.startswith("[Callback]"):
        return Action("logging") if "ProgressBar" in name else None
    return ACTIONS.get(word)


class PhaseClock(PassThroughProfiler):
    """A profiler, which Lightning calls when an action begins or ends, that times the phases.

    Every moment of the steps belongs to one phase: an inner phase interrupts the outer one.
    Validations and the time between epochs, such as checkpoints, are counted apart.

    On a CPU each call of the training loop is timed. On a GPU, where the CPU only queues work, one
    call in 11 is timed, by CUDA events on the stream of the root device: a phase takes as long as
    it holds up the GPU. The CPU waits for the GPU only before a validation and at the end of an
    epoch. The time of all steps is divided in proportion to these samples.
    """

    def __init__(self) -> None:
        super().__init__()
        self.begin(torch.device("cpu"))

    def begin(self, device: torch.device) -> None:
        """Start again from zero. device: the root device of the training."""
        self.is_on_gpu = device.type == "cuda"
        self.state, self.state_start = "between", time.perf_counter()
        self.state_seconds = {"steps": 0.0, "between": 0.0, "validation": 0.0}  # by the wall clock
        self.phase = "other"
        self.outer_phases: list[str] = []  # they continue when the inner ones end
        self.num_calls = 0  # in this epoch
        # of the call that is being timed: (phase, time at which it began)
        self.marks: list[tuple[str, Any]] | None = None
        self.unread: list[list[tuple[str, Any]]] = []  # marks of calls whose events may not be over
        self.phase_seconds = dict.fromkeys(PHASES, 0.0)  # of the timed calls

    def take(self) -> dict[str, float]:
        """Seconds since the last call of take: of each phase, "between" epochs, "validation"."""
        self._enter(self.state)
        num_sampled = sum(self.phase_seconds.values())
        if not num_sampled:
            self.phase_seconds["other"] = num_sampled = 1.0
        scale = self.state_seconds["steps"] / num_sampled
        seconds = {phase: scale * value for phase, value in self.phase_seconds.items()}
        seconds["between"] = self.state_seconds["between"]
        seconds["validation"] = self.state_seconds["validation"]
        self.state_seconds = dict.fromkeys(self.state_seconds, 0.0)
        self.phase_seconds = dict.fromkeys(PHASES, 0.0)
        self.num_calls = 0
        return seconds

    # Lightning calls the next three some eighty times a step

    def profile(self, action_name: str) -> Any:
        # a generator takes 2 µs
        return NOTHING if action_of(action_name) is None else super().profile(action_name)

    def start(self, action_name: str) -> None:
        action = action_of(action_name)
        if action is None:
            return
        phase, state, _ = action
        if state is not None:
            if state != self.state:
                self._enter(state)
            elif phase is not None:  # the next batch
                self._end_call()
                self._begin_call()
        if phase is not None and self.state == "steps":
            self.outer_phases.append(self.phase)
            self._switch(phase)

    def stop(self, action_name: str) -> None:
        action = action_of(action_name)
        if action is None:
            return
        phase, _, next_phase = action
        if phase is not None and self.state == "steps":
            outer = self.outer_phases.pop() if self.outer_phases else "other"
            self._switch(next_phase or outer)

    def _enter(self, state: str) -> None:
        self._end_call()
        if self.is_on_gpu and self.state == "steps":
            torch.cuda.synchronize()  # what the GPU still has to do belongs to the steps
        self._read()
        now = time.perf_counter()
        self.state_seconds[self.state] += now - self.state_start
        self.state, self.state_start = state, now
        if state == "steps":
            self.outer_phases = []
            self.phase = "data_loading"  # the loader's workers start
            self._begin_call()

    def _end_call(self) -> None:
        """End a call of the training loop."""
        if self.marks is not None:
            self._switch(self.phase)
            self.unread.append(self.marks)
            self.marks = None
            self._read(NUM_UNREAD)

    def _begin_call(self) -> None:
        if self.is_on_gpu and self.num_calls == SETUP_CALLS:  # the first calls need not count
            self.unread, self.phase_seconds = [], dict.fromkeys(PHASES, 0.0)
        if self._is_timed():
            self.marks = []
            self._switch(self.phase)
        self.num_calls += 1

    def _is_timed(self) -> bool:
        if not self.is_on_gpu or self.num_calls < SETUP_CALLS:
            return True
        return self.num_calls % SAMPLE_EVERY == SETUP_CALLS

    def _switch(self, phase: str) -> None:
        self.phase = phase
        if self.marks is None:
            return
        now: Any = time.perf_counter()
        if self.is_on_gpu:
            now = torch.cuda.Event(enable_timing=True)
            now.record()
        self.marks.append((phase, now))

    def _read(self, num_unread: int = 0) -> None:
        """Add up the marks of calls until so many calls are left. On a GPU it waits for them."""
        while len(self.unread) > num_unread:
            marks = self.unread.pop(0)
            if self.is_on_gpu:
                marks[-1][1].synchronize()
            for (phase, start), (_, end) in itertools.pairwise(marks):
                seconds = start.elapsed_time(end) / 1e3 if self.is_on_gpu else end - start
                self.phase_seconds[phase] += seconds


class StepTimer(Callback):
    """Shows how the time of a training is divided among the phases of its steps.

    It writes `PHASE_percent` and `step_ms` in watch/step_time/ for each epoch, and a pie
    and a table of the training at its end. It runs on the first process, as the Trainer's profiler;
    if the Trainer has another profiler, it is off.

    every_n_epochs: In configs of version 0.2, where it drew more pies; without effect.
    """

    def __init__(self, every_n_epochs: int = 0) -> None:
        self.clock = PhaseClock()
        # of each epoch since the start: the seconds of `PhaseClock.take`, and `num_steps`
        self.epochs: list[dict[str, float]] = []
        self.num_steps = 0  # before the epoch

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        self.epochs, self.num_steps = [], num_steps(trainer)
        if not trainer.is_global_zero:
            return
        if isinstance(trainer.profiler, PassThroughProfiler):
            trainer.profiler = self.clock
            self.clock.begin(trainer.strategy.root_device)
        else:
            say(f"Step timer: off beside the {type(trainer.profiler).__name__}")

    def on_train_epoch_end(self, trainer: Any, pl_module: LightningModule) -> None:
        if trainer.profiler is not self.clock:
            return
        row = {**self.clock.take(), "num_steps": num_steps(trainer) - self.num_steps}
        self.num_steps = num_steps(trainer)
        self.epochs.append(row)
        percents = {f"{phase}_percent": 100 * share for phase, share in shares(row).items()}
        values = percents | ({"step_ms": step_ms(row)} if row["num_steps"] else {})
        log_values(trainer, {f"watch/step_time/{name}": value for name, value in values.items()})

    def on_train_end(self, trainer: Any, pl_module: LightningModule) -> None:
        if trainer.profiler is not self.clock or not self.epochs:
            return
        # the last checkpoints were written after the epoch's end
        for name, seconds in self.clock.take().items():
            self.epochs[-1][name] += seconds
        row = self.sum()
        if row and figures.has_pictures(trainer.loggers):
            parts = shares(row)
            labels = [f"{PHASES[phase]} {share:.0%}" for phase, share in parts.items()]
            pie = figures.pie(list(parts.values()), labels, f"a step of {step_ms(row):.2f} ms")
            figures.log_figure(trainer.loggers, "watch/step_time/pie", pie, newest_step(trainer))

    def on_fit_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Print a table, below the bar, which is closed now: share and milliseconds of a step."""
        row = self.sum()
        if not row:
            return
        steps = f"{row['num_steps']:,} steps of {step_ms(row):.2f} ms"
        rest = f"{row['validation']:.1f} s of validation and {row['between']:.1f} s between epochs"
        say(f"Where the time of training went ({steps}, without {rest}):")
        for phase, share in shares(row).items():
            say(f"  {PHASES[phase]:<24}{share:>7.1%}{share * step_ms(row):>10.3f} ms")

    def sum(self) -> dict[str, float]:
        """Of all epochs since the start; empty without a step."""
        if not any(row["num_steps"] for row in self.epochs):
            return {}
        return {name: sum(row[name] for row in self.epochs) for name in self.epochs[0]}


def total(row: dict[str, float]) -> float:
    """Seconds of all phases."""
    return sum(row[phase] for phase in PHASES)


def shares(row: dict[str, float]) -> dict[str, float]:
    """The share of each phase, in [0, 1]."""
    return {phase: row[phase] / total(row) for phase in PHASES}


def step_ms(row: dict[str, float]) -> float:
    return 1e3 * total(row) / max(1, row["num_steps"])
