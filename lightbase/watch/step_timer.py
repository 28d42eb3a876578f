"""The time of a training, divided among the phases of its steps."""

import contextlib
import functools
import itertools
import time
from typing import Any

import torch
from lightning import Callback, LightningModule
from lightning.pytorch.profilers import PassThroughProfiler, Profiler

from lightbase.compat import training_results
from lightbase.ranks import say
from lightbase.watch import charts

PHASES = {
    "data_loading": "data loading",
    "transfer_transforms": "transfer and transforms",
    "forward": "forward",
    "backward": "backward",
    "optimizer": "optimiser",
    "logging": "logging",
    "other": "other",
}
"""A name for curves, a name for people. Forward holds the loss and its sums, the optimiser its
schedule and clipping, logging self.log and the progress bar; other is Lightning's loop and the
other callbacks."""

SAMPLE_EVERY = (
    11  # on a GPU one of so many calls is timed: no divisor of the usual logging intervals
)
# an epoch's start and its first call, where libraries set themselves up, count if there are no
# others
SETUP_CALLS = 2

NOTHING = contextlib.nullcontext()
Action = tuple[str | None, str | None, str | None]
# the last part of what Lightning tells its profiler: the phase that begins with it, the state, and
# the phase that goes on when it is over, by default the one before it; there is no action around a
# whole validation
ACTIONS: dict[str, Action] = {
    "run_training_epoch": (None, "steps", None),
    "train_dataloader_next": ("data_loading", "steps", "other"),
    "on_before_batch_transfer": ("transfer_transforms", None, None),
    "batch_to_device": ("transfer_transforms", None, None),
    "training_step": ("forward", None, None),
    "backward": ("backward", None, None),
    "optimizer_step": ("optimizer", None, None),
    "optimizer_zero_grad": ("optimizer", None, None),
    "configure_gradient_clipping": ("optimizer", None, None),
    "lr_scheduler_step": ("optimizer", None, None),
    "on_train_batch_end": ("logging", None, "logging"),  # Lightning writes the curves then
    "on_validation_model_zero_grad": (None, "validation", None),
    "on_validation_start": (None, "validation", None),
    "on_train_epoch_end": (None, "between", None),
    # those of devices/steps.py
    "transforms": ("transfer_transforms", None, None),
    "forward": ("forward", None, None),
    "logging": ("logging", None, None),
    "log": ("logging", None, None),  # of StepTimer
    "loop": ("other", None, None),
}


