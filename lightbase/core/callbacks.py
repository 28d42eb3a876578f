"""The callbacks of a run, its end at a NaN or a signal, and how its processes end
together."""

import functools
import multiprocessing
import os
import threading
import time
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
)
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor
from torch.nn.parameter import is_lazy

from lightbase.core.checkpoint import RunCheckpoint
from lightbase.core.checks import Monitor
from lightbase.core.compat import (
    batch_index,
    quiet_lightning,
    replace_signal_exchange,
    started_processes,
    stop_after_batch,
)
from lightbase.core.curves import RunFolder
from lightbase.core.errors import STARTED_BY, UserError, rank
from lightbase.core.folder import Run
from lightbase.core.record import RunRecorder
from lightbase.core.signals import SIGNALS
from lightbase.core.spec import RunSpec, as_values, as_yaml, check_round_trip
from lightbase.core.state import (
    PlateauFirst,
    RandomState,
    ResumedOptimizer,
    WholeEpochs,
)

TRY = (
    "try a lower --model.lr, --trainer.gradient_clip_val 1 or --trainer.precision "
    "32-true; --stop_on_nan false goes on all the same"
)


def make_callbacks(
    spec: RunSpec,
    folder: Path,
    run: Run | None,
    monitor: Monitor | None,
    extras: Sequence[Callback],
) -> list[Callback]:
    """Build the callbacks of a run in the order in which Lightning calls them. The
    Trainer adds the callbacks of the config.

    folder: Where checkpoints are written; Lightning gives all processes the folder of
        the first one.
    run: None in a fast_dev_run, and in all processes but the first.
    extras: Callbacks that only watch.
    """
    config = spec.config
    check_callbacks(spec.trainer["callbacks"])
    text = as_yaml(spec)
    check_round_trip(spec, text)
    if run and run.is_new:
        run.write("config.yaml", text)  # a run that is killed soon can start again
    callbacks: list[Callback] = [
        ResumedOptimizer(),
        WholeEpochs(),
        RandomState(),
        StopOnSignal(),
        StopWithoutLoss(),
    ]
    if config.stop_on_nan:
        callbacks.append(StopOnNan())
    callbacks.append(RunFolder(run.folder if run else None))
    callbacks += extras
    callbacks.append(RunRecorder(as_values(spec), text, run))
    if config.patience is not None and monitor:
        callbacks.append(
            Patience(
                monitor.name,
                patience=int(config.patience),
                mode=monitor.mode,
                check_on_train_epoch_end=False,
            )
        )
    if config.trainer.enable_checkpointing is not False:
        callbacks += checkpoint_callbacks(config, folder, monitor)
    return callbacks


def checkpoint_callbacks(
    config: Any, folder: Path, monitor: Monitor | None
) -> list[Callback]:
    """Build the callbacks that write checkpoints. best.ckpt is written before
    last.ckpt, which then holds the best value so far."""
    every_n_epochs: int | None = 1
    if monitor:
        every_n_epochs = config.trainer.check_val_every_n_epoch
        if config.trainer.val_check_interval not in (None, 1.0):
            every_n_epochs = (
                None  # after every validation, also in the middle of an epoch
            )
    name, mode = monitor or (None, "min")
    best = RunCheckpoint(folder, "best", name, mode, every_n_epochs=every_n_epochs)
    callbacks: list[Callback] = [PlateauFirst(), best]
    if config.keep_every_epoch:
        callbacks.append(RunCheckpoint(folder, "epoch_{epoch:03d}", keep_all=True))
    return [*callbacks, RunCheckpoint(folder, "last")]


def check_callbacks(callbacks: Any) -> None:
    """Raise UserError for a ModelCheckpoint of the config that would write over
    best.ckpt or last.ckpt, and for a finder, which trains with other settings than the
    run records.

    callbacks: the value of trainer.callbacks, an object, a list or None.
    """
    for callback in callbacks if isinstance(callbacks, list) else [callbacks]:
        if isinstance(callback, BatchSizeFinder | LearningRateFinder):
            raise UserError(
                f"trainer.callbacks: a {type(callback).__name__} changes a setting of "
                "the run; search before the run, with scripts/tune.py",
                status=2,
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


class StopOnNan(Callback):
    """Stops all processes together when a loss of training or a weight is NaN or
    infinite, before a checkpoint of it is written.

    It checks the loss of log steps, and the weights at the end of each epoch and before
    each checkpoint. One process with a GPU does not wait for the loss: it looks at it
    after a later batch, when it has arrived.
    """

    def __init__(self) -> None:
        self.step = 0
        # whether the loss is finite, and when this value has come from the GPU
        self.is_finite = torch.tensor(True)
        self.arrival: torch.cuda.Event | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.step = trainer.global_step

    def on_train_batch_end(self, trainer: Any, _: Any, outputs: Any, *__: Any) -> None:
        every = min(trainer.log_every_n_steps or 1000, 1000)
        is_log_step = trainer.global_step // every > self.step // every
        self.step = trainer.global_step
        if is_log_step:
            self._check_loss(trainer, (outputs or {}).get("loss"))
        if self.arrival and self.arrival.query():
            self._check_arrived(trainer)

    def _check_loss(self, trainer: Trainer, loss: Any) -> None:
        is_finite = torch.tensor(True)
        if isinstance(loss, Tensor):  # with manual optimization it may be anything
            is_finite = loss.isfinite().all()
        if is_finite.is_cuda and trainer.world_size == 1:
            self.is_finite = is_finite.to("cpu", non_blocking=True)
            self.arrival = torch.cuda.current_stream(is_finite.device).record_event()
        else:
            stop_if(not is_finite, trainer, "the training loss is")

    def _check_arrived(self, trainer: Trainer) -> None:
        self.arrival = None
        stop_if(not self.is_finite, trainer, "the training loss is")

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        are_finite = [
            weight.isfinite().all()
            for weight in pl_module.parameters()
            if weight.requires_grad and not is_lazy(weight)
        ]
        is_bad = bool(are_finite) and not torch.stack(are_finite).all()
        stop_if(is_bad, trainer, "a weight is")
        if self.arrival:  # the weights were waited for, so the loss is there
            self._check_arrived(trainer)

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, _: Any
    ) -> None:
        self.on_train_epoch_end(trainer, pl_module)


