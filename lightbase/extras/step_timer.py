"""Where the time of a training goes: seconds of each phase of a step, and advice.

Lightning calls its profiler when an action begins and when it ends. `PhaseClock` is a
profiler that adds up the time between these calls; read it first. `StepTimer` is the
callback that puts the clock into the Trainer and shows the result. `advice` compares
the result with RULES. docs/tensorboard.md says what to do about each phase.
"""

import contextlib
import itertools
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning import Callback, LightningModule
from lightning.pytorch.profilers import PassThroughProfiler
from matplotlib.figure import Figure

from lightbase.core.curves import num_steps
from lightbase.core.data import BaseDataModule
from lightbase.core.errors import say
from lightbase.core.module import BaseModule
from lightbase.core.pictures import has_pictures, log_figure

PHASES = (
    *("data_loading", "transfer_transforms", "forward", "backward"),
    *("optimizer", "logging", "other"),
)
"""Forward includes the loss; optimizer includes its schedule and clipping; logging is
curves and the progress bar; other is Lightning's loop and other callbacks."""
# On a GPU the first calls of an epoch are timed, and then one call in 11, which counts
# for 11. The usual logging intervals, such as 50, are no multiples of 11, so log steps
# are timed neither always nor never.
NUM_FIRST = 100
SAMPLE_EVERY = 11
MAX_MARKS = 20_000  # CUDA events that may wait to be read
NOTHING = contextlib.nullcontext()
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
    "callback_logging": "logging",
}
"""The phase of an action, by the last part of the name that Lightning gives it."""
LOGGING = ("Curves", "ProgressBar")
"""Parts of the names of callbacks. The `on_train_batch_end` of these callbacks is
logging; that hook of other callbacks is in the phase other."""
EPOCH_BEGINS = "run_training_epoch"
CALL_BEGINS = "train_dataloader_next"
# The time after these actions is no part of a step. It lasts until the next training
# batch is fetched: no action encloses a whole validation.
STEPS_END = (
    "on_validation_model_zero_grad",
    "on_validation_start",
    "on_train_epoch_end",
)

# (part of the time, as `parts` returns it; share above which the rule applies; finding;
# names of remedies, as `remedies` returns them). The most urgent rule is the first one.
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
    ("idle", 0.4, "The GPU was idle {} of the time", ("batch", "compiling")),
    (
        "overhead",
        0.3,
        "Steps are small: {} of their time is overhead",
        ("batch", "compiling"),
    ),
    (
        "network",
        0.6,
        "The network itself took {} of a step",
        ("precision", "compiling"),
    ),
)


@dataclass
class Times:
    """How a training has spent its time.

    phases: {phase: seconds}, summed over all steps, for each phase in PHASES.
    rest: Seconds between the steps: validations, checkpoints, ends of epochs.
    num_steps: The number of steps, at least 1.
    """

    phases: dict[str, float]
    rest: float
    num_steps: int

    def total(self) -> float:
        """Return the seconds of all steps together, without the rest."""
        return sum(self.phases.values())

    def step_ms(self) -> float:
        """Return the mean time of a step in milliseconds."""
        return 1e3 * self.total() / self.num_steps

    def shares(self) -> dict[str, float]:
        """Return the share that each phase has of the steps: {phase: share}. The shares
        add up to 1."""
        total = self.total()
        return {phase: seconds / total for phase, seconds in self.phases.items()}


class Actions(dict[str, str]):
    """Maps the full name of an action to its short name if the clock needs the action,
    and to "" if not.

    The short name is the part after the last dot: "training_step" for
    "[Strategy]SingleDeviceStrategy.training_step". Answers are remembered, because
    Lightning passes some eighty names in each step.
    """

    def __missing__(self, name: str) -> str:
        """Find the short name of an action that has not been looked up before."""
        action = name.rpartition(".")[2]
        if action not in PHASE_OF and action not in (EPOCH_BEGINS, *STEPS_END):
            action = ""
        if action == "on_train_batch_end" and name.startswith("[Callback]"):
            is_logging = any(callback in name for callback in LOGGING)
            action = "callback_logging" if is_logging else ""
        self[name] = action
        return action


