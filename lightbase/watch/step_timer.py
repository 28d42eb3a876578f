"""Where the time of a training goes: the share of each phase of a step, and advice.

Lightning calls its profiler when an action begins and when it ends. `PhaseClock` is a
profiler that adds up the time between these calls; read it first. `StepTimer` is the
callback that puts the clock into the Trainer and shows the result. `advice` compares
the result with RULES. docs/tensorboard.md says what to do about each phase.
"""

import contextlib
import itertools
import time
from collections.abc import Sequence
from typing import Any

import torch
from lightning import Callback, LightningModule
from lightning.pytorch.profilers import PassThroughProfiler
from matplotlib.figure import Figure

from lightbase.config.errors import say
from lightbase.config.files import as_table
from lightbase.model.curves import has_pictures, log_figure, num_steps

PHASES = (
    "data_loading",
    "transfer_transforms",
    "forward",
    "backward",
    "optimizer",
    "logging",
    "other",
)
"""Forward includes the loss; optimizer includes its schedule and clipping; logging is
curves, the progress bar and other callbacks at the end of a batch; other is the rest of
Lightning's loop."""

NUM_FIRST = 20
"""Calls after a pause that are all timed."""

WINDOW, PERIOD = 20, 180
"""Then so many calls are timed of so many. The usual logging intervals, such as 100,
are no divisors of the period, so a part of the log steps is timed."""

MAX_MARKS = 20_000  # that may wait to be read: on a GPU each one is a CUDA event

NOTHING = contextlib.nullcontext()

STEPS_END = "the steps end"

MEANINGS = {
    "run_training_epoch": "data_loading",  # until the first batch is fetched
    "train_dataloader_next": "data_loading",
    "on_before_batch_transfer": "transfer_transforms",
    "batch_to_device": "transfer_transforms",
    "training_step": "forward",
    "backward": "backward",
    "optimizer_step": "optimizer",
    "optimizer_zero_grad": "optimizer",
    "configure_gradient_clipping": "optimizer",
    "lr_scheduler_step": "optimizer",
    "replayed_step": "replayed_step",  # of CudaGraphs, beside the other phases
    "on_train_batch_end": "logging",
    "on_validation_model_zero_grad": STEPS_END,
    "on_validation_start": STEPS_END,
    "on_train_epoch_end": STEPS_END,
}
"""What an action means for the clock, by the last part of its name: its phase, or that
the time until the next training batch is fetched belongs to no step."""

# (part of the time, as `advice` computes it; share of the training above which the rule
# applies; the advice). The most urgent rule is the first one. Each change saves a fifth
# of the time or more: twice the batch size halves the overhead, for example.
RULES = (
    (
        "data_loading",
        0.2,
        "Steps waited for data {:.0%} of the training; try more --data.num_workers, or "
        "--data.resident true on a GPU",
    ),
    # before the phases of the host, whose shares on an idle GPU are those of Python
    (
        "idle",
        0.4,
        "The GPU was idle {:.0%} of the time: the network is small; try --cuda_graphs "
        "true, or a larger --data.batch_size",
    ),
    (
        "transfer_transforms",
        0.3,
        "Copies and transforms took {:.0%} of the training; try a larger "
        "--data.batch_size, or --data.resident true on a GPU",
    ),
    (
        "logging",
        0.2,
        "Logging and callbacks took {:.0%} of the training; try fewer callbacks, or a "
        "larger --trainer.log_every_n_steps",
    ),
    (
        "overhead",
        0.4,
        "The optimizer and Lightning's loop took {:.0%} of the training; try a larger "
        "--data.batch_size",
    ),
)


class Meanings(dict[str, str]):
    """{action: what it means for the clock, see MEANINGS, or ""}. An action has the
    name that Lightning gives it, such as
    "[Strategy]SingleDeviceStrategy.training_step"."""

    def __missing__(self, action: str) -> str:
        self[action] = MEANINGS.get(action.rpartition(".")[2], "")
        return self[action]


