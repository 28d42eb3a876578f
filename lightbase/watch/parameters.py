"""How large the gradients are, as curves on log steps."""

from collections.abc import Mapping
from typing import Any

import torch
from lightning import LightningModule
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger
from torch import Tensor
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from lightbase.compat import unscales_gradients
from lightbase.curves import MayMissSteps, MaySampleSteps
from lightbase.ranks import say


class GradientNorm(MaySampleSteps):
    """Writes watch/gradient/norm: the Euclidean norm of all gradients of an optimiser's step, of
    all batches that it accumulates, before clipping and without the scale of 16-mixed. On the first
    process, for weights that each process has whole: not with FSDP.

    by_module: also watch/gradient/norm_NAME, of each part of the network.
    """

    def __init__(self, by_module: bool = False) -> None:
        self.by_module = by_module
        self.written_at = 0
        self.point: tuple[int, list[str], Tensor] | None = (
            None  # step, parts and their norms, still on the device
        )

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        every = trainer.log_every_n_steps or 1
        self.written_at, self.point = trainer.global_step // every * every, None

    def on_before_optimizer_step(
        self, trainer: Any, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        every, step = trainer.log_every_n_steps, trainer.global_step
        if not every or step + 1 - self.written_at < every or not trainer.is_global_zero:
            return
        parts: dict[str, list[Tensor]] = {}
        for name, parameter in pl_module.named_parameters():
            if parameter.grad is not None:
                parts.setdefault(name.removeprefix("net.").partition(".")[0], []).append(
                    parameter.grad
                )
        norms = {name: get_total_norm(gradients) for name, gradients in parts.items()}
        if not norms:
            return
        values = torch.stack([get_total_norm(list(norms.values())), *norms.values()])
        scaler = getattr(trainer.precision_plugin, "scaler", None)  # of 16-mixed alone
        if scaler is not None and unscales_gradients(optimizer):
            values = values / scaler.scale(
                torch.ones_like(values)
            )  # a fused step takes the scale off itself
        self.point = step, ["", *(f"_{name}" for name in norms)], values

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if self.point is None:
            return
        step, names, values = self.point
        every, self.point = trainer.log_every_n_steps, None
        self.written_at = (step + 1) // every * every
        found = dict(
            zip([f"watch/gradient/norm{name}" for name in names], values.tolist(), strict=True)
        )
        for logger in trainer.loggers:
            logger.log_metrics(
                found if self.by_module else {"watch/gradient/norm": values[0].item()}, step
            )


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
