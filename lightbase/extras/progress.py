"""The lines and the bar that show how far a training is.

`EpochLines` prints a line for each epoch. It is enough for a log file.
`TrainingProgressBar` also draws a bar below the lines, in a terminal. Both show the
speed and the time left, which `Pace` measures.
"""

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

REFRESH_S = 0.2  # seconds between two redraws; a redraw takes 0.1 ms
MIN_COLUMNS = 30  # characters of a line for the epoch and the bar


class Pace:
    """Measures the speed of a training and estimates the time left. Both include the
    time of validations.

    It must be made at the start: a resumed training counts only the batches since then.
    """

    def __init__(self, trainer: Any) -> None:
        self.start = time.monotonic()
        self.first_step = trainer.global_step
        # Batches are counted, not steps. With several optimizers `global_step` counts
        # the steps of each one, and a GradientAccumulationScheduler changes the number
        # of batches in a step.
        self.first_batch = num_batches(trainer)

    def texts(self, trainer: Any) -> list[str]:
        """Return up to two texts: "512 images/s", of all devices, and "2:03 left".

        The speed needs a BaseDataModule, which knows its batch size. The time left
        needs a limit of the training. Before the first batch there is no text.
        """
        num = num_batches(trainer) - self.first_batch
        if not num:
            return []
        texts = []
        seconds = time.monotonic() - self.start
        data = trainer.datamodule
        if isinstance(data, BaseDataModule):
            num_samples = num * data.batch_size * trainer.world_size
            kind = "images" if data.image_shape else "samples"
            texts.append(f"{num_samples / seconds:,.0f} {kind}/s")
        left = self.seconds_left(trainer, seconds)
        if 0 < left < math.inf:
            # 1:02:03, 2:03 or 0:03
            interval = Tqdm.format_interval(round(left)).lstrip("0").rjust(4, "0")
            texts.append(f"{interval} left")
        return texts

    def seconds_left(self, trainer: Any, seconds: float) -> float:
        """Return the estimated seconds until the training ends. The limits are
        max_time, max_epochs and max_steps; the nearest one counts. Without a limit the
        result is infinity.

        seconds: The time since the start, in which there was at least one batch.
        """
        limits = [math.inf]
        for callback in trainer.callbacks:
            if isinstance(callback, Timer):
                limits.append(callback.time_remaining() or math.inf)
        if trainer.max_epochs > 0:
            num_left = trainer.max_epochs * trainer.num_training_batches
            num_left -= num_batches(trainer)
            seconds_per_batch = seconds / (num_batches(trainer) - self.first_batch)
            limits.append(num_left * seconds_per_batch)
        num_steps = trainer.global_step - self.first_step
        if trainer.max_steps > 0 and num_steps:
            num_left = trainer.max_steps - trainer.global_step
            limits.append(num_left * seconds / num_steps)
        return min(limits)


def title(trainer: Any, word: str) -> str:
    """Return "Epoch 1 of 3", or "Epoch 1" if the training has no limit of epochs.

    word: The text between the two numbers, " of " in this example.
    """
    text = f"Epoch {trainer.current_epoch + 1}"
    if trainer.max_epochs > 0:
        text += f"{word}{trainer.max_epochs}"
    return text


class EpochLines(Callback):
    """Prints a line with the metrics after each epoch.

    validated_epoch: The epoch of the last validation; -1 before the first one.
    """

    validated_epoch = -1

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Begin to measure the speed."""
        super().on_train_start(trainer, pl_module)
        self.pace = Pace(trainer)

    def on_validation_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Note that this epoch has a validation."""
        super().on_validation_end(trainer, pl_module)
        self.validated_epoch = trainer.current_epoch

    def on_train_epoch_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Print the metrics of the epoch, train/ before val/, and the speed. Learning
        rates, values of an earlier validation and values of single classes are left
        out."""
        hidden = ["lr"]
        # without a validation in this epoch, val/ has the values of an earlier one
        if self.validated_epoch != trainer.current_epoch:
            hidden.append("val")
        texts = []
        for name, value in trainer.callback_metrics.items():
            if name.split("/")[0] not in hidden and not is_of_class(name):
                texts.append(f"{name} {value.item():.4f}")
        texts.sort(key=lambda text: text.split("/")[0])  # train/ before val/
        text = ", ".join(texts + self.pace.texts(trainer))
        pl_module.print(f"{title(trainer, ' of ')}: {text}")
        sys.stdout.flush()


class TrainingProgressBar(EpochLines, TQDMProgressBar):
    """Lightning's progress bar, below the lines of the epochs.

    Behind the bar are the speed, the time left, the metrics of the training and the
    metrics of the last validation. If they are too long for the terminal, some of them
    are left out. The bar is redrawn at most every REFRESH_S seconds, and after the last
    batch of an epoch.
    """

    shown_at = 0.0  # time of the last redraw, in seconds of time.monotonic
    # the bars of validation and test; `_redraw` sets the format of the training's bar
    BAR_FORMAT = "{desc}{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}"

    def __init__(self) -> None:
        # in batches; it applies to the bars of validation and test
        super().__init__(refresh_rate=10)

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Draw the bar. At the end of the training it vanishes, and the lines stay."""
        super().on_train_start(trainer, pl_module)
        self.train_progress_bar.leave = False
        # Lightning does not call this hook if it resumes in the middle of an epoch
        self.on_train_epoch_start(trainer, pl_module)

    def on_train_epoch_start(  # type: ignore[override]
        self, trainer: Any, pl_module: LightningModule
    ) -> None:
        """Begin the bar again, with the number of batches in this epoch."""
        self.train_progress_bar.set_description_str(title(trainer, "/"), refresh=False)
        self.train_progress_bar.reset(convert_inf(trainer.num_training_batches))
        self._redraw(trainer)

    def on_train_batch_end(
        self, trainer: Any, pl_module: LightningModule, *_: Any
    ) -> None:
        """Redraw the bar if REFRESH_S seconds have passed, or if the epoch ends."""
        if time.monotonic() - self.shown_at >= REFRESH_S or trainer.is_last_batch:
            self.shown_at = time.monotonic()
            self.train_progress_bar.n = batch_index(trainer) + 1
            self._redraw(trainer)

    def on_exception(self, *_: Any) -> None:
        """Close the bar, so that the error message begins below it."""
        with contextlib.suppress(TypeError):  # raised if there is no bar yet
            self.train_progress_bar.close()

    def _redraw(self, trainer: Any) -> None:
        """Draw the bar of the training."""
        if self.is_disabled:
            return
        bar = self.train_progress_bar
        columns = (bar.ncols or 0) - MIN_COLUMNS  # ncols is None without a terminal
        text = self._values(trainer, columns)
        bar.bar_format = f"{{desc}}: {{percentage:3.0f}}%|{{bar}}| {text}"
        bar.refresh()

    def _values(self, trainer: Any, columns: int) -> str:
        """Return the text behind the bar. If it has more than `columns` characters, it
        is shortened to the time left, one metric of the training, and one metric of the
        last validation."""
        pace = self.pace.texts(trainer)
        train = []
        val = []
        # Lightning has read these numbers already: nothing waits for the GPU
        for name, value in trainer.progress_bar_metrics.items():
            if name.startswith("val"):
                val.append(f"before: {name} {value:.4f}")
            else:
                train.append(f"{name} {value:.4f}")
        text = ", ".join(pace + train + val)
        if len(text) > columns:
            time_left = [part for part in pace if "left" in part]
            text = ", ".join(time_left + train[:1] + val[:1])
        return text
