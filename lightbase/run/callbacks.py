"""A loss that is no number ends a run, before its weights are kept."""

from pathlib import Path
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.utils.data import DistributedSampler

from lightbase.cli.config import write_config
from lightbase.cli.training_cli import TrainingCLI
from lightbase.curves import MayMissSteps, RunFolder
from lightbase.data.batches import ResumableLoader
from lightbase.data.module import BaseDataModule
from lightbase.devices.processes import StopOnSignal
from lightbase.devices.steps import SeveralSteps
from lightbase.errors import UserError
from lightbase.folder import Run
from lightbase.ranks import say
from lightbase.resume.checkpoints import RunCheckpoint
from lightbase.resume.state import (
    PlateauFirst,
    RandomState,
    ResumedOptimizer,
    WholeEpochs,
    has_named_optimizer,
)
from lightbase.run.record import RunRecorder
from lightbase.run.selection import Selection
from lightbase.watch.device_monitor import DeviceMonitor
from lightbase.watch.figures import PredictionFigures, has_pictures
from lightbase.watch.parameters import GradientNorm, WeightHistograms
from lightbase.watch.progress import Patience
from lightbase.watch.step_timer import StepTimer

NEVER = 2**62


class StopOnNan(MayMissSteps):
    """Stops where a loss or a weight is NaN or infinite: all processes together, before a
    checkpoint of it is written.

    It looks at the losses on log steps, when the device is waited for anyway, at those of a
    validation, and at the weights before each checkpoint. That a GradScaler skips a step is no
    reason.
    """

    def __init__(self) -> None:
        self.losses: list[tuple[int, Tensor]] = []  # since the last look, each with its step
        self.num_batches = 0
        self.num_steps = 0  # before the next batch

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.num_steps = trainer.global_step

    def on_train_batch_end(
        self, trainer: Any, pl_module: LightningModule, outputs: Any, *_: Any
    ) -> None:  # type: ignore[override]
        before = self.num_steps
        losses: list[Any] = (
            trainer.strategy.losses if isinstance(trainer.strategy, SeveralSteps) else []
        )
        for loss in [*losses, (outputs or {}).get("loss")]:
            self.num_steps += 1
            if (
                isinstance(loss, Tensor) and loss.numel() == 1
            ):  # with manual optimisation it may be anything
                self.losses.append((self.num_steps, loss))
        self.num_batches += len(losses) + 1
        self.num_steps = trainer.global_step  # less in the middle of an accumulation
        every = min(trainer.log_every_n_steps or 1000, 1000)
        if self.num_steps // every > before // every or self.num_batches >= 1000:
            self.look_at_losses(trainer)

    def look_at_losses(self, trainer: Trainer) -> None:
        steps, losses = [step for step, _ in self.losses], [loss for _, loss in self.losses]
        self.losses, self.num_batches = [], 0
        finite = torch.hstack(losses).isfinite().tolist() if losses else []
        bad = [step for step, is_finite in zip(steps, finite, strict=True) if not is_finite]
        stop_at(trainer, bad, "the training loss is NaN or infinite at")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self.look_at_losses(trainer)
            known = trainer.callback_metrics.items()
            losses = [
                value for name, value in known if "loss" in name and not name.startswith("train")
            ]
            is_bad = any(not value.isfinite().all() for value in losses)
            stop_at(
                trainer,
                [trainer.global_step] * is_bad,
                "a loss of the validation is NaN or infinite after",
            )

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.look_at_losses(trainer)

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self.look_at_losses(trainer)
        weights = [
            weight
            for weight in pl_module.parameters()
            if weight.requires_grad and not is_lazy(weight)
        ]
        is_bad = (
            bool(weights) and not torch.stack([weight.isfinite().all() for weight in weights]).all()
        )
        stop_at(trainer, [trainer.global_step] * is_bad, "a weight is NaN or infinite after")


def stop_at(trainer: Trainer, steps: list[int], what: str) -> None:
    """Raise UserError in all processes at the first of the steps of any."""
    own = torch.tensor(min(steps, default=NEVER), device=trainer.strategy.root_device)
    step = int(trainer.strategy.reduce(own, reduce_op="min"))
    if step == NEVER:
        return
    ways = [f"a learning rate below {float(trainer.optimizers[0].param_groups[0]['lr']):g}"]
    ways += [] if trainer.gradient_clip_val else ["--trainer.gradient_clip_val 1"]
    ways += [] if trainer.precision == "32-true" else ["--trainer.precision 32-true"]
    where = f"{what} step {step}, in epoch {trainer.current_epoch + 1}"
    way_out = f"try {' or '.join(ways)}; --stop_on_nan false goes on all the same"
    raise UserError(f"{where}: stopped; no checkpoint of it is written\n{way_out}")


