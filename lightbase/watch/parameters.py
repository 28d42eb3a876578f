"""The norm of the gradients as a curve; histograms of the weights."""

from typing import Any

import torch
from lightning import Callback, LightningModule
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger
from torch import Tensor
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from lightbase.compat import unscales_gradients
from lightbase.curves import MaySampleSteps, log_values, newest_step
from lightbase.ranks import say


class GradientNorm(MaySampleSteps):
    """Writes watch/gradient/norm: the Euclidean norm of all gradients of an optimizer step.

    It counts all accumulated batches; it is measured before clipping and without the scale of
    16-mixed. Not for FSDP, where no process has all weights.

    by_module: also watch/gradient/norm_NAME, of each part of the network.
    """

    def __init__(self, by_module: bool = False) -> None:
        self.by_module = by_module
        self.written_at = 0  # step
        # norms of the step that is being made, by curve: one tensor, which stays on the device
        self.curves: list[str] = []
        self.norms: Tensor | None = None

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        every = trainer.log_every_n_steps or 1
        self.written_at, self.norms = trainer.global_step // every * every, None

    def on_before_optimizer_step(
        self, trainer: Any, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        every, num_steps = trainer.log_every_n_steps, trainer.global_step + 1
        if not every or num_steps - self.written_at < every or not trainer.is_global_zero:
            return
        parts: dict[str, list[Tensor]] = {}
        for name, weight in pl_module.named_parameters():
            if weight.grad is not None:
                part = name.removeprefix("net.").partition(".")[0]
                parts.setdefault(part, []).append(weight.grad)
        if not parts:
            return
        norms = [get_total_norm(gradients) for gradients in parts.values()]
        values = torch.stack([get_total_norm(norms), *norms])
        scaler = getattr(trainer.precision_plugin, "scaler", None)  # only 16-mixed has one
        # a fused optimizer removes the scale itself, in its step
        if scaler is not None and unscales_gradients(optimizer):
            values = values / scaler.scale(torch.ones_like(values))
        self.curves = ["watch/gradient/norm", *(f"watch/gradient/norm_{name}" for name in parts)]
        self.norms = values

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if self.norms is None:
            return
        every = trainer.log_every_n_steps
        self.written_at = trainer.global_step // every * every
        curves = self.curves if self.by_module else self.curves[:1]
        log_values(trainer, dict(zip(curves, self.norms.tolist(), strict=False)))
        self.norms = None


class WeightHistograms(Callback):
    """Writes weights/NAME for each parameter at the end of every n-th epoch, on the first process.

    Numbers that are not finite are left out.
    """

    def __init__(self, every_n_epochs: int = 1) -> None:
        self.every_n_epochs = every_n_epochs

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        takers = (TensorBoardLogger, WandbLogger)
        if trainer.loggers and not any(isinstance(logger, takers) for logger in trainer.loggers):
            say("Histograms: none, for no logger of this run takes them")

    def on_train_epoch_end(self, trainer: Any, pl_module: LightningModule) -> None:
        if (trainer.current_epoch + 1) % self.every_n_epochs or not trainer.is_global_zero:
            return
        for name, weight in pl_module.named_parameters():
            values = weight.detach().float().flatten()
            values = values[values.isfinite()].cpu()
            if len(values):
                log_histogram(trainer, f"weights/{name.removeprefix('net.')}", values)


def log_histogram(trainer: Any, tag: str, values: Tensor) -> None:
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.experiment.add_histogram(tag, values, newest_step(trainer))
        elif isinstance(logger, WandbLogger):
            import wandb

            histogram: Any = wandb.Histogram(values.tolist())
            logger.log_metrics({tag: histogram}, newest_step(trainer))
