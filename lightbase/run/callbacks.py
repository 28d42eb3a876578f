"""The callbacks of a run, and the end of a run whose loss is NaN."""

from pathlib import Path
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder, ModelCheckpoint
from torch import Tensor
from torch.nn.parameter import is_lazy

from lightbase.cli.config import write_config
from lightbase.cli.training_cli import TrainingCLI
from lightbase.curves import MayMissSteps, RunFolder
from lightbase.data.batches import ResumableLoader
from lightbase.data.module import BaseDataModule
from lightbase.devices.processes import StopOnSignal
from lightbase.devices.steps import SeveralSteps
from lightbase.errors import UserError
from lightbase.folder import Run
from lightbase.module import has_named_optimizer
from lightbase.ranks import say
from lightbase.resume.checkpoints import RunCheckpoint
from lightbase.resume.state import PlateauFirst, RandomState, ResumedOptimizer, WholeEpochs
from lightbase.run.record import RunRecorder
from lightbase.run.selection import Selection
from lightbase.watch.device_monitor import DeviceMonitor
from lightbase.watch.figures import PredictionFigures
from lightbase.watch.parameters import GradientNorm, WeightHistograms
from lightbase.watch.progress import Patience
from lightbase.watch.step_timer import StepTimer

NEVER = 2**62  # a step that no training reaches
TRY = (
    "try a lower --model.lr, --trainer.gradient_clip_val 1 or --trainer.precision 32-true; "
    "--stop_on_nan false goes on all the same"
)


def make_callbacks(
    cli: TrainingCLI, root: Path, run: Run | None, selection: Selection | None
) -> list[Callback]:
    """Build the callbacks of a run in the order in which Lightning calls them. The Trainer adds
    those of the config. run: None in a fast_dev_run, and in all processes but the first."""
    config = cli.config
    check_callbacks(cli.config_init.trainer.callbacks)
    with cli.import_rules():
        values, text = write_config(cli.parser, config)
    callbacks: list[Callback] = [ResumedOptimizer(), WholeEpochs(), SayLimits(), RandomState()]
    callbacks.append(StopOnSignal())
    if config.stop_on_nan:
        callbacks.append(StopOnNan())
    callbacks.append(RunFolder(run.folder if run else None))
    callbacks += watching_callbacks(config)
    callbacks.append(RunRecorder(values, text, run))
    if config.patience is not None:
        callbacks.append(early_stopping(config, selection))
    if config.trainer.enable_checkpointing is not False:
        # Lightning gives all processes the folder of the first one
        callbacks += checkpoint_callbacks(config, run.checkpoints if run else root, selection)
    return callbacks


def watching_callbacks(config: Any) -> list[Callback]:
    """Build the callbacks that draw and measure, by their flags."""
    callbacks: list[Callback] = []
    if config.figures_every_n_epochs:
        callbacks.append(PredictionFigures(config.figures_every_n_epochs))
    if config.step_timer:
        callbacks.append(StepTimer(config.figures_every_n_epochs))
    if config.device_monitor:
        callbacks.append(DeviceMonitor())
    if config.gradient_norm:
        callbacks.append(GradientNorm(config.gradient_norm == "modules"))
    if config.histograms_every_n_epochs:
        callbacks.append(WeightHistograms(config.histograms_every_n_epochs))
    return callbacks


def early_stopping(config: Any, selection: Selection | None) -> Patience:
    """Build the callback of --patience. It stops by the metric that selects best.ckpt."""
    assert selection is not None  # choose_selection refuses --patience without a metric
    # Lightning 2.6 cannot choose where it validates by the clock
    is_by_clock = isinstance(config.trainer.val_check_interval, str)
    return Patience(
        selection.monitor,
        patience=int(config.patience),
        mode=selection.mode,
        check_on_train_epoch_end=False if is_by_clock else None,
    )


def checkpoint_callbacks(config: Any, folder: Path, selection: Selection | None) -> list[Callback]:
    """Build the callbacks that write checkpoints. best.ckpt is written before last.ckpt, which then
    holds the best value so far."""
    every_n_epochs: int | None = 1
    if selection:
        every_n_epochs = config.trainer.check_val_every_n_epoch
        if config.trainer.val_check_interval not in (None, 1.0):
            every_n_epochs = None  # after every validation, also in the middle of an epoch
    monitor, mode, or_last = selection or (None, "min", False)
    best = RunCheckpoint(
        folder, "best", monitor, mode, or_last, every_n_epochs=every_n_epochs or None
    )
    callbacks: list[Callback] = [PlateauFirst(), best]
    if config.keep_every_epoch:
        callbacks.append(RunCheckpoint(folder, "epoch_{epoch:03d}", keep_all=True))
    return [*callbacks, RunCheckpoint(folder, "last")]


