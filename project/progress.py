"""A line an epoch, where there is no terminal for a progress bar."""

from lightning import Callback, LightningModule, Trainer


class EpochLines(Callback):
    """Prints each epoch's metrics: for output that is no terminal, in place of a progress bar."""

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero and trainer.progress_bar_callback is None:
            values = {name: value.item() for name, value in trainer.callback_metrics.items()}
            shown = ", ".join(f"{name} {value:.4f}" for name, value in values.items() if name != "lr")
            print(f"Epoch {trainer.current_epoch + 1} of {trainer.max_epochs}: {shown}", flush=True)
