"""The callbacks of a run, and the ways in which a training ends early.

Read `make_callbacks` first, which lists the callbacks in their order. `StopWithoutLoss`
and `StopOnSignal` end a training. With several processes, all of them have to end at
the same step: a process that waits for another one would wait forever.
"""

import functools
import multiprocessing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    EarlyStopping,
    LearningRateFinder,
    ModelCheckpoint,
    ModelPruning,
    WeightAveraging,
)
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightbase.core.build import as_list
from lightbase.core.checkpoint import RunCheckpoint
from lightbase.core.compat import (
    batch_index,
    call_between_steps,
    follow_until_averaged,
    keeps_masks,
    leave_out_signals,
    quiet_lightning,
    started_processes,
)
from lightbase.core.curves import RunFolder
from lightbase.core.errors import UserError
from lightbase.core.folder import Run
from lightbase.core.monitor import Monitor
from lightbase.core.record import RunRecorder
from lightbase.core.signals import SIGNALS
from lightbase.core.spec import RunSpec, as_yaml, check_round_trip
from lightbase.core.state import (
    PlateauFirst,
    RandomState,
    ResumedOptimizer,
    WholeEpochs,
)


def make_callbacks(
    spec: RunSpec,
    folder: Path,
    run: Run | None,
    monitor: Monitor | None,
    extras: Sequence[Callback],
) -> list[Callback]:
    """Build the callbacks of a run, in the order in which Lightning calls them, and
    write config.yaml into the folder of a new run. `make_trainer` adds the callbacks of
    the config.

    folder: The folder of the checkpoints. Lightning gives all processes the folder of
        the first one.
    run: The run's folder, or None in a process that writes nothing.
    monitor: The metric that compares epochs, or None. Patience needs it.
    extras: Callbacks that watch the training and do not change it.
    Raises UserError if the config has a callback that does not go with a run, or if it
    cannot be read again from YAML.
    """
    config = spec.config
    check_callbacks(as_list(spec.trainer["callbacks"]))
    text = as_yaml(spec)
    values = check_round_trip(spec, text)
    if run and run.is_new:
        run.write("config.yaml", text)  # a run that is killed soon can start again
    callbacks: list[Callback] = [
        ResumedOptimizer(),
        WholeEpochs(),
        RandomState(),
        StopOnSignal(),
        StopWithoutLoss(),
        RunFolder(run.folder if run else None),
        RunRecorder(values, text, run),  # before the extras, which show its history
        *extras,
    ]
    if monitor and config.patience is not None:
        callbacks.append(
            Patience(
                monitor.name,
                patience=config.patience,
                mode=monitor.mode,
                check_on_train_epoch_end=False,
            )
        )
    if config.trainer.enable_checkpointing is not False:
        callbacks += make_checkpoints(config, folder, monitor)
    return callbacks


def make_checkpoints(
    config: Any, folder: Path, monitor: Monitor | None
) -> list[Callback]:
    """Build the callbacks that write the checkpoints of a run, in their order.

    With a monitor, best.ckpt may be written after each validation, also within an
    epoch. Without one, it is the newest epoch.

    folder, monitor: See `make_callbacks`.
    """
    every_n_epochs: int | None = 1
    if monitor:
        every_n_epochs = config.trainer.check_val_every_n_epoch
        if config.trainer.val_check_interval not in (None, 1.0):
            # after every validation, also in the middle of an epoch
            every_n_epochs = None
    name, mode = monitor or (None, "min")
    best = RunCheckpoint(folder, "best", name, mode, every_n_epochs=every_n_epochs)
    callbacks: list[Callback] = [PlateauFirst(), best]
    if config.keep_every_epoch:
        callbacks.append(RunCheckpoint(folder, "epoch_{epoch:03d}"))
    # after best.ckpt, so that it holds the best value so far
    return [*callbacks, RunCheckpoint(folder, "last")]


def check_callbacks(callbacks: list[Callback]) -> None:
    """Raise UserError for callbacks of the config that do not go with a run.

    A ModelCheckpoint may not write over best.ckpt or last.ckpt. A finder of a batch
    size or a learning rate would train with other settings than the run records.
    """
    for callback in callbacks:
        if isinstance(callback, BatchSizeFinder | LearningRateFinder):
            raise UserError(
                f"trainer.callbacks: a {type(callback).__name__} changes a setting of "
                "the run; search before the run, with scripts/tune.py",
                status=2,
            )
        if isinstance(callback, ModelPruning) and keeps_masks(callback):
            raise UserError(
                "trainer.callbacks: ModelPruning without make_pruning_permanent saves "
                "weights that no network takes",
                "leave make_pruning_permanent out",
                2,
            )
        if not isinstance(callback, ModelCheckpoint) or callback.dirpath:
            continue
        if callback.save_last or callback.filename in ("best", "last"):
            raise UserError(
                "trainer.callbacks: this ModelCheckpoint would write over best.ckpt or "
                "last.ckpt of the run",
                "give it a dirpath",
                2,
            )


