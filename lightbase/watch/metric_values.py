"""Files and pictures of metrics that are no curves, such as a confusion matrix or a ROC curve."""

import json
import warnings
from typing import Any

import torch
from lightning import Callback, LightningModule
from matplotlib import pyplot
from matplotlib.figure import Figure
from torchmetrics import Metric

from lightbase.curves import Stage, newest_step, run_folder
from lightbase.errors import first_line
from lightbase.folder import write_whole
from lightbase.metrics import in_keys
from lightbase.module import BaseModule
from lightbase.ranks import say
from lightbase.watch.figures import has_pictures, log_figure


class MetricValues(Callback):
    """Writes metrics/STAGE_NAME.json into the run's folder after each validation and test, and the
    picture view/NAME/STAGE. Prints once for each metric where it is.

    every_n_epochs: of the pictures of validations; 0 draws none.
    """

    def __init__(self, every_n_epochs: int) -> None:
        self.every_n_epochs = every_n_epochs
        self.names: set[str] = set()  # of metrics that were printed

    def on_validation_end(self, trainer: Any, pl_module: LightningModule) -> None:
        if trainer.sanity_checking:
            return
        epoch = trainer.current_epoch + 1
        is_last = epoch == trainer.max_epochs
        draws = bool(self.every_n_epochs) and (is_last or epoch % self.every_n_epochs == 0)
        self._write(trainer, pl_module, "val", draws)

    def on_test_end(self, trainer: Any, pl_module: LightningModule) -> None:
        self._write(trainer, pl_module, "test", self.every_n_epochs > 0)

    def _write(self, trainer: Any, model: LightningModule, stage: Stage, draws: bool) -> None:
        if not isinstance(model, BaseModule) or not trainer.is_global_zero:
            return
        means = model.curves_callback.means[stage]
        metrics = dict(means.metrics.items(copy_state=False))
        for name, value in means.others.items():
            file = run_folder(trainer) / "metrics" / f"{stage}_{in_keys([name])[0]}.json"
            file.parent.mkdir(exist_ok=True)
            write_whole(file, json.dumps(as_lists(value)))
            lines = [f"Metric {name} is no curve: its values are in metrics/{file.name}"]
            if draws and name in metrics and has_pictures(trainer.loggers):
                figure = plotted(metrics[name], value)
                if isinstance(figure, Figure):
                    tag = f"view/{name}/{stage}"
                    log_figure(trainer.loggers, tag, figure, newest_step(trainer))
                else:
                    lines.append(f"Metric {name} has no picture: {figure}")
            if name not in self.names:
                say("\n".join(lines))
                self.names.add(name)


def plotted(metric: Metric, value: Any) -> Figure | str:
    """The metric's own picture of its value, or why there is none."""
    try:
        with warnings.catch_warnings(action="ignore"):  # numpy's, about torchmetrics
            figure, _ = metric.plot(value)
    except Exception as error:  # a picture that fails does not end a training
        return first_line(error)
    pyplot.close(figure)
    return figure  # type: ignore[no-any-return]


def as_lists(value: Any) -> Any:
    """The value with tensors as nested lists, as JSON can hold it."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {str(key): as_lists(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [as_lists(part) for part in value]
    return value if isinstance(value, str | int | float | None) else str(value)
