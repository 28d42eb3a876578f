"""Progress: a bar in a terminal, a line an epoch elsewhere; early stopping."""

import math
import time
from typing import Any

from lightning import Callback, LightningModule
from lightning.pytorch.callbacks import EarlyStopping, Timer, TQDMProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm, convert_inf

from lightbase.curves import MayMissSteps, is_of_class
from lightbase.data.module import BaseDataModule
from lightbase.module import BaseModule

REFRESH_S = 0.2


class Pace:
    """Speed of a training on all devices and the time left, both with validations."""

    def __init__(self, trainer: Any) -> None:
        self.start, self.first_step = time.monotonic(), trainer.global_step
        # batches, not steps: each of several optimizers counts its steps, and a
        # GradientAccumulationScheduler changes how many batches a step takes
        self.first_batch = trainer.fit_loop.total_batch_idx

    def texts(self, trainer: Any) -> list[str]:
        """Images a second, for a BaseDataModule; time left, unless the training has no end."""
        seconds, data, texts = time.monotonic() - self.start, trainer.datamodule, []
        num_batches = trainer.fit_loop.total_batch_idx - self.first_batch
        if not num_batches:
            return []
        if isinstance(data, BaseDataModule):
            speed = num_batches * data.batch_size * trainer.world_size / max(seconds, 1e-9)
            texts.append(f"{speed:,.0f} {'images' if data.image_shape else 'samples'}/s")
        limits = [cb.time_remaining() for cb in trainer.callbacks if isinstance(cb, Timer)]
        if (trainer.max_epochs or -1) > 0:
            num_left = trainer.max_epochs * trainer.num_training_batches
            num_left -= trainer.fit_loop.total_batch_idx + 1
            limits.append(seconds * num_left / num_batches)
        num_steps = trainer.global_step - self.first_step
        if trainer.max_steps > 0 and num_steps:
            limits.append(seconds * (trainer.max_steps - trainer.global_step) / num_steps)
        left = min((limit for limit in limits if limit is not None), default=math.inf)
        if 0 < left < math.inf:
            texts.append(f"{clock(left)} left")
        return texts


def clock(seconds: float) -> str:
    """1:02:03 or 2:03."""
    return Tqdm.format_interval(round(seconds)).lstrip("0").rjust(4, "0")


def of_epochs(trainer: Any, word: str) -> str:
    """The number of epochs after this word; empty in a training without one."""
    return f"{word}{trainer.max_epochs}" if (trainer.max_epochs or -1) > 0 else ""


class EpochLines(Callback):
    """Prints each epoch's metrics, in place of a progress bar: for output that is no terminal."""

    validated_epoch = -1

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        self.pace = Pace(trainer)

    def on_validation_end(self, trainer: Any, *_: Any) -> None:
        self.validated_epoch = trainer.current_epoch

    def on_train_epoch_end(self, trainer: Any, pl_module: LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        metrics = trainer.callback_metrics
        is_old = self.validated_epoch != trainer.current_epoch  # the values of the validation
        has_classes = isinstance(pl_module, BaseModule)  # in another module val_x/y is its own name
        names = [name for name in metrics if not (has_classes and is_of_class(name))]
        names = [name for name in names if not (is_old and name.startswith("val"))]
        names = [name for name in names if name.partition("/")[0] != "lr"]
        names.sort(key=lambda name: name.partition("/")[0])  # train/ before val/
        parts = [f"{name} {metrics[name].item():.4f}" for name in names] or ["nothing logged"]
        text = ", ".join(parts + self.pace.texts(trainer))
        print(f"Epoch {trainer.current_epoch + 1}{of_epochs(trainer, ' of ')}: {text}", flush=True)


class TrainingProgressBar(MayMissSteps, TQDMProgressBar):
    """Lightning's bar with loss, accuracy, images a second and the time left of the training.

    It is redrawn five times a second, not every n batches: with steps of a millisecond a redraw
    costs as much as a step.
    """

    def __init__(self) -> None:
        super().__init__(refresh_rate=50)  # batches, of validation and test
        self.redrawn_at = 0.0

    def init_train_tqdm(self) -> Tqdm:
        bar = super().init_train_tqdm()
        bar.bar_format = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}{postfix}"
        return bar

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:  # type: ignore[override]
        super().on_train_start(trainer, pl_module)
        self.pace = Pace(trainer)
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

    def on_validation_end(self, trainer: Any, pl_module: LightningModule) -> None:
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