class PhaseClock(PassThroughProfiler):
    """A profiler of Lightning that measures how long each phase takes.

    A call is one pass of the training loop: it fetches a batch and runs the step. Every
    moment of a call belongs to one phase. An inner phase, such as backward inside of
    optimizer, interrupts the outer one. The time between calls, such as a validation,
    belongs to none.

    Only some calls are timed, see WINDOW. On a GPU the CPU only queues work. So the
    phases are timed with CUDA events; on MPS each phase of a timed call waits for the
    GPU.

    device: The root device of the training.
    seconds: {phase: its time so far}, estimated from the calls that were timed.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.meanings = Meanings()
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.sampled: dict[str, float] = {}  # of the windows, since the steps began
        self.phases = ["other"]  # the current phases, the innermost one last
        self.num_calls = self.num_sampled = 0  # since the steps began
        self.is_timed = False
        # (phase, when it began, whether the call is in a window); the phase "" ends a
        # call. When it began is a time in seconds, or a CUDA event on a GPU.
        self.marks: list[tuple[str, Any, bool]] = []

    def profile(self, action_name: str) -> Any:
        """Return a context manager that calls `start` and `stop` around an action. For
        an action that the clock does not need, it does nothing. In a call that is not
        timed, these are all actions but those that begin a call or end the steps."""
        phase = self.meanings[action_name]
        if phase and (self.is_timed or phase in (STEPS_END, "data_loading")):
            return super().profile(action_name)
        return NOTHING  # the context manager of the base class takes 2 µs

    def start(self, action_name: str) -> None:
        """Note that an action begins. It may end the steps, begin a call of the
        training loop, or begin a phase."""
        phase = self.meanings[action_name]
        if phase == STEPS_END:
            self.end_steps()
        elif phase == "data_loading":
            self._begin_call()
        elif phase:
            self.phases.append(phase)
            self._mark(phase)

    def stop(self, action_name: str) -> None:
        """Note that an action ends. The phase around it continues."""
        phase = self.meanings[action_name]
        # After on_train_batch_end Lightning writes the curves, which is no action. So
        # the phase logging lasts until the next call.
        if phase not in ("", STEPS_END, "logging"):
            self.phases = self.phases[:-1] or ["other"]
            self._mark(self.phases[-1])

    def end_steps(self) -> None:
        """End the steps, if they have not ended yet, and read the marks. On a GPU this
        waits until the queued work is done."""
        self._mark("")
        self._read()
        for phase, seconds in self.sampled.items():
            weight = (self.num_calls - NUM_FIRST) / self.num_sampled
            self.seconds[phase] = self.seconds.get(phase, 0.0) + weight * seconds
        self.sampled = {}
        self.num_calls = self.num_sampled = 0
        self.is_timed = False

    def _begin_call(self) -> None:
        """Begin a call of the training loop, and end the call before it. Decide whether
        it is timed."""
        self._mark("")
        if len(self.marks) > MAX_MARKS:
            self._read()
        later = self.num_calls - NUM_FIRST  # below 0 in the first calls
        self.is_timed = later % PERIOD < WINDOW or later < 0
        self.num_sampled += self.is_timed and later >= 0
        self.num_calls += 1
        self.phases = ["other", "data_loading"]
        self._mark("data_loading")

    def _mark(self, phase: str) -> None:
        """Note that a phase begins now, if the current call is timed. "" ends the
        call."""
        is_on_gpu = self.device.type == "cuda"
        if not self.is_timed or (
            is_on_gpu and torch.cuda.is_current_stream_capturing()
        ):
            return
        if self.device.type == "mps":
            torch.mps.synchronize()
        now: Any = time.perf_counter()
        if is_on_gpu:
            now = torch.cuda.Event(enable_timing=True)
            now.record()
        self.marks.append((phase, now, self.num_calls > NUM_FIRST))

    def _read(self) -> None:
        """Add up the times between the marks, and drop the marks."""
        is_on_gpu = self.device.type == "cuda"
        if is_on_gpu and self.marks:
            torch.cuda.synchronize()
        for (phase, start, is_sampled), (_, end, _) in itertools.pairwise(self.marks):
            if not phase:
                continue
            seconds = start.elapsed_time(end) / 1e3 if is_on_gpu else end - start
            total = self.sampled if is_sampled else self.seconds
            total[phase] = total.get(phase, 0.0) + seconds
        self.marks = []


class StepTimer(Callback):
    """Shows how the time of a training is divided among the phases of its steps. At the
    end of the training it logs a pie, and prints the shares.

    Only the first process is timed. The timer is off if the Trainer has a profiler,
    because a Trainer can have only one.

    has_table: Whether each phase has a line with its milliseconds. Otherwise all phases
        share two lines.
    shares: {phase: its share of a step}, for each phase in PHASES. It is empty before
        the end, and without a step.
    step_ms: The mean time of a step in milliseconds.
    of_training: The share of all steps in the time of the training. The rest are
        validations, pictures and checkpoints.
    """

    clock = PassThroughProfiler()  # does nothing
    shares: dict[str, float] = {}
    step_ms = 0.0
    of_training = 1.0

    def __init__(self, has_table: bool = False) -> None:
        self.has_table = has_table

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Put a clock into the Trainer, in place of the profiler that does nothing."""
        self.first_step = num_steps(trainer)
        self.began = time.perf_counter()
        if not isinstance(trainer.profiler, PassThroughProfiler):
            say(f"Step timer: off beside the {type(trainer.profiler).__name__}")
        elif trainer.is_global_zero:
            self.clock = trainer.profiler = PhaseClock(trainer.strategy.root_device)
        if not pl_module.automatic_optimization:  # there Lightning profiles no backward
            hooks: Any = vars(self)
            hooks["on_before_backward"] = lambda *_: self.clock.start("backward")
            hooks["on_after_backward"] = lambda *_: self.clock.stop("backward")

    def on_train_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Read the clock, and give the pie to the loggers."""
        num = num_steps(trainer) - self.first_step
        if num and isinstance(self.clock, PhaseClock):
            self.clock.end_steps()
            seconds = self.clock.seconds
            total = sum(seconds.values())
            self.step_ms = 1e3 * total / num
            self.of_training = total / (time.perf_counter() - self.began)
            self.shares = {phase: part / total for phase, part in seconds.items()}
            if has_pictures(trainer):
                log_figure(trainer, "watch/step_time/pie", self.pie())

    def on_fit_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Print the share of each phase. The progress bar is closed now, so the lines
        are below it."""
        if not self.shares:
            return
        say(f"Where the time of training went (steps of {self.step_ms:.2f} ms):")
        rows = [
            (phase, f"{share:.1%}", f"{share * self.step_ms:.3f} ms")
            for phase, share in self.shares.items()
        ]
        if not self.has_table:
            rows = [*zip(*rows, strict=True)][:2]
        say("\n".join(as_table(rows)))

    def pie(self) -> Figure:
        """Return a pie chart of the phases of a step. The labels are in a legend:
        labels at thin slices would overlap."""
        figure = Figure((3.5, 2.0), dpi=100, layout="constrained")
        figure.suptitle(f"a step of {self.step_ms:.2f} ms", fontsize=9)
        wedges, *_ = figure.add_subplot().pie([*self.shares.values()])
        labels = [f"{phase} {share:.0%}" for phase, share in self.shares.items()]
        figure.legend(wedges, labels, loc="outside right center", fontsize=7)
        return figure


def advice(trainer: Any, busy_shares: Sequence[float]) -> str:
    """Return a sentence after a training: what took the time, and what to try. It is
    the first rule in RULES that applies, or "" if none does or nothing was timed.

    Beside the phases, RULES name two parts of the time. `idle` is the time in which the
    least busy GPU did nothing. `overhead` is what each step costs, however few samples
    it has: optimizer and other.

    busy_shares: For each GPU the share of the time in which it ran anything, in [0, 1].
        Without GPUs, or if they cannot be read, it is empty.
    """
    shares = {}
    for callback in trainer.callbacks:
        if isinstance(callback, StepTimer):
            for phase, share in callback.shares.items():
                shares[phase] = share * callback.of_training
    if not shares:
        return ""
    parts = {
        **shares,
        "idle": 1 - min(busy_shares, default=1.0),
        "overhead": shares["optimizer"] + shares["other"],
    }
    for part, limit, text in RULES:
        if parts[part] > limit:
            return text.format(parts[part])
    return ""
