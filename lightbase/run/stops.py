"""The callbacks that end a training early: after a signal, without a loss, or when
patience is used up. `BetweenSteps` also writes last.ckpt in long epochs.

With several processes, all of them have to end at the same step: a process that waits
for another one would wait forever.
"""

import functools
import multiprocessing
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightbase.compat import (
    call_between_steps,
    has_epoch_means,
    leave_out_signals,
    quiet_lightning,
    started_processes,
)
from lightbase.config.errors import UserError, say
from lightbase.model.curves import is_log_step
from lightbase.model.monitor import Monitor
from lightbase.run.checkpoint import RunCheckpoint
from lightbase.run.record import recorder_of
from lightbase.run.signals import SIGNALS
from lightbase.run.state import can_resume


def in_any_process(trainer: Trainer, decision: Any) -> bool:
    """Return whether `decision` is true in one of the processes. All processes have to
    call this function."""
    return trainer.strategy.reduce_boolean_decision(decision, all=False)


class BetweenSteps(Callback):
    """Acts in each step: it stops the training where it has to stop, calls those that
    only watch, and writes last.ckpt in a long epoch.

    It stops at Ctrl-C, SIGTERM or SIGHUP, between two optimizer steps, where the state
    can be saved. `lightbase.run.signals` keeps the signal until then. There it also
    writes last.ckpt, every --checkpoint_minutes. It ends the run if training_step has
    returned None for all batches of an epoch: nothing was trained.

    A single process stops after the next optimizer step. Several processes exchange
    every 10 steps whether one of them got a signal, or finds last.ckpt due. A signal in
    the last step of an epoch or in a validation stops the training when the epoch is
    saved.

    Lightning 2.6 would also stop within an accumulation or a validation. With several
    processes it communicates in the signal handler and before every batch, and waits
    for the GPU each time.

    last: Writes last.ckpt. None if the run has no checkpoints.
    watching: Their `watch(trainer, outputs, batch, is_log_step)` is called after each
        batch.
    has_loss: Whether a batch of this epoch had a loss. None before the first batch, and
        true with manual optimization.
    """

    has_loss: bool | None = None

    every_n_steps = 10
    """How often several processes exchange whether one got a signal."""

    def __init__(
        self, last: RunCheckpoint | None = None, watching: Sequence[Any] = ()
    ) -> None:
        self.last = last
        self.watching = watching
        self.num_calls = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Keep signals from now on if this is a training. Leave out Lightning's log
        lines in a process of ddp_spawn."""
        if multiprocessing.parent_process() is not None:
            quiet_lightning()
            # In a forked process torch makes its pool of threads again. It aborts if
            # the threads of two GPUs do it at once in the first backward.
            torch.set_num_threads(torch.get_num_threads())
        leave_out_signals(trainer)
        SIGNALS.install()
        SIGNALS.waits = stage == "fit"  # a test has nothing to save
        self.exchange(trainer)  # in the final epoch

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        between_steps = functools.partial(self.between_steps, trainer)
        call_between_steps(trainer, between_steps, self.is_due)
        self.has_many = trainer.world_size > 1
        self.recorder = recorder_of(trainer)

    def on_train_epoch_start(
        self, trainer: Trainer, pl_module: LightningModule
    ) -> None:
        """Stop after the checkpoints of the previous epoch."""
        self.has_loss = None
        self.exchange(trainer)

    def on_train_batch_end(
        self, trainer: Any, pl_module: LightningModule, outputs: Any, batch: Any, _: int
    ) -> None:
        has_loss = self.has_loss or outputs or not pl_module.automatic_optimization
        self.has_loss = bool(has_loss)
        if 0 < trainer.max_steps <= trainer.global_step:
            trainer.should_stop = True  # so Lightning validates after the last step
        if not self.recorder.has_stepped:
            self.recorder.note_step(trainer)
        is_log = is_log_step(trainer)
        for callback in self.watching:
            callback.watch(trainer, outputs, batch, is_log)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not in_any_process(trainer, self.has_loss is not False):
            step = f"training_step of {type(pl_module).__name__}"
            batches = f"all batches of epoch {trainer.current_epoch + 1}"
            raise UserError(
                f"{step} returned None in {batches}: nothing was trained",
                "let it return the loss of the batch",
            )

    def is_due(self) -> bool:
        """Return whether there is something to do between this step and the next one,
        with several processes always: they count the steps."""
        is_due = self.last is not None and self.last.is_due()
        return self.has_many or is_due or SIGNALS.received > 0

    def between_steps(self, trainer: Trainer) -> None:
        """Stop or write last.ckpt between two optimizer steps, if the processes
        exchange here."""
        self.num_calls += 1  # of the steps before a validation there is none
        if not self.has_many or self.num_calls % self.every_n_steps == 0:
            is_due = self.exchange(trainer)
            if self.last and is_due:
                self.save_if_exact(trainer, self.last)

    def save_if_exact(self, trainer: Trainer, last: RunCheckpoint) -> None:
        """Write last.ckpt in the middle of an epoch. If a resume would not be exact,
        print a line, and leave last.ckpt to the ends of epochs from now on."""
        is_inexact = not can_resume(trainer) or has_epoch_means(trainer)
        if in_any_process(trainer, is_inexact):
            last.minutes = 0
            say(
                "last.ckpt is written at the end of an epoch only: a resume within it "
                "would lose the order of the samples, or a mean of self.log(..., "
                "on_epoch=True)"
            )
        elif last.save_if_possible(trainer):
            self.recorder.write_progress(trainer)

    def exchange(self, trainer: Trainer) -> bool:
        """Raise SIGTERMException if any process got a signal. Lightning saves the state
        then. Otherwise return whether last.ckpt is due in any process. All processes
        have to call this function."""
        is_due = self.last is not None and self.last.is_due()
        if dist.is_initialized():
            device = trainer.strategy.root_device
            values = torch.tensor([SIGNALS.received, is_due], device=device)
            dist.all_reduce(values, dist.ReduceOp.MAX)
            SIGNALS.received, is_due = values.tolist()
        if SIGNALS.received:
            raise SIGTERMException
        return bool(is_due)

    def teardown(
        self, trainer: Trainer, pl_module: LightningModule, stage: str
    ) -> None:
        """End the process group in a process of ddp_spawn, which ends here and not at
        the end of the script."""
        if multiprocessing.parent_process() is not None:
            end_processes(trainer)


def end_processes(trainer: Trainer) -> None:
    """End the process group of torch.distributed, and wait for the processes that this
    one has started."""
    if dist.is_initialized():
        # the first process holds torch's store, which the others use until here
        trainer.strategy.barrier()
        dist.destroy_process_group()
    # processes of ddp_spawn have ended already
    for process in started_processes(trainer):
        if status := process.wait():
            raise UserError(
                f"process {process.pid} of this run ended with status {status}"
            )


class Patience(EarlyStopping):
    """Early stopping that also holds in a resumed run. A run that early stopping has
    ended trains on only if the patience has been raised."""

    def __init__(self, monitor: Monitor, patience: int) -> None:
        super().__init__(
            monitor.name,
            patience=patience,
            mode=monitor.mode,
            check_on_train_epoch_end=False,
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state of the checkpoint, but keep the patience of this start."""
        super().load_state_dict({**state_dict, "patience": self.patience})

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        if self.wait_count >= self.patience:
            trainer.should_stop = True