def check_callbacks(callbacks: Any) -> None:
    """Raise UserError for a ModelCheckpoint of the config that would write over best.ckpt or
    last.ckpt, and for a finder, which trains with other settings than the run records.

    callbacks: the value of trainer.callbacks, an object, a list or None.
    """
    for callback in callbacks if isinstance(callbacks, list) else [callbacks]:
        if isinstance(callback, BatchSizeFinder | LearningRateFinder):
            what = f"trainer.callbacks: a {type(callback).__name__} changes a setting of the run"
            raise UserError(f"{what}; search before the run, with scripts/tune.py", 2)
        if not isinstance(callback, ModelCheckpoint) or callback.dirpath:
            continue
        if callback.save_last or callback.filename in ("best", "last"):
            what = "a ModelCheckpoint of best or last would write over the run's own"
            way_out = "give it a dirpath, or leave save_last and that filename out"
            raise UserError(f"trainer.callbacks: {what}\n{way_out}", 2)


class StopOnNan(MayMissSteps):
    """Stops all processes together when a loss of training or a weight is NaN or infinite, before a
    checkpoint of it is written.

    It checks the losses on log steps, when the host waits for the device anyway, and the weights
    before each checkpoint. It ignores a step that a GradScaler skips.
    """

    def __init__(self) -> None:
        self.losses: list[tuple[int, Tensor]] = []  # not checked yet, each with its step
        self.num_steps = 0  # before the next batch

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.num_steps = trainer.global_step

    def on_train_batch_end(
        self, trainer: Any, pl_module: LightningModule, outputs: Any, *_: Any
    ) -> None:  # type: ignore[override]
        before = self.num_steps
        losses: list[Any] = [(outputs or {}).get("loss")]
        if isinstance(trainer.strategy, SeveralSteps):
            losses = [*trainer.strategy.losses, *losses]
        for loss in losses:
            self.num_steps += 1
            # with manual optimization it may be anything
            if isinstance(loss, Tensor) and loss.numel() == 1:
                self.losses.append((self.num_steps, loss))
        self.num_steps = trainer.global_step  # less than counted here within an accumulation
        every = min(trainer.log_every_n_steps or 1000, 1000)
        if self.num_steps // every > before // every:
            self.check_losses(trainer)

    def check_losses(self, trainer: Trainer) -> None:
        """Check the losses since the last check, with one wait for the device."""
        first = NEVER
        if self.losses:
            is_finite = torch.hstack([loss for _, loss in self.losses]).isfinite().tolist()
            steps = zip(self.losses, is_finite, strict=True)
            first = min((step for (step, _), is_good in steps if not is_good), default=NEVER)
        self.losses = []
        stop_at(trainer, first, "the training loss is NaN or infinite at")

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.check_losses(trainer)

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self.check_losses(trainer)
        are_finite = [
            weight.isfinite().all()
            for weight in pl_module.parameters()
            if weight.requires_grad and not is_lazy(weight)
        ]
        is_bad = bool(are_finite) and not torch.stack(are_finite).all()
        step = trainer.global_step if is_bad else NEVER
        stop_at(trainer, step, "a weight is NaN or infinite after")


def stop_at(trainer: Trainer, step: int, what: str) -> None:
    """Raise UserError in all processes if one of them gives another step than NEVER. The message
    names the first of their steps."""
    steps = torch.tensor(step, device=trainer.strategy.root_device)
    first = int(trainer.strategy.reduce(steps, reduce_op="min"))
    if first < NEVER:
        where = f"{what} step {first}, in epoch {trainer.current_epoch + 1}"
        raise UserError(f"{where}: stopped; no checkpoint of it is written\n{TRY}")


class SayLimits(Callback):
    """Prints one line with what this run cannot do, because its module or its data is a plain one
    of Lightning. The line comes when training starts and the loaders are there."""

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:  # type: ignore[override]
        limits = []
        if not isinstance(trainer.train_dataloader, ResumableLoader):
            reason = "its training loader keeps no state"
            limits.append(f"a resumed run may end with other weights ({reason})")
            if trainer.world_size > 1:
                limits.append("an evaluation may count samples twice")
        if trainer.lr_scheduler_configs and not has_named_optimizer(pl_module):
            limits.append("a resume with another length does not stretch the schedule")
        draws = any(isinstance(callback, PredictionFigures) for callback in trainer.callbacks)
        if draws and not isinstance(trainer.datamodule, BaseDataModule):
            limits.append("no pictures")
        if limits:
            names = f"{type(pl_module).__name__} with {type(trainer.datamodule).__name__}"
            say(f"{names}: {'; '.join(limits)}")
