"""How far a training is: a table of the epochs, and in a terminal a bar below it."""

import sys
import time
from typing import Any

from lightning import Callback
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm

from lightbase.compat import batch_index
from lightbase.model.curves import is_of_class
from lightbase.run.record import best_callback, recorder_of

REFRESH_S = 0.2  # seconds between two redraws; a redraw takes 0.1 ms


class EpochLines(Callback):
    """Prints a table with a row for each epoch: the metrics with four significant
    digits, and the seconds since the row before or since the start. Validations and
    checkpoints are part of this time. The best epoch so far is marked.

    began: When the newest row was printed, in seconds of time.monotonic.
    columns: The metrics of the table, in their order.
    """

    began = 0.0
    columns: list[str] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.began = time.monotonic()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Print the newest row of the history, without values of single classes. The
        names of the columns are above the first row, and again when there are more."""
        texts = {}
        for name, value in recorder_of(trainer).history[-1].items():
            if name != "epoch" and not is_of_class(name):
                texts[name] = f"{value:#.4g}"
        if len(texts) > len(self.columns):
            # train before val, and the loss first
            self.columns = sorted(
                texts, key=lambda x: (x.split("/")[0], "/loss" not in x, x)
            )
            pl_module.print(self.line("epoch", {x: x for x in texts}, "time"))
        now = time.monotonic()
        line = self.line(epoch_text(trainer), texts, f"{now - self.began:.1f} s")
        self.began = now
        best = best_callback(trainer)
        if best and best.is_better(trainer) and texts.get(str(best.monitor)) != "nan":
            line += "  best"
        pl_module.print(line)
        sys.stdout.flush()

    def line(self, epoch: str, texts: dict[str, str], time: str) -> str:
        """Return a line of the table, with a text for each metric."""
        # 1.234e-06 is the longest number
        cells = [f"{texts.get(x, '-'):>{max(len(x), 9)}}" for x in self.columns]
        return "  ".join([f"{epoch:7}", *cells, f"{time:>8}"])


def epoch_text(trainer: Any) -> str:
    """Return "1/3", or "1" if the training has no limit of epochs."""
    text = str(trainer.current_epoch + 1)
    if trainer.max_epochs > 0:
        text += f"/{trainer.max_epochs}"
    return text


class TrainingProgressBar(TQDMProgressBar):
    """Lightning's progress bars, which vanish at their end. The bar of an epoch is
    redrawn at most every REFRESH_S seconds, and after its last batch.

    refresh_rate: In batches. It applies to the bars of validation, test and prediction.
    """

    shown_at = 0.0  # time of the last redraw, in seconds of time.monotonic

    def make_bar(self) -> Tqdm:
        """Return a bar. A bar of a validation covers the bar of its epoch."""
        return Tqdm(
            position=0,
            disable=self.is_disabled,
            leave=False,
            dynamic_ncols=True,
            file=sys.stdout,
            bar_format=self.BAR_FORMAT,
        )

    init_sanity_tqdm = init_train_tqdm = init_validation_tqdm = make_bar
    init_test_tqdm = init_predict_tqdm = make_bar

    def get_metrics(self, trainer: Any, pl_module: Any) -> dict[str, Any]:
        """Return the metrics without the logger's version, which Lightning adds."""
        return dict(trainer.progress_bar_metrics)

    def on_train_epoch_start(self, trainer: Any, *_: Any) -> None:
        """Begin the bar again, with the number of batches in this epoch."""
        super().on_train_epoch_start(trainer)
        self.train_progress_bar.set_description(f"Epoch {epoch_text(trainer)}")

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if time.monotonic() - self.shown_at < REFRESH_S and not trainer.is_last_batch:
            return
        self.shown_at = time.monotonic()
        bar = self.train_progress_bar
        bar.n = batch_index(trainer) + 1
        # Lightning has read these numbers already: nothing waits for the GPU
        bar.set_postfix(self.get_metrics(trainer, pl_module))

    def on_exception(self, *_: Any) -> None:
        """Close the bars, so that the error message begins on a clean line."""
        for bar in vars(self).values():
            if isinstance(bar, Tqdm):
                bar.close()