class PhaseClock(PassThroughProfiler):
    """A profiler of Lightning that measures how long each phase takes.

    The time of a training has two parts: the steps, and the rest between them, such as
    validations. A call is one pass of the training loop: it fetches a batch and runs
    the step. Every moment of a call belongs to one phase. An inner phase, such as
    backward inside of optimizer, interrupts the outer one.

    On a CPU each call is timed. On a GPU the CPU only queues work, so the phases are
    timed with CUDA events on the root device. Events cost time, so only the first
    NUM_FIRST calls of an epoch are timed, and then one call in SAMPLE_EVERY. The
    measured time of all steps is divided among the phases in proportion to the samples.

    device: The root device of the training.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.is_on_gpu = device.type == "cuda"
        self.actions = Actions()
        self.in_steps = False
        self.since = time.perf_counter()  # when this part, steps or rest, began
        self.step_seconds = 0.0
        self.rest_seconds = 0.0
        self.sampled = dict.fromkeys(PHASES, 0.0)  # seconds of the timed calls
        self.phases = ["other"]  # the current phases, the innermost one last
        self.num_calls = 0  # in this epoch
        self.is_timed = False  # whether the current call is timed
        self.weight = 1  # the number of calls for which the current one counts
        # (phase, when it began, weight); the phase "" ends a call. When it began is a
        # time in seconds, or a CUDA event on a GPU.
        self.marks: list[tuple[str, Any, int]] = []

    def times(self, num_steps: int) -> Times:
        """Return the times since the clock was made. The steps end here.

        num_steps: The number of steps since then, at least 1.
        """
        self._enter(in_steps=False)
        total = sum(self.sampled.values()) or 1.0
        scale = self.step_seconds / total
        phases = {phase: scale * seconds for phase, seconds in self.sampled.items()}
        return Times(phases, self.rest_seconds, num_steps)

    def profile(self, action_name: str) -> Any:
        """Return a context manager that calls `start` and `stop` around an action. For
        an action that the clock does not need, it does nothing."""
        if self.actions[action_name]:
            return super().profile(action_name)
        return NOTHING  # the context manager of the base class takes 2 µs

    def start(self, action_name: str) -> None:
        """Note that an action begins. It may end the steps, begin a call of the
        training loop, or begin a phase."""
        action = self.actions[action_name]
        if action in STEPS_END:
            self._enter(in_steps=False)
        elif action == EPOCH_BEGINS:
            self.num_calls = 0
            self._begin_call()
        elif action == CALL_BEGINS:
            self._begin_call()
        if self.in_steps and action in PHASE_OF:
            self.phases.append(PHASE_OF[action])
            self._mark(self.phases[-1])

    def stop(self, action_name: str) -> None:
        """Note that an action ends. The phase around it continues."""
        action = self.actions[action_name]
        if action in PHASE_OF and len(self.phases) > 1:
            self.phases.pop()
            # after the module's on_train_batch_end Lightning writes the curves, which
            # is no action
            is_end = action == "on_train_batch_end"
            self.phases[0] = "logging" if is_end else "other"
            self._mark(self.phases[-1])

    def _enter(self, in_steps: bool) -> None:
        """Add the time since the last change to the steps or to the rest, and begin the
        steps or the rest. On a GPU this waits until the queued work is done."""
        self._end_call()
        if self.is_on_gpu and self.in_steps:
            # the work that the GPU has not finished belongs to the steps
            torch.cuda.synchronize()
        self._read()
        now = time.perf_counter()
        if self.in_steps:
            self.step_seconds += now - self.since
        else:
            self.rest_seconds += now - self.since
        self.since = now
        self.in_steps = in_steps
        self.phases = ["other"]

    def _begin_call(self) -> None:
        """Begin a call of the training loop, and end the call before it. Decide whether
        it is timed."""
        self._end_call()
        if not self.in_steps:
            self._enter(in_steps=True)
        later = self.num_calls - NUM_FIRST  # below 0 in the first calls
        self.weight = SAMPLE_EVERY if self.is_on_gpu and later >= 0 else 1
        self.is_timed = len(self.marks) < MAX_MARKS and later % self.weight == 0
        self._mark("data_loading")  # before the first batch the loader's workers start
        self.num_calls += 1

    def _end_call(self) -> None:
        """End the current call. On a CPU its times are added up now; CUDA events have
        to wait until the GPU has reached them."""
        self._mark("")
        self.is_timed = False
        if not self.is_on_gpu:
            self._read()

    def _mark(self, phase: str) -> None:
        """Note that a phase begins now, if the current call is timed. "" ends the
        call."""
        if not self.is_timed:
            return
        now: Any = time.perf_counter()
        if self.is_on_gpu:
            now = torch.cuda.Event(enable_timing=True)
            now.record()
        self.marks.append((phase, now, self.weight))

    def _read(self) -> None:
        """Add the times between the marks to `sampled`, and drop the marks. The GPU
        must have reached their events."""
        for (phase, start, weight), (_, end, _) in itertools.pairwise(self.marks):
            if not phase:
                continue
            if self.is_on_gpu:
                seconds = start.elapsed_time(end) / 1e3
            else:
                seconds = end - start
            self.sampled[phase] += weight * seconds
        self.marks = []


class StepTimer(Callback):
    """Shows how the time of a training is divided among the phases of its steps. At the
    end of the training it logs a pie, and prints a table.

    Only the first process is timed. The timer is off if the Trainer has a profiler,
    because a Trainer can have only one.

    times: The times of the training. None before the end, or without a step.
    """

    def __init__(self) -> None:
        self.times: Times | None = None
        self.first_step = 0

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Put a clock into the Trainer, in place of the profiler that does nothing."""
        self.times = None
        self.first_step = num_steps(trainer)
        if not trainer.is_global_zero:
            return
        if isinstance(trainer.profiler, PassThroughProfiler):
            trainer.profiler = PhaseClock(trainer.strategy.root_device)
        else:
            say(f"Step timer: off beside the {type(trainer.profiler).__name__}")

    def on_train_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Read the clock, and give the pie to the loggers."""
        num = num_steps(trainer) - self.first_step
        if num and isinstance(trainer.profiler, PhaseClock):
            self.times = trainer.profiler.times(num)
            if has_pictures(trainer):
                log_figure(trainer, "watch/step_time/pie", pie(self.times))

    def on_fit_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Print a table with the share of each phase and its milliseconds per step. The
        progress bar is closed now, so the table is below it."""
        if self.times is None:
            return
        step_ms = self.times.step_ms()
        steps = f"{self.times.num_steps:,} steps of {step_ms:.2f} ms"
        rest = f"{self.times.rest:.1f} s of validations and checkpoints"
        say(f"Where the time of training went ({steps}, without {rest}):")
        for phase, share in self.times.shares().items():
            say(f"  {phase:<24}{share:>7.1%}{share * step_ms:>10.3f} ms")


