"""Progress: a line for each epoch and, in a terminal, a bar below; early stopping."""

import contextlib
import math
import sys
import time
from typing import Any

from lightning import Callback, LightningModule
from lightning.pytorch.callbacks import Timer, TQDMProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm, convert_inf

from lightbase.core.compat import batch_index, num_batches
from lightbase.core.curves import is_of_class
from lightbase.core.data import BaseDataModule
from lightbase.core.errors import say
from lightbase.core.module import BaseModule

REFRESH_S = 0.2  # a redraw takes 0.1 ms
LINE_S = 60
MIN_COLUMNS = 30  # for the epoch and the bar


class Pace:
    """Speed of a training on all devices and the time left, both with validations."""

    def __init__(self, trainer: Any) -> None:
        self.start = time.monotonic()
        self.first_step = trainer.global_step
        # batches, not steps: each of several optimizers counts its steps, and a
        # GradientAccumulationScheduler changes how many batches a step takes
        self.first_batch = num_batches(trainer)

    def texts(self, trainer: Any) -> list[str]:
        """Return images a second, for a BaseDataModule, and the time left, unless the
        training has no end; nothing before the first batch."""
        num = num_batches(trainer) - self.first_batch
        if not num:
            return []
        texts = []
        seconds = time.monotonic() - self.start
        data = trainer.datamodule
        if isinstance(data, BaseDataModule):
            num_samples = num * data.batch_size * trainer.world_size
            kind = "images" if data.image_shape else "samples"
            texts.append(f"{num_samples / max(seconds, 1e-9):,.0f} {kind}/s")
        left = self.seconds_left(trainer, seconds)
        if 0 < left < math.inf:
            # 1:02:03 or 2:03
            interval = Tqdm.format_interval(round(left)).lstrip("0").rjust(4, "0")
            texts.append(f"{interval} left")
        return texts

    def seconds_left(self, trainer: Any, seconds: float) -> float:
        """Return the time to the nearest limit of the training; infinity without one.

        seconds: The time since the start.
        """
        limits = [math.inf]
        for callback in trainer.callbacks:
            if isinstance(callback, Timer):
                limits.append(callback.time_remaining() or math.inf)
        if (trainer.max_epochs or -1) > 0:
            num_done = num_batches(trainer)
            num_left = trainer.max_epochs * trainer.num_training_batches - num_done
            limits.append(seconds * num_left / (num_done - self.first_batch))
        num_steps = trainer.global_step - self.first_step
        if trainer.max_steps > 0 and num_steps:
            num_left = trainer.max_steps - trainer.global_step
            limits.append(seconds * num_left / num_steps)
        return min(limits)


def title(trainer: Any, word: str) -> str:
    """Return `Epoch 1 of 3` with the word " of "; `Epoch 1` in a training without a
    number of epochs."""
    text = f"Epoch {trainer.current_epoch + 1}"
    if (trainer.max_epochs or -1) > 0:
        text += f"{word}{trainer.max_epochs}"
    return text


class EpochLines(Callback):
    """Prints each epoch's metrics; without a bar also once a minute how far the epoch
    is."""

    validated_epoch = -1
    shown_at = 0.0

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self.pace = Pace(trainer)
        self.shown_at = time.monotonic()

    def on_train_batch_end(
        self, trainer: Any, pl_module: LightningModule, *_: Any
    ) -> None:
        if trainer.progress_bar_callback is not None:
            return
        if time.monotonic() - self.shown_at >= LINE_S:
            self.shown_at = time.monotonic()
            part = (batch_index(trainer) + 1) / trainer.num_training_batches
            texts = [f"{title(trainer, ' of ')}: {part:.0%}", *self.pace.texts(trainer)]
            say(", ".join(texts))

    def on_validation_end(self, trainer: Any, pl_module: LightningModule) -> None:
        super().on_validation_end(trainer, pl_module)
        self.validated_epoch = trainer.current_epoch

    def on_train_epoch_end(self, trainer: Any, pl_module: LightningModule) -> None:
        metrics = trainer.callback_metrics
        names = [name for name in metrics if name.partition("/")[0] != "lr"]
        if self.validated_epoch != trainer.current_epoch:  # values of an earlier one
            names = [name for name in names if not name.startswith("val")]
        if isinstance(pl_module, BaseModule):  # in another module val_x/y is no class
            names = [name for name in names if not is_of_class(name)]
        names.sort(key=lambda name: name.partition("/")[0])  # train/ before val/
        texts = [f"{name} {metrics[name].item():.4f}" for name in names]
        text = ", ".join((texts or ["nothing logged"]) + self.pace.texts(trainer))
        pl_module.print(f"{title(trainer, ' of ')}: {text}")
        sys.stdout.flush()


