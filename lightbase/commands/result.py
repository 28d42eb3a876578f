"""The result of a training, for scripts and notebooks: `lightbase.train` returns it."""

from itertools import chain
from pathlib import Path
from typing import Any

from lightning import LightningModule
from matplotlib.figure import Figure

from lightbase.core.curves import is_of_class
from lightbase.core.pictures import Picture
from lightbase.core.record import best_callback, recorder_of


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
        if best:
            self.best_epoch = best.best_epoch or None

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics of training and validation in the best epoch, or in the last one
        if none is the best, with its number, "epoch". Then the content of the dict."""
        row: dict[str, Any] = {}
        for row in self.epochs:
            if row["epoch"] == self.best_epoch:
                break
        return row | self

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
        figure.supxlabel("epoch")
        losses, others = figure.subplots(1, 2)
        history = self.history
        for name in history:
            if name != "epoch" and not is_of_class(name):
                axes = others
                if name.endswith("loss"):
                    axes = losses
                axes.plot(history["epoch"], history[name], ".-", label=name)
                axes.legend()
        return figure