class SayLimits(Callback):
    """Says in one line what does not come with a module or data that are not ours, when training
    starts and the loaders are there."""

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:  # type: ignore[override]
        limits = []
        if not isinstance(trainer.train_dataloader, ResumableLoader):
            limits.append(
                "a resumed run may end with other weights (its training loader keeps no state)"
            )
        if trainer.lr_scheduler_configs and not has_named_optimizer(pl_module):
            limits.append("a resume with another length does not stretch the schedule")
        draws = any(isinstance(callback, PredictionFigures) for callback in trainer.callbacks)
        if draws and not isinstance(trainer.datamodule, BaseDataModule):
            limits.append("no pictures")
        elif (
            draws
            and trainer.loggers
            and trainer.is_global_zero
            and not has_pictures(trainer.loggers)
        ):
            say("Pictures: none, for no logger of this run takes them")
        loaders = (
            trainer.val_dataloaders
            if isinstance(trainer.val_dataloaders, list)
            else [trainer.val_dataloaders]
        )
        for loader in loaders:
            sampler = getattr(loader, "sampler", None)  # it may be any iterable
            if type(sampler) is DistributedSampler and (
                twice := sampler.total_size - len(loader.dataset)
            ):
                limits.append(
                    f"an evaluation counts {twice} samples twice, for {trainer.world_size} "
                    "equal shares"
                )
        if limits:
            say(
                f"{type(pl_module).__name__} with {type(trainer.datamodule).__name__}: "
                f"{'; '.join(limits)}"
            )


def make_callbacks(
    cli: TrainingCLI, root: Path, run: Run | None, selection: Selection | None
) -> list[Callback]:
    config = cli.config
    monitor, mode, or_last = selection or (None, "min", False)
    every = config.figures_every_n_epochs
    callbacks: list[Callback] = [
        ResumedOptimizer(),
        WholeEpochs(),
        SayLimits(),
        RandomState(),
        StopOnSignal(),
    ]
    callbacks += [StopOnNan()] if config.stop_on_nan else []
    callbacks.append(RunFolder(run.folder if run else None))
    callbacks += [PredictionFigures(every)] if every else []
    callbacks += [StepTimer(every)] if config.step_timer else []
    callbacks += [DeviceMonitor()] if config.device_monitor else []
    callbacks += [GradientNorm(config.gradient_norm == "modules")] if config.gradient_norm else []
    callbacks += (
        [WeightHistograms(config.histograms_every_n_epochs)]
        if config.histograms_every_n_epochs
        else []
    )
    with cli.import_rules():
        callbacks.append(RunRecorder(*write_config(cli.parser, cli.config), run, selection))
    if config.patience is not None:
        # Lightning 2.6 has no answer where it validates by the clock
        at_end = False if isinstance(config.trainer.val_check_interval, str) else None
        patience = int(config.patience)
        callbacks.append(
            Patience(monitor or "", patience=patience, mode=mode, check_on_train_epoch_end=at_end)
        )
    if config.trainer.enable_checkpointing is not False:
        folder = run.checkpoints if run else root  # Lightning gives all processes the first one's
        # the best one first: the last one then knows of it
        in_epoch = (
            config.trainer.val_check_interval not in (None, 1.0)
            or not config.trainer.check_val_every_n_epoch
        )
        num_epochs = None if in_epoch else config.trainer.check_val_every_n_epoch
        best = RunCheckpoint(
            folder, "best", monitor, mode, or_last, every_n_epochs=num_epochs if selection else 1
        )
        each = (
            [RunCheckpoint(folder, "epoch_{epoch:03d}", keep_all=True)]
            if config.keep_every_epoch
            else []
        )
        callbacks += [PlateauFirst(), best, *each, RunCheckpoint(folder, "last")]
    own = cli.config_init.trainer.callbacks or []
    for callback in own if isinstance(own, list) else [own]:
        names = (
            (callback.filename, callback.save_last and "last")
            if isinstance(callback, ModelCheckpoint)
            else ()
        )
        if {"best", "last"} & {*names} and not callback.dirpath:
            what = (
                "trainer.callbacks: a ModelCheckpoint of best or last would write over the "
                "run's own"
            )
            raise UserError(
                f"{what}\ngive it a dirpath, or leave save_last and that filename out", 2
            )
    return callbacks