class PhaseClock(Profiler):
    """A profiler, told by Lightning of each action that begins or ends, that measures each phase
    without the phases within it. Every moment of a step belongs to one phase, so the phases add up
    to the whole. Validations are left out, and what lies between epochs: checkpoints.

    On a CPU every call of the training loop is timed. On a GPU, where the CPU only hands out work,
    one of 11 calls is, by CUDA events on the stream of the root device, read when they have passed:
    nothing waits for the GPU but the end of an epoch. A phase then takes as long as the GPU is busy
    with it or waits for it. The time of all steps is shared out by these samples.
    """

    def __init__(self) -> None:
        super().__init__()
        self.begin(torch.device("cpu"))

    def begin(self, device: torch.device) -> None:
        """Start anew, before the first epoch on this root device."""
        self.on_gpu = device.type == "cuda"
        self.num_calls = 0
        self.phase = "other"
        self.outer: list[str] = []  # phases that go on when those within them end
        self.marks: list[tuple[str, Any]] | None = (
            None  # of the call that is being timed: what began, and when
        )
        self.unread: list[list[tuple[str, Any]]] = []
        self.state, self.since = "between", time.perf_counter()
        self.states = {
            "steps": 0.0,
            "between": 0.0,
            "validation": 0.0,
        }  # seconds, measured by the clock on the wall
        self.sampled = dict.fromkeys(PHASES, 0.0)  # seconds of the calls that were timed

    def take(self) -> dict[str, float]:
        """Seconds since the last call, of each phase and of "between" epochs and "validation"."""
        self._turn(self.state)
        self._read(wait=True)
        sampled = sum(self.sampled.values())
        if not sampled:
            self.sampled["other"] = sampled = 1.0  # all of it is other
        seconds = {
            phase: self.states["steps"] * value / sampled for phase, value in self.sampled.items()
        }
        seconds |= {"between": self.states["between"], "validation": self.states["validation"]}
        self.states = dict.fromkeys(self.states, 0.0)
        self.sampled = dict.fromkeys(self.sampled, 0.0)
        self.num_calls = 0
        return seconds

    # the next three are called some eighty times a step

    def profile(self, action_name: str) -> Any:
        return (
            Running(self, action_name) if learn(action_name) else NOTHING
        )  # Lightning's generator takes 2 µs

    def start(self, action_name: str) -> None:
        if (action := learn(action_name)) is None:
            return
        phase, state, _ = action
        if state is not None and state != self.state:
            self._turn(state)
        elif state is not None and phase is not None:  # the next batch
            self._next_call()
        if phase is not None and self.state == "steps":
            self.outer.append(self.phase)
            self._switch(phase)

    def stop(self, action_name: str) -> None:
        if (action := learn(action_name)) is None:
            return
        phase, _, after = action
        if phase is not None and self.state == "steps":
            outer = self.outer.pop() if self.outer else "other"
            self._switch(after or outer)

    def _turn(self, state: str) -> None:
        """Go over to steps, validation or what is between epochs."""
        now = time.perf_counter()
        self.states[self.state] += now - self.since
        self.state, self.since = state, now
        if state == "steps":
            self.outer = []
            self.phase = "data_loading"  # the loader's workers start
        self._next_call()

    def _next_call(self) -> None:
        if self.marks is not None:
            self._switch(self.phase)
            self.unread.append(self.marks)
            self.marks = None
            self._read(wait=False)
        if self.state == "steps":
            if self.on_gpu and self.num_calls == SETUP_CALLS:
                self.unread, self.sampled = [], dict.fromkeys(PHASES, 0.0)
            if (
                not self.on_gpu
                or self.num_calls < SETUP_CALLS
                or self.num_calls % SAMPLE_EVERY == SETUP_CALLS
            ):
                self.marks = []
                self._switch(self.phase)
            self.num_calls += 1

    def _switch(self, phase: str) -> None:
        self.phase = phase
        if self.marks is not None:
            now: Any = torch.cuda.Event(enable_timing=True) if self.on_gpu else time.perf_counter()
            if self.on_gpu:
                now.record()
            self.marks.append((phase, now))

    def _read(self, wait: bool) -> None:
        while self.unread:
            _, last = self.unread[0][-1]
            if self.on_gpu and wait:
                last.synchronize()
            elif self.on_gpu and not last.query():
                return
            for (phase, start), (_, end) in itertools.pairwise(self.unread.pop(0)):
                self.sampled[phase] += start.elapsed_time(end) / 1e3 if self.on_gpu else end - start


class Running:
    """An action, between its start and its end."""

    def __init__(self, clock: PhaseClock, name: str) -> None:
        self.clock, self.name = clock, name

    def __enter__(self) -> None:
        self.clock.start(self.name)

    def __exit__(self, *_: object) -> None:
        self.clock.stop(self.name)


@functools.cache
def learn(name: str) -> Action | None:
    """What an action of Lightning's means, by its name, such as
    "[Strategy]SingleDeviceStrategy.training_step"."""
    word = name.rpartition(".")[2]
    if word == "on_train_batch_end" and name.startswith("[Callback]"):
        return ("logging", None, None) if "ProgressBar" in name else None
    return ACTIONS.get(word)


