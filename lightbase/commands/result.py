"""The result of a training, for scripts and notebooks: `lightbase.train` returns it."""

from itertools import chain
from pathlib import Path
from typing import Any

from lightning import LightningModule
from matplotlib.figure import Figure

from lightbase.core.curves import is_of_class
from lightbase.core.pictures import Picture
from lightbase.core.record import best_callback, recorder_of
from lightbase.core.tables import as_text


class Result(dict[str, Any]):
    """The result of a training: the dict of metrics.json, with more attributes.

    module: The module, with the weights of the best epoch.
    folder: The folder of the run. None with fast_dev_run.
    best_epoch: The number of the best epoch, from 1. None if no metric compares epochs.
    epochs: The metrics of each epoch, {curve: number}, with its number, "epoch".
    """

    def __init__(self, values: dict[str, Any], module: LightningModule) -> None:
        super().__init__(values)
        self.module = module
        self.folder: Path | None = None
        self.best_epoch: int | None = None
        recorder = recorder_of(module.trainer)
        self.epochs = recorder.history
        if recorder.run:
            self.folder = recorder.run.folder
        best = best_callback(module.trainer)
        if best and best.monitor:
            self.best_epoch = best.best_epoch

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics of training and validation in the best epoch, or in the last one
        if none is the best, with its number, "epoch". Then the content of the dict."""
        rows = {row["epoch"]: row for row in self.epochs}
        row = rows.get(self.best_epoch, [{}, *self.epochs][-1])
        return {**row, **self}

    @property
    def history(self) -> Any:
        """The metrics of all epochs: a DataFrame of pandas with a row for each epoch,
        or {curve: list} if pandas is not installed. An epoch without a validation has
        no values in val/: NaN or None."""
        names = dict.fromkeys(chain(*self.epochs))
        columns = {name: [row.get(name) for row in self.epochs] for name in names}
        try:
            import pandas
        except ImportError:
            return columns
        return pandas.DataFrame(columns)

    def plot(self) -> Figure:
        """Draw the curves of training and validation over the epochs: the losses on the
        left, and the other metrics on the right."""
        figure = Picture((9, 3), layout="constrained")
        history = self.history
        for number, is_left in enumerate((True, False), 1):
            axes = figure.add_subplot(1, 2, number, xlabel="epoch")
            for name in history:
                is_curve = name != "epoch" and not is_of_class(name)
                if is_curve and is_left == name.endswith("loss"):
                    axes.plot(history["epoch"], history[name], ".-", label=name)
            if axes.lines:
                axes.legend()
        return figure

    def __repr__(self) -> str:
        """Return a line for a notebook. `dict(result)` shows all values."""
        metrics = [f"{name} {as_text(self.metrics[name])}" for name in self.metrics]
        return f"Result({self.folder}, {', '.join(metrics)})"
