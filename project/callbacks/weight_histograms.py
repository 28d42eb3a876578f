"""How the weights are spread, as histograms for TensorBoard and W&B."""

from collections.abc import Mapping
from typing import Any

from lightning import LightningModule
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger
from torch import Tensor

from project.base.callback import MayMissSteps
from project.base.rank import say


class WeightHistograms(MayMissSteps):
    """Writes weights/NAME for each parameter at the end of every n-th epoch, on the first process.
    Numbers that are not finite are left out.

    gradients: also gradients/NAME, of the epoch's last step, after clipping.
    """

    def __init__(self, every_n_epochs: int = 1, gradients: bool = False) -> None:
        self.every_n_epochs = every_n_epochs
        self.gradients = gradients

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        takers = (TensorBoardLogger, WandbLogger)
        if (
            trainer.loggers
            and trainer.is_global_zero
            and not any(isinstance(own, takers) for own in trainer.loggers)
        ):
            say("Histograms: none, for no logger of this run takes them")

    def on_train_batch_end(self, trainer: Any, pl_module: LightningModule, *_: Any) -> None:
        if self.gradients and trainer.is_last_batch:  # Lightning drops them before a validation
            named = pl_module.named_parameters()
            self._write(
                trainer,
                "gradients",
                {name: own.grad for name, own in named if own.grad is not None},
            )

    def on_train_epoch_end(self, trainer: Any, pl_module: LightningModule) -> None:
        self._write(trainer, "weights", dict(pl_module.named_parameters()))

    def _write(self, trainer: Any, kind: str, tensors: Mapping[str, Tensor]) -> None:
        if (trainer.current_epoch + 1) % self.every_n_epochs == 0 and trainer.is_global_zero:
            for name, tensor in tensors.items():
                write(trainer, f"{kind}/{name.removeprefix('net.')}", tensor)


def write(trainer: Any, tag: str, tensor: Tensor) -> None:
    values = tensor.detach().float().flatten()
    values = values[values.isfinite()].cpu()
    step = max(0, trainer.global_step - 1)  # as Lightning's own curves
    for logger in trainer.loggers if len(values) else []:
        if isinstance(logger, TensorBoardLogger):
            logger.experiment.add_histogram(tag, values, step)
        elif isinstance(logger, WandbLogger):
            import wandb

            histogram: Any = wandb.Histogram(values.tolist())
            logger.log_metrics({tag: histogram}, step)