class AverageFollows(Callback):
    """Before the first update of a WeightAveraging, lets validations, checkpoints and
    the end of the training take the weights that train. It has to be called before
    the WeightAveraging."""

    def follow(self, trainer: Any, pl_module: LightningModule, *_: Any) -> None:
        """Copy the weights, unless the first update comes at the end of this epoch:
        after the validation, which would measure other weights."""
        for callback in trainer.callbacks:
            is_average = isinstance(callback, WeightAveraging)
            if is_average and not callback.should_update(
                epoch_idx=trainer.current_epoch
            ):
                follow_until_averaged(callback, pl_module)

    on_validation_epoch_start = on_train_end = follow
    on_save_checkpoint = follow  # type: ignore[assignment]


class StopWithoutLoss(Callback):
    """Stops if training_step has returned None for all batches of an epoch, because
    nothing was trained. A model with manual optimization is not checked.

    If training_step returns None for some batches, Lightning skips these batches.
    """

    has_loss = True

    def on_train_epoch_start(
        self, trainer: Trainer, pl_module: LightningModule
    ) -> None:
        self.has_loss = not pl_module.automatic_optimization

    def on_train_batch_end(self, trainer: Any, _: Any, outputs: Any, *__: Any) -> None:
        self.has_loss = self.has_loss or bool(outputs)

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, _: Any
    ) -> None:
        """In the first epoch, write no checkpoint of weights that were not trained."""
        if trainer.current_epoch == 0:
            self.on_train_epoch_end(trainer, pl_module)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Raise UserError if no process has had a loss in this epoch."""
        if not in_any_process(trainer, self.has_loss):
            step = f"training_step of {type(pl_module).__name__}"
            batches = f"all batches of epoch {trainer.current_epoch + 1}"
            raise UserError(
                f"{step} returned None in {batches}: nothing was trained",
                "let it return the loss of the batch",
            )


def in_any_process(trainer: Trainer, decision: Any) -> bool:
    """Return whether `decision` is true in one of the processes. All processes have to
    call this function."""
    return trainer.strategy.reduce_boolean_decision(decision, all=False)


class StopOnSignal(Callback):
    """Stops at Ctrl-C, SIGTERM or SIGHUP, between two optimizer steps, where the state
    can be saved. `lightbase.core.signals` keeps the signal until then.

    A single process stops after the next optimizer step. Several processes exchange
    every 10 steps whether one of them got a signal. A signal in the last step of an
    epoch or in a validation stops the training when the epoch is saved.

    This replaces the signal handling of Lightning 2.6, which also stops between two
    batches of an accumulation and within a validation. With several processes,
    Lightning communicates in the signal handler, even while another exchange is
    running. It also communicates before every batch, and each time waits for the GPU.
    """

    every_n_steps = 10
    """How often several processes exchange whether one got a signal."""

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
        self.stop_if_received(trainer)  # in the last epoch

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        call_between_steps(trainer, functools.partial(self.between_steps, trainer))

    def on_train_epoch_start(
        self, trainer: Trainer, pl_module: LightningModule
    ) -> None:
        """Stop after the checkpoints of the last epoch."""
        self.stop_if_received(trainer)

    def between_steps(self, trainer: Trainer) -> None:
        """Stop between two optimizer steps, if the processes exchange signals here."""
        num_steps = (batch_index(trainer) + 1) // trainer.accumulate_grad_batches
        if trainer.world_size == 1 or num_steps % self.every_n_steps == 0:
            self.stop_if_received(trainer)

    def stop_if_received(self, trainer: Trainer) -> None:
        """Raise SIGTERMException if any process got a signal. All processes have to
        call this function. Lightning saves the state then."""
        if dist.is_initialized():
            signal = torch.tensor(SIGNALS.received, device=trainer.strategy.root_device)
            dist.all_reduce(signal, dist.ReduceOp.MAX)
            SIGNALS.received = int(signal.item())
        if SIGNALS.received:
            raise SIGTERMException

    def teardown(
        self, trainer: Trainer, pl_module: LightningModule, stage: str
    ) -> None:
        """End the process group in a process of ddp_spawn, which ends here and not at
        the end of the script."""
        if multiprocessing.parent_process() is not None:
            leave(trainer)


def leave(trainer: Trainer) -> None:
    """End the process group of torch.distributed, and wait for the processes that this
    one has started. Raises UserError if one of them has failed."""
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

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state of the checkpoint, but keep the patience of this start."""
        super().load_state_dict({**state_dict, "patience": self.patience})

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Stop at once if the patience was used up before the resume."""
        if self.wait_count >= self.patience:
            trainer.should_stop = True
