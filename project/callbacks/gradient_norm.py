"""How large the gradients are, as curves on log steps."""

from typing import Any

import torch
from lightning import LightningModule
from torch import Tensor
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from project.base.callback import MaySampleSteps


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
        if scaler is not None and getattr(optimizer, "_step_supports_amp_scaling", False):
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
