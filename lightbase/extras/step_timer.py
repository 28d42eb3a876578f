"""The time of a training, divided among the phases of its steps, and the advice from
it."""

import contextlib
import functools
import itertools
import os
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from lightning import Callback, LightningModule
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import SingleDeviceStrategy

from lightbase.core.curves import newest_step, num_steps
from lightbase.core.data import BaseDataModule
from lightbase.core.errors import say
from lightbase.core.module import BaseModule
from lightbase.extras import figures
from lightbase.extras.data_parallel import obstacle
from lightbase.extras.device_monitor import DeviceMonitor

PHASES = (
    *("data_loading", "transfer_transforms", "forward", "backward"),
    *("optimizer", "logging", "other"),
)
"""Forward includes the loss and the sums for the curves; optimizer includes its
schedule and clipping; logging is curves and the progress bar; other is Lightning's loop
and other callbacks."""
# On a GPU the first calls of an epoch are timed, and then one call in 11, which counts
# for 11. 11 divides none of the usual logging intervals.
NUM_FIRST, SAMPLE_EVERY = 100, 11
MAX_MARKS = 20_000  # on a GPU, in an epoch
NOTHING = contextlib.nullcontext()
# by the last part of the name that Lightning's profiler gets
PHASE_OF = {
    "train_dataloader_next": "data_loading",
    "on_before_batch_transfer": "transfer_transforms",
    "batch_to_device": "transfer_transforms",
    "training_step": "forward",
    "backward": "backward",
    "optimizer_step": "optimizer",
    "optimizer_zero_grad": "optimizer",
    "configure_gradient_clipping": "optimizer",
    "lr_scheduler_step": "optimizer",
    "on_train_batch_end": "logging",
    "ProgressBar": "logging",
    # from lightbase/extras/data_parallel.py
    "transforms": "transfer_transforms",
    "forward": "forward",
    "logging": "logging",
    "loop": "other",
}
# No action encloses a whole validation: the next batch of the training ends it.
BEGIN_STEPS = ("run_training_epoch", "train_dataloader_next")
END_STEPS = (
    "on_validation_model_zero_grad",
    "on_validation_start",
    "on_train_epoch_end",
)

# In small steps Python and kernel launches take longer than the arithmetic.
FOR_SMALL = ("steps", "batch", "compiling")
RULES = (
    (
        "data_loading",
        0.2,
        "Steps waited for data {} of their time",
        ("resident", "workers"),
    ),
    (
        "transfer_transforms",
        0.3,
        "Copies and transforms took {} of a step",
        ("resident", "batch"),
    ),
    ("logging", 0.1, "Logging and progress bar took {} of a step", ("logging",)),
    ("idle", 0.4, "The GPU was idle {} of the time", FOR_SMALL),
    ("overhead", 0.3, "Steps are small: {} of their time is overhead", FOR_SMALL),
    (
        "network",
        0.6,
        "The network itself took {} of a step",
        ("precision", "compiling"),
    ),
)
"""(part of the time, share above which the rule applies, finding, names of remedies).
The first rule that applies is the most urgent one."""


@functools.cache
def action_of(name: str) -> str | None:
    """An action of the tables above; None for all others. name: as Lightning gives it,
    such as "[Strategy]SingleDeviceStrategy.training_step"."""
    word = name.rpartition(".")[2]
    if word == "on_train_batch_end" and name.startswith("[Callback]"):
        return "ProgressBar" if "ProgressBar" in name else None
    return word if word in (*PHASE_OF, *BEGIN_STEPS, *END_STEPS) else None


