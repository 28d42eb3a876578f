"""What does not come with a module or data that are not ours."""

from typing import Any

from lightning import Callback, LightningModule
from torch.utils.data import DistributedSampler

from project.base.datamodule import TensorDataModule
from project.base.rank import say
from project.base.samples import ResumableLoader
from project.base.system import System
from project.callbacks.prediction_figures import PredictionFigures


class SayLimits(Callback):
    """Says it in one line, when training starts and the loaders are there."""

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:  # type: ignore[override]
        limits = []
        if not isinstance(trainer.train_dataloader, ResumableLoader):
            limits.append("a resumed run may end with other weights (its training loader keeps no state)")
        if trainer.lr_scheduler_configs and not isinstance(pl_module, System):
            limits.append("a resume with another length does not stretch the schedule")
        draws = any(isinstance(callback, PredictionFigures) for callback in trainer.callbacks)
        if draws and not isinstance(trainer.datamodule, TensorDataModule):
            limits.append("no pictures")
        loaders = trainer.val_dataloaders if isinstance(trainer.val_dataloaders, list) else [trainer.val_dataloaders]
        for loader in loaders:
            sampler = getattr(loader, "sampler", None)  # it may be any iterable
            if type(sampler) is DistributedSampler and (twice := sampler.total_size - len(loader.dataset)):
                limits.append(f"an evaluation counts {twice} samples twice, for {trainer.world_size} equal shares")
        if limits:
            say(f"{type(pl_module).__name__} with {type(trainer.datamodule).__name__}: {'; '.join(limits)}")
