"""A loss that is no number ends a run, before its weights are kept."""

from typing import Any

import torch
from lightning import LightningModule, Trainer
from torch import Tensor
from torch.nn.parameter import is_lazy

from project.base.callback import MayMissSteps
from project.base.errors import UserError
from project.engine.steps import SeveralSteps

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