class StopWithoutLoss(Callback):
    """Stops if training_step has returned None in each batch of an epoch: nothing was
    trained.

    None for single batches skips these batches, as in Lightning.
    """

    has_loss = True

    # not called where a run resumes within an epoch, whose batches before are unknown
    def on_train_epoch_start(
        self, trainer: Trainer, pl_module: LightningModule
    ) -> None:
        self.has_loss = not pl_module.automatic_optimization

    def on_train_batch_end(self, trainer: Any, _: Any, outputs: Any, *__: Any) -> None:
        self.has_loss = self.has_loss or bool(outputs)

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, _: Any
    ) -> None:
        # in the middle of the first epoch: of weights that nothing has trained
        if trainer.current_epoch == 0:
            self.on_train_epoch_end(trainer, pl_module)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.strategy.reduce_boolean_decision(self.has_loss, all=False):
            step = f"training_step of {type(pl_module).__name__}"
            batches = f"all batches of epoch {trainer.current_epoch + 1}"
            raise UserError(
                f"{step} returned None in {batches}: nothing was trained",
                "let it return the loss of the batch",
            )


def stop_if(is_bad: bool, trainer: Trainer, subject: str) -> None:
    """Raise UserError in all processes if `is_bad` in one of them.

    subject: The beginning of the message, such as "a weight is".
    """
    if trainer.strategy.reduce_boolean_decision(is_bad, all=False):
        where = f"step {trainer.global_step}, in epoch {trainer.current_epoch + 1}"
        raise UserError(
            f"{subject} NaN or infinite after {where}: stopped; no checkpoint of it is "
            "written",
            TRY,
        )


def end_with_parent(is_worker: bool = False) -> None:
    """Let a process that the first one, torchrun or (is_worker) a sweep has started end
    with it, even after kill -9."""

    def watch() -> None:
        while os.getppid() == STARTED_BY:
            time.sleep(0.5)
        os._exit(1)  # the main thread may be waiting for the process that has gone

    if is_worker or rank() > 0 or TorchElasticEnvironment.detect():
        threading.Thread(target=watch, daemon=True).start()


class StopOnSignal(Callback):
    """Stops at Ctrl-C, SIGTERM or SIGHUP, between two steps, where the state can be
    saved.

    Several processes stop before the same batch, whichever of them got the signal.

    It takes the place of Lightning 2.6's own handling, which also stops between two
    batches of an accumulation and within a validation. With several processes Lightning
    communicates in the signal handler, even while another exchange is running, and
    before every batch, which waits for the GPU.
    """

    every_n_steps = 10
    """How often several processes exchange whether one got a signal."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if multiprocessing.parent_process() is not None:  # of ddp_spawn
            quiet_lightning()
        if stage == "fit":
            SIGNALS.wait(exchanges=trainer.world_size > 1 and trainer.is_global_zero)

    def on_sanity_check_start(
        self, trainer: Trainer, pl_module: LightningModule
    ) -> None:
        SIGNALS.install()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        SIGNALS.install()
        replace_signal_exchange(
            trainer, functools.partial(self._stop_together, trainer)
        )

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, *_: Any
    ) -> None:
        # After the last batch of an epoch the validation comes first: Lightning cannot
        # continue with a validation.
        if not SIGNALS.received or trainer.world_size > 1 or trainer.is_last_batch:
            return
        if (batch_index(trainer) + 1) % trainer.accumulate_grad_batches == 0:
            stop_after_batch(trainer)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stop_if_received(trainer)
        SIGNALS.waits = False  # there is nothing to save
        SIGNALS.install()

    def teardown(
        self, trainer: Trainer, pl_module: LightningModule, stage: str
    ) -> None:
        # a process of ddp_spawn ends here and not at the end of the script
        if multiprocessing.parent_process() is not None:
            leave(trainer)

    def _stop_together(self, trainer: Trainer) -> None:
        every_n_batches = self.every_n_steps * trainer.accumulate_grad_batches
        if (batch_index(trainer) + 1) % every_n_batches == 0:
            self._stop_if_received(trainer)

    def _stop_if_received(self, trainer: Trainer) -> None:
        number = torch.tensor(SIGNALS.received, device=trainer.strategy.root_device)
        if dist.is_initialized():
            dist.all_reduce(number, dist.ReduceOp.MAX)
        SIGNALS.received = int(number.item())
        if SIGNALS.received:
            raise SIGTERMException


def leave(trainer: Trainer) -> None:
    """End the process group; raise UserError if a process that this one started has
    failed."""
    if dist.is_initialized():
        # the first one holds the store that the others still use
        trainer.strategy.barrier()
        dist.destroy_process_group()
    for process in started_processes(trainer):  # those of ddp_spawn have ended already
        if status := process.wait():
            raise UserError(
                f"process {process.pid} of this run ended with status {status}"
            )


class Patience(EarlyStopping):
    """Early stopping that holds in a resumed run: a stopped run does not start again
    unless the patience has been raised."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict({**state_dict, "patience": self.patience})

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        if self.wait_count >= self.patience:
            trainer.should_stop = True
