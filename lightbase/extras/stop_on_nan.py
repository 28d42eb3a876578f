"""The end of a training whose loss or weights are NaN or infinite."""

from typing import Any

from lightning import LightningModule, Trainer
from torch.nn.utils import get_total_norm

from lightbase.core.batches import tensors_in
from lightbase.core.callbacks import in_any_process
from lightbase.core.curves import is_log_step
from lightbase.core.errors import UserError
from lightbase.core.extra import Extra

LOWER_RATE = (
    "try a lower --model.lr, --trainer.gradient_clip_val 1 or --trainer.precision "
    "32-true; --stop_on_nan false goes on all the same"
)
"""The way out for a loss or a weight that is NaN or infinite."""
LOOK = (
    "look for NaN and infinite values in the data, as the network gets it; another "
    "learning rate does not help"
)
"""The way out for such values in a batch."""


class StopOnNan(Extra):
    """Stops all processes together when a training loss or a weight is NaN or infinite,
    before such a weight gets into a checkpoint.

    It checks the curve train/loss on log steps, whose values are on the CPU, and the
    weights before each checkpoint. If the newest batch has such values, the message is
    about the data.
    """

    def on_train_batch_end(
        self, trainer: Any, _: Any, __: Any, batch: Any, *___: Any
    ) -> None:
        """Check the newest point of train/loss on a log step."""
        if not is_log_step(trainer) or "train/loss" not in trainer.callback_metrics:
            return
        loss = trainer.callback_metrics["train/loss"]
        if in_any_process(trainer, not loss.isfinite()):
            has_data = any(not x.isfinite().all() for x in tensors_in(batch))
            stop_if(has_data, trainer, "a value of the batch is", LOOK)
            stop_if(True, trainer, "the training loss is")

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, _: Any
    ) -> None:
        """Check the weights before they are written. Frozen ones are not checked."""
        weights = [x for x in pl_module.parameters() if x.requires_grad]
        stop_if(not get_total_norm(weights).isfinite(), trainer, "a weight is")


def stop_if(
    is_bad: Any, trainer: Trainer, subject: str, way_out: str = LOWER_RATE
) -> None:
    """Raise UserError in all processes if `is_bad` is true in one of them. All
    processes have to call this function.

    subject: The beginning of the message, such as "a weight is".
    """
    if in_any_process(trainer, is_bad):
        where = f"step {trainer.global_step}, in epoch {trainer.current_epoch + 1}"
        raise UserError(
            f"{subject} NaN or infinite after {where}: stopped; no checkpoint of it is "
            "written",
            way_out,
        )
