"""The table and the bar that show how far a training is.

`EpochLines` prints a table with a row for each epoch. It is enough for a log file.
`TrainingProgressBar` is Lightning's bar, below the lines, in a terminal.
"""

import shutil
import sys
import time
from collections.abc import Iterable
from typing import Any

from lightning import Callback
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm

from lightbase.compat import batch_index
from lightbase.model.curves import is_of_class
from lightbase.run.checkpoint import RunCheckpoint
from lightbase.run.record import best_callback, recorder_of

REST_WIDTH = 23  # of a row beside the metrics: 99/1000, 9999.9 s and the mark

REFRESH_S = 0.2  # seconds between two redraws; a redraw takes 0.1 ms


class EpochLines(Callback):
    """Prints a table with a row for each epoch: the metrics with four significant
    digits, and the seconds since the row before or since the start. Validations and
    checkpoints are part of this time. The best epoch so far is marked.

    began: When the newest row was printed, in seconds of time.monotonic.
    num_metrics: The highest number of metrics in an epoch so far.
    columns: The metrics that are shown, in their order.
    """

    began = 0.0
    num_metrics = 0
    columns: list[str] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.began = time.monotonic()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Print the newest row of the history, without values of single classes. The
        names of the columns are above the first row, and above the first row of an
        epoch with a validation."""
        texts = {}
        for name, value in recorder_of(trainer).history[-1].items():
            if name != "epoch" and not is_of_class(name):
                texts[name] = f"{value:#.4g}"
        best = best_callback(trainer)
        if len(texts) > self.num_metrics:
            self.num_metrics = len(texts)
            self.columns = fitting_columns(texts, best)
            pl_module.print(self.line("epoch", {x: x for x in texts}, "time"))
        now = time.monotonic()
        line = self.line(epoch_text(trainer), texts, f"{now - self.began:.1f} s")
        self.began = now
        if best and best.is_better(trainer) and texts.get(str(best.monitor)) != "nan":
            line += "  best"
        pl_module.print(line)
        sys.stdout.flush()

    def line(self, epoch: str, texts: dict[str, str], time: str) -> str:
        """Return a line of the table, with a text for each metric."""
        cells = [f"{texts.get(x, '-'):>{column_width(x)}}" for x in self.columns]
        return "  ".join([f"{epoch:7}", *cells, f"{time:>8}"])


def column_width(name: str) -> int:
    """Return the width of a metric's column. 1.234e-06 is the longest number."""
    return max(len(name), 9)


def fitting_columns(names: Iterable[str], best: RunCheckpoint | None) -> list[str]:
    """Return the metrics for which a line has room, in the order of the table: train
    before val, and the loss first. The metric that compares epochs and the losses have
    room before others. A file has room for all."""
    room = shutil.get_terminal_size((999, 0)).columns - REST_WIDTH
    shown = []
    for name in sorted(
        names, key=lambda x: (best and best.monitor != x, "/loss" not in x)
    ):
        room -= column_width(name) + 2
        if room >= 0:
            shown.append(name)
    return sorted(shown, key=lambda x: (x.split("/")[0], "/loss" not in x, x))


def epoch_text(trainer: Any) -> str:
    """Return "1/3", or "1" if the training has no limit of epochs."""
    text = str(trainer.current_epoch + 1)
    if trainer.max_epochs > 0:
        text += f"/{trainer.max_epochs}"
    return text


class TrainingProgressBar(TQDMProgressBar):
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
        self.train_progress_bar.set_description(f"Epoch {epoch_text(trainer)}")

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
