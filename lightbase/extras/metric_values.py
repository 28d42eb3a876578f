"""Files and pictures of metrics that are no curves, such as a confusion matrix or a ROC
curve."""

import json
import warnings
from typing import Any

from lightning import LightningModule
from lightning_utilities.core.apply_func import apply_to_collection
from matplotlib import pyplot
from matplotlib.figure import Figure
from torch import Tensor

from lightbase.core.curves import Stage, run_folder
from lightbase.core.errors import first_line, say_once
from lightbase.core.folder import write_whole
from lightbase.core.metrics import in_keys
from lightbase.core.module import BaseModule


def values_of(model: LightningModule, stage: Stage) -> dict[str, Any]:
    """The newest values of such metrics, by name."""
    return (
        model.curves_callback.means[stage].others
        if isinstance(model, BaseModule)
        else {}
    )


def write_values(trainer: Any, model: LightningModule, stage: Stage) -> None:
    """Write metrics/STAGE_NAME.json into the run's folder, and print once where it
    is."""
    for name, value in (
        values_of(model, stage).items() if trainer.is_global_zero else ()
    ):
        file = run_folder(trainer) / "metrics" / f"{stage}_{in_keys([name])[0]}.json"
        file.parent.mkdir(exist_ok=True)
        lists = apply_to_collection(value, Tensor, Tensor.tolist)
        write_whole(file, json.dumps(lists, default=str))
        say_once(f"Metric {name} is no curve: its values are in metrics/{file.name}")


def metric_figures(model: Any, stage: Stage) -> dict[str, Figure]:
    """The metrics' own pictures, by name. A line says which one has none."""
    figures: dict[str, Figure] = {}
    for name, value in values_of(model, stage).items():
        try:
            metric = model.curves_callback.means[stage].metrics[name]
            with warnings.catch_warnings(
                action="ignore"
            ):  # numpy's, about torchmetrics
                figure, _ = metric.plot(value)
            pyplot.close(figure)
            figures[name] = figure
        except Exception as error:  # a picture that fails does not end a training
            say_once(f"Metric {name} has no picture: {first_line(error)}")
    return figures