class TrainingProgressBar(EpochLines, TQDMProgressBar):
    """Lightning's bar, below the lines of the epochs: speed, time left, the values of
    the training, and the values of the last validation. Where they do not fit, it has
    some of them."""

    # of validation and test
    BAR_FORMAT = "{desc}{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}"

    def __init__(self) -> None:
        super().__init__(refresh_rate=10)  # batches, of validation and test

    def init_validation_tqdm(self) -> Tqdm:
        if sys.stdout.isatty():  # only a terminal can draw a second line
            return super().init_validation_tqdm()
        return Tqdm(disable=True)

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self.train_progress_bar.leave = False  # the lines of the epochs stay
        # Lightning does not call it in the middle of an epoch
        self.on_train_epoch_start(trainer, pl_module)

    def on_train_epoch_start(self, trainer: Any, pl_module: LightningModule) -> None:  # type: ignore[override]
        self.train_progress_bar.set_description_str(title(trainer, "/"), refresh=False)
        self.train_progress_bar.reset(convert_inf(trainer.num_training_batches))
        self._redraw(trainer, pl_module)

    def on_train_batch_end(
        self, trainer: Any, pl_module: LightningModule, *_: Any
    ) -> None:
        if time.monotonic() - self.shown_at >= REFRESH_S or trainer.is_last_batch:
            self.shown_at = time.monotonic()
            self.train_progress_bar.n = batch_index(trainer) + 1
            self._redraw(trainer, pl_module)

    def on_exception(self, *_: Any) -> None:
        """Let the next line begin below the bar."""
        for name in ("val_progress_bar", "train_progress_bar", "test_progress_bar"):
            with contextlib.suppress(TypeError):  # there is none yet
                getattr(self, name).close()

    def _redraw(self, trainer: Any, pl_module: LightningModule) -> None:
        if self.is_disabled:
            return
        bar = self.train_progress_bar
        columns = (bar.ncols or 0) - MIN_COLUMNS  # None if it is no terminal
        text = self._values(trainer, pl_module, columns)
        text = text.replace("{", "{{").replace("}", "}}")
        if not bar.total:
            text = "{n_fmt} batches, " + text
        bar.bar_format = f"{{desc}}: {{percentage:3.0f}}%|{{bar}}| {text}"
        bar.refresh()

    def _values(self, trainer: Any, pl_module: LightningModule, columns: int) -> str:
        """Return the text behind the bar, shorter if it has more than `columns`
        characters."""
        pace = self.pace.texts(trainer)
        train = []
        val = []
        # Lightning has read these numbers already: nothing waits for the GPU
        for name, value in self.get_metrics(trainer, pl_module).items():
            if not isinstance(value, float):
                continue
            if name.startswith("val"):
                val.append(f"before: {name} {value:.4f}")
            else:
                train.append(f"{name} {value:.4f}")
        text = ", ".join(pace + train + val)
        if len(text) > columns:
            time_left = [part for part in pace if "left" in part]
            text = ", ".join(time_left + train[:1] + val[:1])
        return text