class StepTimer(Callback):
    """Shows how the time of training is shared out among the phases of its steps, on the first
    process.

    Written, in watch/step_time/: `PHASE_percent` and `step_ms` for every epoch, `pie` of one; and a
    table in the terminal at the end.

    Its clock is the Trainer's profiler, as Lightning tells that one what begins and ends; with
    another it rests.

    every_n_epochs: of the pie, which is also drawn at the end; 0 draws none.
    """

    def __init__(self, every_n_epochs: int) -> None:
        self.clock = PhaseClock()
        self.every_n_epochs = every_n_epochs
        self.epochs: list[
            dict[str, float]
        ] = []  # seconds of each phase, and `num_steps`; also before a resume
        self.first_epoch = 0
        self.is_drawn = True  # the last epoch, in the pie
        self.logs: dict[str, int] = {}  # calls of self.log, by name

    def state_dict(self) -> dict[str, Any]:
        return {"epochs": self.epochs}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if not self.epochs:  # the test loads a checkpoint too
            self.epochs = state_dict["epochs"]

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        self.first_epoch, self.num_steps = len(self.epochs), trainer.global_step
        if not trainer.is_global_zero:
            return
        if isinstance(trainer.profiler, PassThroughProfiler | PhaseClock):
            trainer.profiler = self.clock
            self.clock.begin(trainer.strategy.root_device)
            self._time_logs(training_results(trainer))
        else:
            say(f"Step timer: off beside the {type(trainer.profiler).__name__}")

    def _time_logs(self, results: Any) -> None:
        self.logs, log = {}, type(results).log

        def timed(hook: str, name: str, *args: Any, **kwargs: Any) -> None:
            self.logs[name] = self.logs.get(name, 0) + 1
            with self.clock.profile("log"):
                log(results, hook, name, *args, **kwargs)

        results.log = timed

    def on_train_epoch_end(self, trainer: Any, pl_module: LightningModule) -> None:
        if trainer.profiler is not self.clock:
            return
        num_steps, self.num_steps = trainer.global_step - self.num_steps, trainer.global_step
        row = {**self.clock.take(), "num_steps": num_steps}
        self.epochs.append(row)
        self.is_drawn = self.every_n_epochs == 0
        values = {
            f"watch/step_time/{phase}_percent": 100 * share for phase, share in shares(row).items()
        }
        if num_steps:
            values["watch/step_time/step_ms"] = step_ms(row)
        for logger in trainer.loggers:
            logger.log_metrics(values, trainer.global_step - 1)
        if self.every_n_epochs and (trainer.current_epoch + 1) % self.every_n_epochs == 0:
            self._draw(trainer)

    def on_train_end(self, trainer: Any, pl_module: LightningModule) -> None:
        if trainer.profiler is not self.clock:
            return
        if self.epochs:  # the last checkpoints were written after its end
            rest = self.clock.take()
            self.epochs[-1] = {
                name: value + rest.get(name, 0) for name, value in self.epochs[-1].items()
            }
        if not self.is_drawn:
            self._draw(trainer)

    def on_fit_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """A line a phase in the terminal, below the bar, which is closed now: its share and
        milliseconds a step."""
        if row := self.sum():
            steps = f"{row['num_steps']:,} steps of {step_ms(row):.2f} ms"
            rest = (
                f"{row['validation']:.1f} s of validation and {row['between']:.1f} s between epochs"
            )
            say(f"Where the time of training went ({steps}, without {rest}):")
            for phase, share in shares(row).items():
                say(f"  {PHASES[phase]:<24}{share:>7.1%}{share * step_ms(row):>10.3f} ms")

    def sum(self) -> dict[str, float]:
        """Of the epochs since the start or the resume; empty without a step."""
        rows = self.epochs[self.first_epoch :]
        if not any(row["num_steps"] for row in rows):
            return {}
        return {name: sum(row[name] for row in rows) for name in rows[0]}

    def _draw(self, trainer: Any) -> None:
        self.is_drawn = True
        if not charts.has_pictures(trainer.loggers):
            return
        step, row = max(0, trainer.global_step - 1), self.epochs[-1]
        labels = [f"{PHASES[phase]} {share:.0%}" for phase, share in shares(row).items()]
        title = f"Epoch {len(self.epochs)}: a step of {step_ms(row):.2f} ms"
        pie = charts.pie(list(shares(row).values()), labels, title)
        charts.write(trainer.loggers, "watch/step_time/pie", pie, step)


def total(row: dict[str, float]) -> float:
    return sum(row[phase] for phase in PHASES)


def shares(row: dict[str, float]) -> dict[str, float]:
    """Of each phase, in [0, 1]."""
    return {phase: row[phase] / total(row) for phase in PHASES}


def step_ms(row: dict[str, float]) -> float:
    return 1e3 * total(row) / max(1, row["num_steps"])
