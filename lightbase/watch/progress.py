"""Progress: a bar in a terminal, a line an epoch elsewhere; early stopping."""

import math
import time
from typing import Any

from lightning import Callback, LightningModule
from lightning.pytorch.callbacks import EarlyStopping, TQDMProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm, convert_inf

from lightbase.curves import MayMissSteps, is_of_class
from lightbase.data.module import BaseDataModule

REFRESH_S = 0.2


class Pace(Callback):
    """Speed of the training on all devices, without validations; time left, with validations."""

    def __init__(self) -> None:
        self.num_steps: float = 0  # of the whole training
        self.first_step = 0
        self.start = self.pause_start = self.paused = 0.0  # seconds

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        self.start, self.first_step, self.paused = time.monotonic(), trainer.global_step, 0.0
        self.num_steps = trainer.estimated_stepping_batches

    def on_validation_start(self, *_: Any) -> None:
        self.pause_start = time.monotonic()

    def on_validation_end(self, *_: Any) -> None:
        self.paused += time.monotonic() - self.pause_start

    def texts(self, trainer: Any) -> list[str]:
        """Images a second, for a BaseDataModule; time left, unless the training has no end."""
        data, texts = trainer.datamodule, []
        seconds, num_done = time.monotonic() - self.start, trainer.global_step - self.first_step
        if not num_done:
            return []
        if isinstance(data, BaseDataModule):
            batch_size = data.batch_size * trainer.world_size * trainer.accumulate_grad_batches
            speed = num_done * batch_size / max(seconds - self.paused, 1e-9)
            texts.append(f"{speed:,.0f} {'images' if data.image_shape else 'samples'}/s")
        num_left = self.num_steps - trainer.global_step
        if 0 < num_left < math.inf:
            texts.append(f"{clock(seconds * num_left / num_done)} left")
        return texts


def clock(seconds: float) -> str:
    """1:02:03 or 2:03."""
    return Tqdm.format_interval(round(seconds)).lstrip("0").rjust(4, "0")


def of_epochs(trainer: Any, word: str) -> str:
    """The number of epochs after this word; empty in a training without one."""
    return f"{word}{trainer.max_epochs}" if (trainer.max_epochs or -1) > 0 else ""


class EpochLines(Pace):
    """Prints each epoch's metrics, in place of a progress bar: for output that is no terminal."""

    validated_epoch = -1

    def on_validation_end(self, trainer: Any, *_: Any) -> None:
        super().on_validation_end()
        self.validated_epoch = trainer.current_epoch

    def on_train_epoch_end(self, trainer: Any, pl_module: LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        metrics = trainer.callback_metrics
        is_old = self.validated_epoch != trainer.current_epoch  # the values of the validation
        names = [name for name in metrics if name != "lr" and not is_of_class(name)]
        names = [name for name in names if not (is_old and name.startswith("val"))]
        names.sort(key=lambda name: name.partition("/")[0])  # train/ before val/
        parts = [f"{name} {metrics[name].item():.4f}" for name in names] or ["nothing logged"]
        text = ", ".join(parts + self.texts(trainer))
        print(f"Epoch {trainer.current_epoch + 1}{of_epochs(trainer, ' of ')}: {text}", flush=True)


class TrainingProgressBar(MayMissSteps, TQDMProgressBar):
    """Lightning's bar with loss, accuracy, images a second and the time left of the training.

    It is redrawn five times a second, not every n batches: with steps of a millisecond a redraw
    costs as much as a step.
    """

    def __init__(self) -> None:
        super().__init__(refresh_rate=50)  # batches, of validation and test
        self.pace = Pace()
        self.redrawn_at = 0.0

    def init_train_tqdm(self) -> Tqdm:
        bar = super().init_train_tqdm()
        bar.bar_format = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}{postfix}"
        return bar

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:  # type: ignore[override]
        super().on_train_start(trainer, pl_module)
        self.pace.on_train_start(trainer, pl_module)
        self.on_train_epoch_start(trainer)  # Lightning does not call it in the middle of an epoch

    def on_train_epoch_start(self, trainer: Any, *_: Any) -> None:
        text = f"Epoch {trainer.current_epoch + 1}{of_epochs(trainer, '/')}"
        self.train_progress_bar.set_description_str(text, refresh=False)
        self.train_progress_bar.reset(convert_inf(self.total_train_batches))

    def on_train_batch_end(self, trainer: Any, pl_module: LightningModule, *_: Any) -> None:
        now = time.monotonic()
        if now - self.redrawn_at >= REFRESH_S or trainer.is_last_batch:
            self.redrawn_at = now
            # set, not added to: one call may train several batches
            self.train_progress_bar.n = trainer.fit_loop.batch_idx + 1
            self._redraw(trainer, pl_module)

    def on_train_epoch_end(self, trainer: Any, pl_module: LightningModule) -> None:
        self._redraw(trainer, pl_module)

    def on_validation_start(self, trainer: Any, pl_module: LightningModule) -> None:
        super().on_validation_start(trainer, pl_module)
        self.pace.on_validation_start()

    def on_validation_end(self, trainer: Any, pl_module: LightningModule) -> None:
        self.pace.on_validation_end()
        self.val_progress_bar.close()
        self.reset_dataloader_idx_tracker()

    def _redraw(self, trainer: Any, pl_module: LightningModule) -> None:
        if self.is_disabled:
            return
        # Lightning has read these numbers already: nothing waits for the GPU
        metrics = self.get_metrics(trainer, pl_module).items()
        values = [f"{name} {value:.4f}" for name, value in metrics if isinstance(value, float)]
        self.train_progress_bar.set_postfix_str(", ".join(self.pace.texts(trainer) + values))


class Patience(EarlyStopping):
    """Early stopping that holds in a resumed run: a stopped run does not start again, unless the
    patience has been raised."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict({**state_dict, "patience": self.patience})

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        trainer.should_stop = trainer.should_stop or self.wait_count >= self.patience