class PhaseClock(PassThroughProfiler):
    """A profiler, which Lightning calls when an action begins or ends, that times the
    phases.

    Every moment of the steps belongs to one phase: an inner phase interrupts the outer
    one. Validations and the time between epochs are the rest. On a CPU each call of the
    training loop is timed. On a GPU, where the CPU only queues work, calls are timed by
    CUDA events on the stream of
    the root device: the first 100 of an epoch, then one in 11. The time of all steps is
    divided in proportion to these samples.
    """

    def __init__(self) -> None:
        super().__init__()
        self.begin(torch.device("cpu"))

    def begin(self, device: torch.device) -> None:
        """Start again from zero. device: the root device of the training."""
        self.is_on_gpu = device.type == "cuda"
        self.in_steps, self.since = False, time.perf_counter()
        self.seconds = {"steps": 0.0, "rest": 0.0}  # by the wall clock
        self.phases = ["other"]  # the inner ones last
        self.num_calls = 0  # in this epoch
        self.is_timed, self.weight = False, 1  # this call, and for how many it counts
        # (phase, time at which it began, weight) in timed calls; a phase "" ends a call
        self.marks: list[tuple[str, Any, int]] = []
        self.phase_seconds = dict.fromkeys(PHASES, 0.0)  # of the timed calls

    def take(self) -> dict[str, float]:
        """Seconds since the last call of take: of each phase, and of the rest."""
        self._enter(False)
        num_sampled = sum(self.phase_seconds.values())
        if not num_sampled:
            self.phase_seconds["other"] = num_sampled = 1.0
        scale = self.seconds["steps"] / num_sampled
        seconds = {phase: scale * value for phase, value in self.phase_seconds.items()}
        seconds["rest"] = self.seconds["rest"]
        self.seconds = dict.fromkeys(self.seconds, 0.0)
        self.phase_seconds = dict.fromkeys(PHASES, 0.0)
        self.num_calls = 0
        return seconds

    # Lightning calls the next three some eighty times a step

    def profile(self, action_name: str) -> Any:
        # a generator takes 2 µs
        return (
            NOTHING if action_of(action_name) is None else super().profile(action_name)
        )

    def start(self, action_name: str) -> None:
        action = action_of(action_name)
        if action in END_STEPS:
            self._enter(False)
        elif action in BEGIN_STEPS:
            self._begin_call()
        if self.in_steps and action in PHASE_OF:
            self.phases.append(PHASE_OF[action])
            self._mark(self.phases[-1])

    def stop(self, action_name: str) -> None:
        action = action_of(action_name)
        if action in PHASE_OF and len(self.phases) > 1:
            self.phases.pop()
            # after this hook Lightning writes the curves
            self.phases[0] = "logging" if action == "on_train_batch_end" else "other"
            self._mark(self.phases[-1])

    def _enter(self, in_steps: bool) -> None:
        """Begin a part of the steps or of the rest."""
        self._end_call()
        if self.is_on_gpu and self.in_steps:
            # what the GPU still has to do belongs to the steps
            torch.cuda.synchronize()
        self._read()
        now = time.perf_counter()
        self.seconds["steps" if self.in_steps else "rest"] += now - self.since
        self.in_steps, self.since, self.phases = in_steps, now, ["other"]

    def _begin_call(self) -> None:
        """Begin a call of the training loop, which ends the call before it."""
        self._end_call()
        if not self.in_steps:
            self._enter(True)
        later = self.num_calls - NUM_FIRST
        self.weight = SAMPLE_EVERY if self.is_on_gpu and later >= 0 else 1
        self.is_timed = len(self.marks) < MAX_MARKS and later % self.weight == 0
        self._mark("data_loading")  # before the first batch the loader's workers start
        self.num_calls += 1

    def _end_call(self) -> None:
        self._mark("")
        self.is_timed = False
        if not self.is_on_gpu:
            self._read()

    def _read(self) -> None:
        """Add up the marks. On a GPU their events must be over."""
        for (phase, start, weight), (_, end, _) in itertools.pairwise(self.marks):
            if phase:
                seconds = (
                    start.elapsed_time(end) / 1e3 if self.is_on_gpu else end - start
                )
                self.phase_seconds[phase] += weight * seconds
        self.marks = []

    def _mark(self, phase: str) -> None:
        if self.is_timed:
            now: Any = time.perf_counter()
            if self.is_on_gpu:
                now = torch.cuda.Event(enable_timing=True)
                now.record()
            self.marks.append((phase, now, self.weight))