def pie(times: Times) -> Figure:
    """Return a pie chart of the phases of a step. The labels are in a legend: labels at
    thin slices would overlap."""
    figure = Figure((3.5, 2.0), dpi=100, layout="constrained")
    figure.suptitle(f"a step of {times.step_ms():.2f} ms", fontsize=9)
    shares = times.shares()
    labels = [f"{phase} {share:.0%}" for phase, share in shares.items()]
    axes = figure.add_subplot()
    wedges, *_ = axes.pie([*shares.values()], startangle=90, counterclock=False)
    figure.legend(wedges, labels, loc="outside right center", fontsize=7)
    return figure


def advice(trainer: Any, busy_shares: Sequence[float] = ()) -> str:
    """Return a sentence after a training: what took the time, and what to try. It is ""
    if there is no StepTimer with times.

    busy_shares: For each GPU the share of the time in which it ran anything, in [0, 1].
        Without GPUs, or if they cannot be read, it is empty.
    """
    for callback in trainer.callbacks:
        if isinstance(callback, StepTimer) and callback.times:
            shares = parts(trainer, callback.times, busy_shares)
            return sentence(shares, remedies(trainer))
    return ""


def sentence(parts: Mapping[str, float], remedies: Mapping[str, str]) -> str:
    """Return the finding of the first rule in RULES that applies, with at most two
    remedies.

    parts: {part of the time: share in [0, 1]}, with all parts that RULES names.
    remedies: {name in RULES: text}. A remedy that is missing here is not possible for
        this training, and the sentence leaves it out.
    """
    for part, limit, finding, names in RULES:
        if parts[part] > limit:
            text = finding.format(f"{parts[part]:.0%}")
            possible = [remedies[name] for name in names if name in remedies]
            if possible:
                text += f"; try {', or '.join(possible[:2])}"
            return text
    return "No part of a step stands out; the time is well spent"


def parts(
    trainer: Any, times: Times, busy_shares: Sequence[float] = ()
) -> dict[str, float]:
    """Return the parts of the time that RULES names: {part: share in [0, 1]}.

    They are the phases, and three more. `network` is forward and backward. `idle` is
    the time in which the least busy GPU did nothing. `overhead` is the work of Python
    in steps of less than 3 ms on a CPU: there Python takes longer than the arithmetic.

    busy_shares: See `advice`.
    """
    parts = times.shares()
    parts["network"] = parts["forward"] + parts["backward"]
    parts["idle"] = 1 - min(busy_shares, default=1.0)
    parts["overhead"] = 0.0
    is_on_gpu = trainer.strategy.root_device.type == "cuda"
    if not is_on_gpu and times.step_ms() < 3:
        parts["overhead"] = parts["optimizer"] + parts["other"]
    return parts


def remedies(trainer: Any) -> dict[str, str]:
    """Return what can be tried in the next training: {name in RULES: text with a flag}.
    Only remedies that change something are included: no precision of 16 bits, for
    instance, if the training has it already."""
    model = trainer.lightning_module
    data = trainer.datamodule
    is_on_gpu = trainer.strategy.root_device.type == "cuda"
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
    if not is_on_gpu:
        return texts
    # GPUs older than NVIDIA's Ampere only emulate bf16
    has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    if has_bf16 and str(trainer.precision).startswith("32"):
        texts["precision"] = "half precision: --trainer.precision bf16-mixed"
    if isinstance(model, BaseModule) and model.compile_net is None:
        texts["compiling"] = "compiling: --model.compile_net inductor"
    return texts
