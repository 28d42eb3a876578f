"""The table and the bar that show how far a training is.

`EpochLines` prints a table with a row for each epoch. It is enough for a log file.
`TrainingProgressBar` is Lightning's bar, below the lines, in a terminal.
"""

import math
import shutil
import sys
import time
from typing import Any

from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm

from lightbase.core.checkpoint import RunCheckpoint
from lightbase.core.compat import batch_index
from lightbase.core.curves import is_of_class
from lightbase.core.errors import say
from lightbase.core.extra import Extra
from lightbase.core.record import best_callback, recorder_of

EPOCH_WIDTH = 7  # 99/1000
TIME_WIDTH = 8  # 9999.9 s
REFRESH_S = 0.2  # seconds between two redraws; a redraw takes 0.1 ms


class EpochLines(Extra):
    """Prints a table with a row for each epoch: the metrics with four significant
    digits, and the seconds since the row before or since the start. Validations and
    checkpoints are part of this time. The best epoch so far is marked.

    began: When the newest row was printed, in seconds of time.monotonic.
    columns: The metrics that are shown, in their order. A terminal has no room for all
        of many metrics.
    names: The metrics for which the columns were chosen.
    """

    began = 0.0
    columns: list[str] = []
    names: set[str] = set()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.began = time.monotonic()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Print the newest row of the history, without values of single classes. The
        names of the columns are above the first row, and above a row with a new metric:
        the first epochs may have no validation."""
        history = recorder_of(trainer).history
        best = best_callback(trainer)
        texts = {}
        for name, value in history[-1].items():
            if name != "epoch" and not is_of_class(name):
                texts[name] = f"{value:#.4g}"
        lines = []
        if not texts.keys() <= self.names:
            self.names = self.names | texts.keys()
            self.columns = fitting_columns(self.names, best)
            lines.append(self.line("epoch", {x: x for x in self.names}, "time"))
        now = time.monotonic()
        epoch = title(trainer).removeprefix("Epoch ").replace(" of ", "/")
        line = self.line(epoch, texts, f"{now - self.began:.1f} s")
        if best and is_best(history, best):
            line += "  best"
        lines.append(line)
        self.began = now
        pl_module.print("\n".join(lines))
        sys.stdout.flush()

    def line(self, epoch: str, texts: dict[str, str], time: str) -> str:
        """Return a line of the table."""
        cells = [f"{epoch:{EPOCH_WIDTH}}"]
        for name in self.columns:
            cells.append(f"{texts.get(name, '-'):>{column_width(name)}}")
        return "  ".join([*cells, f"{time:>{TIME_WIDTH}}"])


def column_width(name: str) -> int:
    """Return the width of a metric's column. 1.234e-06 is the longest number."""
    return max(len(name), 9)


def fitting_columns(names: set[str], best: RunCheckpoint | None) -> list[str]:
    """Return the metrics for which the terminal has room, in their order: train before
    val, and the loss first. The metric that compares epochs and the losses have room
    before others. If some are left out, print their names."""
    order = sorted(
        names, key=lambda x: (*x.split("/")[:-1], not x.endswith("/loss"), x)
    )
    if not sys.stdout.isatty():
        return order
    room = shutil.get_terminal_size().columns - EPOCH_WIDTH - TIME_WIDTH - 8
    shown = set()
    for name in sorted(
        order, key=lambda x: (best and best.monitor != x, "/loss" not in x)
    ):
        room -= column_width(name) + 2
        if room >= 0:
            shown.add(name)
    if names - shown:
        say(f"TensorBoard also shows {', '.join(sorted(names - shown))}")
    return [name for name in order if name in shown]


def is_best(history: list[dict[str, Any]], best: RunCheckpoint) -> bool:
    """Return whether the newest epoch is better than all others: by the metric that
    compares epochs, and of equal values by the lower val/loss."""
    ranks = []
    for row in history:
        value = row.get(str(best.monitor), math.nan)
        if best.mode == "max":
            value = -value
        if math.isfinite(value):
            ranks.append((value, row.get("val/loss", math.inf), row["epoch"]))
    newest = history[-1]["epoch"]
    return bool(ranks) and min(ranks)[-1] == newest


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