class StepTimer(Callback):
    """Shows how the time of a training is divided among the phases of its steps: a pie
    and a table at its end.

    It runs on the first process, as the Trainer's profiler; if the Trainer has another
    profiler, it is off.
    """

    def __init__(self) -> None:
        self.clock = PhaseClock()
        # since the start: the seconds of `PhaseClock.take`, and `num_steps`
        self.totals: Any = Counter()
        self.first_step = 0

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        self.totals.clear()
        self.first_step = num_steps(trainer)
        if not trainer.is_global_zero:
            return
        if isinstance(trainer.profiler, PassThroughProfiler):
            trainer.profiler = self.clock
            self.clock.begin(trainer.strategy.root_device)
        else:
            say(f"Step timer: off beside the {type(trainer.profiler).__name__}")

    def on_train_epoch_end(self, trainer: Any, pl_module: LightningModule) -> None:
        if trainer.profiler is self.clock:
            self.totals.update(self.clock.take())
            self.totals["num_steps"] = num_steps(trainer) - self.first_step

    def on_train_end(self, trainer: Any, pl_module: LightningModule) -> None:
        if self.totals:
            self.totals["rest"] += self.clock.take()["rest"]  # the last checkpoints
        row = self.sum()
        if row and figures.has_pictures(trainer.loggers):
            parts = shares(row)
            labels = [f"{phase} {share:.0%}" for phase, share in parts.items()]
            pie = figures.pie(
                list(parts.values()), labels, f"a step of {step_ms(row):.2f} ms"
            )
            figures.log_figure(
                trainer.loggers, "watch/step_time/pie", pie, newest_step(trainer)
            )

    def on_fit_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Print a table, below the bar, which is closed now: share and milliseconds of
        a step."""
        row = self.sum()
        if not row:
            return
        steps = f"{row['num_steps']:,} steps of {step_ms(row):.2f} ms"
        rest = f"{row['rest']:.1f} s of validations and checkpoints"
        say(f"Where the time of training went ({steps}, without {rest}):")
        for phase, share in shares(row).items():
            say(f"  {phase:<24}{share:>7.1%}{share * step_ms(row):>10.3f} ms")

    def sum(self) -> dict[str, float]:
        """Of all epochs since the start; empty without a step."""
        return dict(self.totals) if self.totals["num_steps"] else {}


def total(row: dict[str, float]) -> float:
    """Seconds of all phases."""
    return sum(row[phase] for phase in PHASES)


def shares(row: dict[str, float]) -> dict[str, float]:
    """The share of each phase, in [0, 1]."""
    return {phase: row[phase] / total(row) for phase in PHASES}


def step_ms(row: dict[str, float]) -> float:
    return 1e3 * total(row) / max(1, row["num_steps"])


def advice(trainer: Any) -> str:
    """A finding and what to try, after a training; empty if no step timer saw a
    step."""
    timers = [
        callback for callback in trainer.callbacks if isinstance(callback, StepTimer)
    ]
    seconds = timers[0].sum() if timers else {}
    return sentence(parts(trainer, seconds), remedies(trainer)) if seconds else ""


def sentence(parts: Mapping[str, float], remedies: Mapping[str, str]) -> str:
    for part, limit, finding, names in RULES:
        if parts[part] > limit:
            possible = [remedies[name] for name in names if name in remedies][:2]
            way_out = f"; try {', or '.join(possible)}" if possible else ""
            return finding.format(f"{parts[part]:.0%}") + way_out
    return "No part of a step stands out; the time is well spent"


def parts(trainer: Any, seconds: dict[str, float]) -> dict[str, float]:
    """The parts of the time that RULES names, as shares in [0, 1]."""
    parts = shares(seconds)
    parts["network"] = parts["forward"] + parts["backward"]
    is_on_gpu = trainer.strategy.root_device.type == "cuda"
    monitors = [
        callback
        for callback in trainer.callbacks
        if isinstance(callback, DeviceMonitor)
    ]
    busy = [share for monitor in monitors for share in monitor.busy_shares()]
    parts["idle"] = 1 - min(busy, default=1.0)
    is_small = not is_on_gpu and step_ms(seconds) < 3
    parts["overhead"] = parts["optimizer"] + parts["other"] if is_small else 0.0
    return parts


def remedies(trainer: Any) -> dict[str, str]:
    """What can be tried in a next training, with its flags, by name."""
    model, data, device = (
        trainer.lightning_module,
        trainer.datamodule,
        trainer.strategy.root_device,
    )
    is_on_gpu = device.type == "cuda"
    every = 10 * trainer.log_every_n_steps
    texts = {"logging": f"logging less often: --trainer.log_every_n_steps {every}"}
    if isinstance(data, BaseDataModule):
        texts["batch"] = f"a larger batch: --data.batch_size {4 * data.batch_size}"
        if is_on_gpu and data.resident is False:
            texts["resident"] = "data kept on the GPU: --data.resident true"
        num_cores = (os.cpu_count() or 1) // trainer.num_devices
        num_workers = min(max(2, 2 * data.num_workers), num_cores)
        if not data.on_gpu and num_workers > data.num_workers:
            texts["workers"] = f"more workers: --data.num_workers {num_workers}"
    if type(trainer.strategy) is SingleDeviceStrategy and obstacle(trainer) is None:
        texts["steps"] = "several steps per call: --steps_per_execution 20"
    # GPUs older than NVIDIA's Ampere, and most CPUs, only emulate bf16
    has_bf16 = is_on_gpu and torch.cuda.is_bf16_supported(including_emulation=False)
    if has_bf16 and str(trainer.precision).startswith("32"):
        texts["precision"] = "half precision: --trainer.precision bf16-mixed"
    if is_on_gpu and isinstance(model, BaseModule) and model.compile_net is None:
        texts["compiling"] = "compiling: --model.compile_net inductor"
    return texts
