"""The callbacks of a run."""

from pathlib import Path
from typing import Any

from lightning import Callback, LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DistributedSampler

from project.base.callback import RunFolder
from project.base.datamodule import TensorDataModule
from project.base.errors import UserError
from project.base.random_state import RandomState
from project.base.rank import say
from project.base.samples import ResumableLoader
from project.callbacks.charts import has_pictures
from project.callbacks.device_monitor import DeviceMonitor
from project.callbacks.gradient_norm import GradientNorm
from project.callbacks.prediction_figures import PredictionFigures
from project.callbacks.progress import Patience
from project.callbacks.step_timer import StepTimer
from project.callbacks.weight_histograms import WeightHistograms
from project.engine.checkpoints import RunCheckpoint
from project.engine.checks import has_named_optimizer
from project.engine.cli import TrainingCLI
from project.engine.config import write_config
from project.engine.finite import StopOnNan
from project.engine.folder import Run
from project.engine.processes import StopOnSignal
from project.engine.recorder import RunRecorder
from project.engine.resume import PlateauFirst, ResumedOptimizer, WholeEpochs
from project.engine.selection import Selection


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
        if draws and not isinstance(trainer.datamodule, TensorDataModule):
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
