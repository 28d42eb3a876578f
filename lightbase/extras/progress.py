"""The lines and the bar that show how far a training is.

`EpochLines` prints a line for each epoch. It is enough for a log file.
`TrainingProgressBar` is Lightning's bar, below the lines, in a terminal.
"""

import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, TextIO

from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm
from lightning.pytorch.loggers import Logger

from lightbase.core.compat import batch_index
from lightbase.core.curves import is_of_class
from lightbase.core.errors import wrapped
from lightbase.core.extra import Extra
from lightbase.core.signals import ERASE_LINE

REFRESH_S = 0.2  # seconds between two redraws; a redraw takes 0.1 ms


class EpochLines(Extra):
    """Prints a line with the metrics after each epoch, and the seconds since the line
    before it or since the start. Validations and checkpoints are part of this time.

    began: When the newest line was printed, in seconds of time.monotonic.
    validated_epoch: The epoch of the last validation; -1 before the first one.
    """

    began = 0.0
    validated_epoch = -1

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.began = time.monotonic()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self.validated_epoch = trainer.current_epoch

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Print the line. Learning rates, values of an earlier validation and values of
        single classes are left out."""
        hidden = ["lr"]
        # without a validation in this epoch, val/ has the values of an earlier one
        if self.validated_epoch != trainer.current_epoch:
            hidden.append("val")
        texts = []
        for name, value in trainer.callback_metrics.items():
            if name.split("/")[0] not in hidden and not is_of_class(name):
                texts.append(f"{name} {value:.4f}")
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
    """

    shown_at = 0.0  # time of the last redraw, in seconds of time.monotonic

    def __init__(self) -> None:
        # in batches; it applies to the bars of validation and test
        super().__init__(refresh_rate=10)

    @contextlib.contextmanager
    def around_run(self, *_: Any) -> Iterator[Sequence[Logger]]:
        """Within this context, all that a training prints begins on a line of its own,
        if it is printed in a terminal: see `BesideBar`."""
        with contextlib.ExitStack() as stack:
            if sys.stdout.isatty():
                stack.enter_context(contextlib.redirect_stdout(BesideBar(sys.stdout)))
            if sys.stderr.isatty():
                stack.enter_context(contextlib.redirect_stderr(BesideBar(sys.stderr)))
            yield ()

    def make_bar(self) -> Tqdm:
        """Return a bar. A bar of a validation covers the bar of its epoch."""
        return NarrowBar(
            position=0,
            disable=self.is_disabled,
            leave=False,
            delay=1e-9,  # without it, an empty bar is drawn here
            dynamic_ncols=True,
            file=sys.stdout,
            smoothing=0,
            bar_format=self.BAR_FORMAT,
        )

    init_sanity_tqdm = init_train_tqdm = init_validation_tqdm = make_bar
    init_test_tqdm = init_predict_tqdm = make_bar

    def get_metrics(self, trainer: Any, pl_module: Any) -> dict[str, Any]:
        """Return what stands behind the bar, without the version of the logger."""
        return trainer.progress_bar_metrics  # type: ignore[no-any-return]

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
        self.train_progress_bar.n = batch_index(trainer) + 1
        # Lightning has read these numbers already: nothing waits for the GPU
        self.train_progress_bar.set_postfix(self.get_metrics(trainer, pl_module))

    def on_exception(self, *_: Any) -> None:
        """Close the bars, so that the error message begins on a clean line."""
        for value in vars(self).values():
            if isinstance(value, Tqdm):
                value.close()


class NarrowBar(Tqdm):
    """A bar that leaves room for the ^C of a terminal, and cuts no metric in two."""

    @property
    def format_dict(self) -> Any:
        """The arguments of tqdm's `format_meter`, with the metrics that fit."""
        options = super().format_dict
        if not options["ncols"]:  # not in a terminal
            return options
        options["ncols"] -= 2
        metrics = (options["postfix"] or "").split(", ")
        # Without a width, the bar has ten columns. One is enough.
        while (
            len(self.format_meter(**options | {"ncols": None})) > options["ncols"] + 9
        ):
            if not metrics:
                break
            metrics.pop()
            options["postfix"] = ", ".join(metrics)
        return options


class BesideBar:
    """stdout or stderr beside a progress bar in a terminal. Other text erases the bar
    before it is written. The next refresh draws the bar again, below the text.

    stream: The stream to write to. It has all other attributes.
    is_behind_bar: Whether the cursor of the terminal is behind a bar. tqdm begins each
        bar with a carriage return.
    """

    is_behind_bar = False

    def __init__(self, stream: TextIO) -> None:
        # tqdm compares streams by an attribute of this name
        self._wrapped = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapped, name)

    def write(self, text: str) -> int:
        """Write a text, and return the number of its characters."""
        is_other = text.strip() and not text.startswith("\r")
        if BesideBar.is_behind_bar and is_other:
            self._wrapped.write(ERASE_LINE)
        if text:
            BesideBar.is_behind_bar = text.startswith("\r") and bool(text.strip())
        return self._wrapped.write(text)
