"""How a training gets on: a line an epoch, where there is no terminal for a progress bar, and early stopping."""

from typing import Any

from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping


class EpochLines(Callback):
    """Prints each epoch's metrics: for output that is no terminal, in place of a progress bar."""

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero and trainer.progress_bar_callback is None:
            values = {name: value.item() for name, value in trainer.callback_metrics.items()}
            shown = ", ".join(f"{name} {value:.4f}" for name, value in values.items() if name != "lr")
            print(f"Epoch {trainer.current_epoch + 1} of {trainer.max_epochs}: {shown or 'nothing logged'}", flush=True)


class Patience(EarlyStopping):
    """Early stopping that a resumed run keeps to: one that had stopped does not start again, unless the patience has
    been raised."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict({**state_dict, "patience": self.patience})

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.should_stop = trainer.should_stop or self.wait_count >= self.patience
