"""The end of a training whose loss or weights are NaN or infinite."""

import math
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from torch.nn.parameter import is_lazy
from torch.nn.utils import get_total_norm

from lightbase.config.errors import UserError
from lightbase.data.tensors import tensors_in
from lightbase.run.stops import in_any_process

LOWER_RATE = (
    "try a lower --model.lr, --trainer.gradient_clip_val 1 or --trainer.precision "
    "32-true; --stop_on_nan false continues anyway"
)
"""The way out for a loss or a weight that is NaN or infinite."""

LOOK = (
    "look for NaN and infinite values in the data, as the network gets it; another "
    "learning rate does not help, unless the loss leaves such values out on purpose"
)
"""The way out for such values in a batch."""


class StopOnNan(Callback):
    """Stops all processes together when a training loss or a weight is NaN or infinite,
    before such a weight gets into a checkpoint.

    It checks the weights before the training and before each checkpoint, and the curve
    train/loss on log steps, whose values are on the CPU. If a batch since the last
    check has such values, the message is about the data.

    data_sum: The sum of all numbers in the batches since `checked_step`, the step of
        the last check. It is not finite if one of them is not. Reading it would wait
        for the GPU, so it is read only if the check fails.
    """

    data_sum: Any = 0.0
    checked_step = 0

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Raise UserError if a weight is NaN or infinite already, as it may be in the
        file of --model.weights or --ckpt_path."""
        for name, weight in pl_module.named_parameters():
            if not is_lazy(weight) and not weight.isfinite().all():
                raise UserError(
                    f"the weight {name} is NaN or infinite before the training",
                    "start from another file of weights, or look at how the model "
                    "makes them",
                )

    def watch(
        self, trainer: Trainer, outputs: Any, batch: Any, is_log_step: bool
    ) -> None:
        """Look at the loss of a batch, and on log steps at its curve. `BetweenSteps`
        calls this."""
        loss: Any = outputs.get("loss") if isinstance(outputs, dict) else None
        # reading it does not wait on a CPU; a finite one comes of finite values
        is_readable = loss is not None and loss.device.type == "cpu"
        if not is_readable or not math.isfinite(loss.item()):
            for x in tensors_in(batch):
                if x.is_floating_point():
                    self.data_sum = self.data_sum + x.sum(dtype=torch.float32)
        if is_log_step and "train/loss" in trainer.callback_metrics:
            loss = trainer.callback_metrics["train/loss"]
            self.check(not loss.isfinite(), trainer, "the training loss is")

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, _: Any
    ) -> None:
        weights = [x for x in pl_module.parameters() if x.requires_grad]
        self.check(not get_total_norm(weights).isfinite(), trainer, "a weight is")

    def check(self, is_bad: Any, trainer: Trainer, subject: str) -> None:
        """Raise UserError in all processes, which all have to call this, if `is_bad` is
        true in one of them. subject: The beginning of the message."""
        if in_any_process(trainer, is_bad):
            way_out = LOWER_RATE
            if in_any_process(trainer, not torch.as_tensor(self.data_sum).isfinite()):
                subject = f"a value of a batch since step {self.checked_step} is"
                way_out = LOOK
            where = f"step {trainer.global_step}, in epoch {trainer.current_epoch + 1}"
            raise UserError(
                f"{subject} NaN or infinite after {where}: stopped; no checkpoint of "
                "it is written",
                way_out,
            )
        self.data_sum = 0.0
        self.checked_step = trainer.global_step
