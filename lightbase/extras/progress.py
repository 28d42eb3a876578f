"""The lines and the bar that show how far a training is.

`EpochLines` prints a line for each epoch. It is enough for a log file.
`TrainingProgressBar` is Lightning's bar, below the lines, in a terminal.
"""

import shutil
import sys
import time
from typing import Any

from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm

from lightbase.core.compat import batch_index
from lightbase.core.curves import is_of_class
from lightbase.core.errors import wrapped
from lightbase.core.extra import Extra
from lightbase.core.record import recorder_of
from lightbase.core.tables import as_text

REFRESH_S = 0.2  # seconds between two redraws; a redraw takes 0.1 ms


class EpochLines(Extra):
    """Prints a line with the metrics after each epoch, and the seconds since the line
    before it or since the start. Validations and checkpoints are part of this time.

    began: When the newest line was printed, in seconds of time.monotonic.
    """

    began = 0.0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.began = time.monotonic()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Print the newest row of the history, without values of single classes."""
        texts = []
        for name, value in recorder_of(trainer).history[-1].items():
            if name != "epoch" and not is_of_class(name):
                texts.append(f"{name} {as_text(value)}")
        now = time.monotonic()
        texts.append(f"{now - self.began:.1f} s")
        self.began = now
        line = f"{title(trainer)}: {', '.join(texts)}"
        pl_module.print(wrapped(line, sys.stdout))
        sys.stdout.flush()


def title(trainer: Any) -> str:
    """Return "Epoch 1 of 3", or "Epoch 1" if the training has no limit of epochs."""
    text = f"Epoch {trainer.current_epoch + 1}"
    if trainer.max_epochs > 0:
        text += f" of {trainer.max_epochs}"
    return text


class TrainingProgressBar(Extra, TQDMProgressBar):
    """Lightning's progress bars, which vanish at their end. The lines of the epochs
    stay.

    Behind the bar are tqdm's time and rate of this epoch, and the metrics. The bar is
    redrawn at most every REFRESH_S seconds, and after the last batch of an epoch.

    refresh_rate: In batches. It applies to the bars of validation, test and prediction.
    """

    shown_at = 0.0  # time of the last redraw, in seconds of time.monotonic

    def make_bar(self) -> Tqdm:
        """Return a bar. A bar of a validation covers the bar of its epoch."""
        return Tqdm(
            position=0,
            disable=self.is_disabled,
            leave=False,
            ncols=bar_columns(),
            file=sys.stdout,
            bar_format=self.BAR_FORMAT,
        )

    init_sanity_tqdm = init_train_tqdm = init_validation_tqdm = make_bar
    init_test_tqdm = init_predict_tqdm = make_bar

    def get_metrics(self, trainer: Any, pl_module: Any) -> dict[str, Any]:
        """Return the metrics for which the terminal has room behind the bar."""
        room = bar_columns() // 20 - 2
        return dict([*trainer.progress_bar_metrics.items()][:room])

    def on_train_start(self, trainer: Any, *_: Any) -> None:
        super().on_train_start()
        bar = self.train_progress_bar
        # Lightning does not call this hook if it resumes in the middle of an epoch. The
        # rate counts the batches from there on.
        self.on_train_epoch_start(trainer)
        bar.n = bar.initial = batch_index(trainer) + 1

    def on_train_epoch_start(self, trainer: Any, *_: Any) -> None:
        """Begin the bar again, with the number of batches in this epoch."""
        super().on_train_epoch_start(trainer)
        self.train_progress_bar.set_description(title(trainer))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        """Redraw the bar if REFRESH_S seconds have passed, or if the epoch ends."""
        if time.monotonic() - self.shown_at < REFRESH_S and not trainer.is_last_batch:
            return
        self.shown_at = time.monotonic()
        bar = self.train_progress_bar
        bar.ncols = bar_columns()
        bar.n = batch_index(trainer) + 1
        # Lightning has read these numbers already: nothing waits for the GPU
        bar.set_postfix(self.get_metrics(trainer, pl_module))

    def on_exception(self, *_: Any) -> None:
        """Close the bars, so that the error message begins on a clean line."""
        for bar in vars(self).values():
            if isinstance(bar, Tqdm):
                bar.close()


def bar_columns() -> int:
    """Return the width of a bar. It leaves room for the ^C of a terminal."""
    return shutil.get_terminal_size().columns - 3
