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

from lightning import LightningModule
from lightning.pytorch.callbacks import Timer, TQDMProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm

from lightbase.core.compat import batch_index, num_batches
from lightbase.core.curves import is_of_class
from lightbase.core.data import BaseDataModule
from lightbase.core.extra import Extra

REFRESH_S = 0.2  # seconds between two redraws; a redraw takes 0.1 ms


class Pace:
    """Measures the speed of a training and estimates the time left. Both include the
    time of validations.

    It must be made at the start: a resumed training counts only the batches since then.
    """

    def __init__(self, trainer: Any) -> None:
        self.start = time.monotonic()
        # Batches are counted, not steps. With several optimizers `global_step` counts
        # the steps of each one, and a GradientAccumulationScheduler changes the number
        # of batches in a step.
        self.first_batch = num_batches(trainer)
        self.first_share = share_done(trainer)

    def texts(self, trainer: Any) -> list[str]:
        """Return up to two texts: "512 images/s", of all devices, and "02:03 left".

        The speed needs a BaseDataModule, which knows its batch size. The time left
        needs a limit of the training: max_time, max_epochs or max_steps; the nearest
        one counts. Before the first batch there is no text.
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
        limits = [math.inf]
        for callback in trainer.callbacks:
            if isinstance(callback, Timer):
                limits.append(callback.time_remaining() or math.inf)
        share = share_done(trainer)
        if share > self.first_share:
            limits.append(seconds * (1 - share) / (share - self.first_share))
        if 0 < min(limits) < math.inf:
            texts.append(f"{Tqdm.format_interval(min(limits))} left")
        return texts


def share_done(trainer: Any) -> float:
    """Return the part of the training that is done, in [0, 1], by max_epochs or
    max_steps. It is 0 without them, and for epochs of unknown length."""
    share = 0.0
    if trainer.max_epochs > 0:
        num = trainer.max_epochs * trainer.num_training_batches
        share = num_batches(trainer) / num
    if trainer.max_steps > 0:
        share = max(share, trainer.global_step / trainer.max_steps)
    return share


class EpochLines(Extra):
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
        """Print the metrics of the epoch and the speed. Learning rates, values of an
        earlier validation and values of single classes are left out."""
        hidden = ["lr"]
        # without a validation in this epoch, val/ has the values of an earlier one
        if self.validated_epoch != trainer.current_epoch:
            hidden.append("val")
        texts = []
        for name, value in trainer.callback_metrics.items():
            if name.split("/")[0] not in hidden and not is_of_class(name):
                texts.append(f"{name} {value:.4f}")
        text = ", ".join(texts + self.pace.texts(trainer))
        pl_module.print(f"{title(trainer)}: {text}")
        sys.stdout.flush()


def title(trainer: Any) -> str:
    """Return "Epoch 1 of 3", or "Epoch 1" if the training has no limit of epochs."""
    text = f"Epoch {trainer.current_epoch + 1}"
    if trainer.max_epochs > 0:
        text += f" of {trainer.max_epochs}"
    return text


class TrainingProgressBar(EpochLines, TQDMProgressBar):
    """Lightning's progress bar, below the lines of the epochs.

    Behind the bar are the speed, the time left, and the metrics of the training and of
    the last validation. tqdm cuts what is too long for the terminal. The bar is redrawn
    at most every REFRESH_S seconds, and after the last batch of an epoch.
    """

    shown_at = 0.0  # time of the last redraw, in seconds of time.monotonic
    BAR_FORMAT = "{desc}{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}{postfix}"

    def __init__(self) -> None:
        # in batches; it applies to the bars of validation and test
        super().__init__(refresh_rate=10)

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Draw the bar. At the end of the training it vanishes, and the lines stay."""
        super().on_train_start(trainer, pl_module)
        self.train_progress_bar.leave = False
        # Lightning does not call this hook if it resumes in the middle of an epoch
        self.on_train_epoch_start(trainer, pl_module)

    def on_train_epoch_start(self, trainer: Any, *_: Any) -> None:
        """Begin the bar again, with the number of batches in this epoch."""
        super().on_train_epoch_start(trainer)
        self.train_progress_bar.set_description(title(trainer))

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Redraw the bar if REFRESH_S seconds have passed, or if the epoch ends."""
        if time.monotonic() - self.shown_at < REFRESH_S and not trainer.is_last_batch:
            return
        self.shown_at = time.monotonic()
        texts = self.pace.texts(trainer)
        # Lightning has read these numbers already: nothing waits for the GPU
        for name, value in trainer.progress_bar_metrics.items():
            texts.append(f"{name} {value:.4f}")
        bar = self.train_progress_bar
        bar.n = batch_index(trainer) + 1
        bar.set_postfix_str(", ".join(texts))

    def on_exception(self, *_: Any) -> None:
        """Close the bar, so that the error message begins below it."""
        with contextlib.suppress(TypeError):  # raised if there is no bar yet
            self.train_progress_bar.close()
