"""Progress: a line for each epoch and, in a terminal, a bar below; early stopping."""

import contextlib
import math
import sys
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
            # 1:02:03 or 2:03
            texts.append(f"{Tqdm.format_interval(round(left)).lstrip('0').rjust(4, '0')} left")
        return texts


def of_epochs(trainer: Any, word: str) -> str:
    """The number of epochs after this word; empty in a training without one."""
    return f"{word}{trainer.max_epochs}" if (trainer.max_epochs or -1) > 0 else ""


class EpochLines(Callback):
    """Prints each epoch's metrics, above the bar if there is one."""

    validated_epoch = -1

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        self.pace = Pace(trainer)

    def on_validation_end(self, trainer: Any, *_: Any) -> None:
        self.validated_epoch = trainer.current_epoch

    def on_train_epoch_end(self, trainer: Any, pl_module: LightningModule) -> None:
        metrics = trainer.callback_metrics
        is_old = self.validated_epoch != trainer.current_epoch  # the values of the validation
        names = [x for x in metrics if not (is_old and x.startswith("val"))]
        names = [name for name in names if name.partition("/")[0] != "lr"]
        if isinstance(pl_module, BaseModule):  # in another module val_x/y is no class
            names = [name for name in names if not is_of_class(name)]
        names.sort(key=lambda name: name.partition("/")[0])  # train/ before val/
        parts = [f"{name} {metrics[name].item():.4f}" for name in names] or ["nothing logged"]
        text = ", ".join(parts + self.pace.texts(trainer))
        pl_module.print(f"Epoch {trainer.current_epoch + 1}{of_epochs(trainer, ' of ')}: {text}")
        sys.stdout.flush()


class TrainingProgressBar(MayMissSteps, TQDMProgressBar):
    """Lightning's bar with images a second, the time left of the training, and its values.

    It is redrawn five times a second, not every n batches: with steps of a millisecond a redraw
    costs as much as a step.
    """

    def __init__(self) -> None:
        super().__init__(refresh_rate=50)  # batches, of validation and test
        self.redrawn_at = 0.0

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

    def on_exception(self, *_: Any) -> None:
        """Let the next line begin below the bar."""
        for name in ("val_progress_bar", "train_progress_bar", "test_progress_bar"):
            with contextlib.suppress(TypeError):  # there is none yet
                getattr(self, name).close()

    def _redraw(self, trainer: Any, pl_module: LightningModule) -> None:
        if self.is_disabled:
            return
        # Lightning has read these numbers already: nothing waits for the GPU
        metrics = self.get_metrics(trainer, pl_module).items()
        values = [f"{name} {value:.4f}" for name, value in metrics if isinstance(value, float)]
        text = ", ".join(self.pace.texts(trainer) + values)
        text = text.replace("{", "{{").replace("}", "}}")
        self.train_progress_bar.bar_format = f"{{desc}}: {{percentage:3.0f}}%|{{bar}}| {text}"
        self.train_progress_bar.refresh()


class Patience(EarlyStopping):
    """Early stopping that holds in a resumed run: a stopped run does not start again, unless the
    patience has been raised."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict({**state_dict, "patience": self.patience})

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        trainer.should_stop = trainer.should_stop or self.wait_count >= self.patience
