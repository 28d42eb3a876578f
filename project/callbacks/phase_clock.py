"""The time of a training, divided among the phases of its steps."""

import itertools
import time
from collections import deque
from typing import Any

import torch
from lightning.pytorch.profilers import Profiler

PHASES = {
    "data_loading": "data loading",
    "transfer_transforms": "transfer and transforms",
    "forward": "forward",
    "backward": "backward",
    "optimizer": "optimiser",
    "logging": "logging",
    "other": "other",
}
"""A name for curves, a name for people. Forward holds the loss and its sums, the optimiser its schedule and clipping,
logging the progress bar; other is Lightning's loop, the other callbacks, and what lies between epochs: checkpoints."""

# the last part of what Lightning tells its profiler, then the names that steps.py and datamodule.py use
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
    "transforms": "transfer_transforms",
    "forward": "forward",
    "logging": "logging",
    "loop": "other",
}
# what goes on when these are over, until the next is heard of: Lightning writes the curves then
PHASE_AFTER = {"train_dataloader_next": "other", "on_train_batch_end": "logging"}
# what begins with these; Lightning has no action around a whole validation
STATE_OF = {
    "run_training_epoch": "steps",
    "train_dataloader_next": "steps",
    "on_validation_model_zero_grad": "validation",
    "on_validation_start": "validation",
    "on_train_epoch_end": "between",
}
SAMPLE_EVERY = 11
"""On a GPU one of so many calls of the training loop is timed: no divisor of the usual logging intervals."""

Action = tuple[str | None, str | None, str | None]


class PhaseClock(Profiler):
    """A profiler, told by Lightning of each action that begins or ends, that measures each phase without the phases
    within it. Every moment belongs to one phase, so the phases add up to the whole. Validations are left out.

    On a CPU every call of the training loop is timed. On a GPU, where the CPU only hands out work, one of 11 calls is,
    by CUDA events on the stream of the root device, which are read when they have passed: nothing waits for the GPU
    but the end of an epoch. A phase then takes as long as the GPU is busy with it or waits for it; loading that happens
    behind the GPU's back takes nothing. The time of all steps is shared out by these samples.
    """

    def __init__(self) -> None:
        super().__init__()
        self.actions: dict[str, Action | None] = {}
        """By name: the phase that it begins, the state, the phase that follows it; None for those of no interest."""
        self.is_running = False

    def begin(self, device: torch.device) -> None:
        """Start, before the first epoch on this root device."""
        self.on_gpu = device.type == "cuda"
        self.every = SAMPLE_EVERY if self.on_gpu else 1
        self.num_calls = 0
        self.phase = "other"
        self.outer: list[str] = []
        """Phases that go on when those within them end."""
        self.marks: list[tuple[str, Any]] | None = None
        """Of the call that is being timed: what began, and when."""
        self.unread: deque[list[tuple[str, Any]]] = deque()
        self.state, self.since = "between", time.perf_counter()
        self._clear()
        self.is_running = True

    def end(self) -> None:
        self.is_running = False

    def take(self) -> dict[str, float]:
        """Seconds since the last call, of each phase and of "between" epochs (part of "other") and "validation"."""
        self._turn(self.state)
        self._read(wait=True)
        sampled = sum(self.sampled.values())
        share = {phase: self.sampled[phase] / sampled if sampled else float(phase == "other") for phase in PHASES}
        seconds = {phase: share[phase] * self.states["steps"] for phase in PHASES}
        seconds["other"] += self.states["between"]
        seconds |= {state: self.states[state] for state in ("between", "validation")}
        self._clear()
        return seconds

    # the next two are called some eighty times a step

    def start(self, action_name: str) -> None:
        try:
            action = self.actions[action_name]
        except KeyError:
            action = self.actions[action_name] = learn(action_name)
        if action is None or not self.is_running:
            return
        phase, state, _ = action
        if state is not None:
            if state != self.state:
                self._turn(state)
            elif phase is not None:  # the next batch
                self._begin_call()
        if phase is not None and self.state == "steps":
            self.outer.append(self.phase)
            self._switch(phase)

    def stop(self, action_name: str) -> None:
        action = self.actions.get(action_name)
        if action is None or not self.is_running:
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
        self._end_call()
        if state == "steps":
            self.outer = []
            self.phase = "data_loading"  # the loader's workers start
            self._begin_call()

    def _begin_call(self) -> None:
        self._end_call()
        # not the first calls on a GPU: there, libraries set themselves up
        if self.num_calls % self.every == min(2, self.every - 1):
            self.marks = [(self.phase, self._now())]
        self.num_calls += 1

    def _end_call(self) -> None:
        if self.marks is not None:
            self._switch(self.phase)
            self.unread.append(self.marks)
            self.marks = None
            self._read(wait=False)

    def _switch(self, phase: str) -> None:
        self.phase = phase
        if self.marks is not None:
            self.marks.append((phase, self._now()))

    def _now(self) -> Any:
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _read(self, wait: bool) -> None:
        while self.unread:
            if self.on_gpu:
                last = self.unread[0][-1][1]
                if wait:
                    last.synchronize()
                elif not last.query():
                    return
            for (phase, start), (_, end) in itertools.pairwise(self.unread.popleft()):
                self.sampled[phase] += start.elapsed_time(end) / 1e3 if self.on_gpu else end - start

    def _clear(self) -> None:
        self.states = {"steps": 0.0, "between": 0.0, "validation": 0.0}
        self.sampled = dict.fromkeys(PHASES, 0.0)


def learn(name: str) -> Action | None:
    """What an action of Lightning's means, by its name, such as "[Strategy]SingleDeviceStrategy.training_step"."""
    word = name.rpartition(".")[2]
    is_callback = name.startswith("[Callback]")
    counts = not is_callback or (word == "on_train_batch_end" and "ProgressBar" in name)
    phase, state = PHASE_OF.get(word) if counts else None, STATE_OF.get(word)
    return (phase, state, None if is_callback else PHASE_AFTER.get(word)) if phase or state else None
