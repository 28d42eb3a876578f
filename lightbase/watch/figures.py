"""Pictures for loggers: what the network gets right and wrong, drawn without a screen."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from lightning import Callback, LightningModule
from lightning.pytorch.loggers import Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.utilities.seed import isolate_rng
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor
from torchmetrics.functional.classification import multiclass_confusion_matrix

from lightbase.curves import gather, newest_step
from lightbase.data.batches import ResumableLoader
from lightbase.data.module import BaseDataModule

COLOURS = ["#4c78a8", "#72b7b2", "#f58518", "#e45756", "#54a24b", "#b279a2", "#bab0ac"]
RIGHT, WRONG = "#2a7a2a", "#c03030"
NUM_IMAGES = 25  # of a grid
NUM_COLUMNS = 5
NUM_POINTS = 5000  # of a plot of predicted numbers


class PredictionFigures(Callback):
    """Draws pictures of the predictions in view/, for validations and the test.

    For classes: `confusion_matrix/val`; of images also `predictions/val`, a fixed grid of samples,
    and `mistakes/val`, the samples whose true class got the lowest probability. For numbers as
    targets: `predictions/val`, true against predicted numbers. The same with `/test`. At the start
    `inputs/train`, images as the network gets them.

    It needs a BaseDataModule, and the logits (N, classes) or the predicted numbers, in the shape of
    the targets, as output of validation_step and test_step. Without them it draws nothing.

    every_n_epochs: of the pictures of validations. The last validation is always drawn.
    """

    def __init__(self, every_n_epochs: int) -> None:
        self.every_n_epochs = every_n_epochs
        # batches of the newest evaluation that is not drawn yet. For classes each holds, all (N,):
        # true class, predicted class, log-probability of the predicted, of the true class;
        # for numbers: true and predicted numbers, (N, ...)
        self.batches: list[tuple[Tensor, ...]] = []
        self.has_pictures = False

    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        # only the first process's loggers write
        self.has_pictures = trainer.strategy.broadcast(has_pictures(trainer.loggers))

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        if self._draws(trainer) and trainer.datamodule.image_shape and trainer.global_step == 0:
            figure = input_figure(trainer.datamodule, pl_module.device)
            log_figure(trainer.loggers, "view/inputs/train", figure, 0)

    def on_validation_batch_end(
        self, trainer: Any, _: Any, outputs: Any, batch: Any, batch_idx: int, *__: Any
    ) -> None:
        if batch_idx == 0:
            self.batches = []
        if trainer.sanity_checking or not self._draws(trainer):
            return
        targets = batch[1] if isinstance(batch, tuple | list) else None
        if not isinstance(outputs, Tensor) or not isinstance(targets, Tensor):
            return
        outputs = outputs.detach().float()
        if are_logits(outputs, targets):
            log_probabilities = outputs.log_softmax(1)
            best, predicted = log_probabilities.max(1)
            of_true = log_probabilities.gather(1, targets[:, None])[:, 0]
            self.batches.append((targets, predicted, best, of_true))
        elif outputs.shape == targets.shape and targets.is_floating_point():
            # a compiled network may use the memory of its outputs again
            self.batches.append((targets, outputs.clone()))

    def on_test_batch_end(self, *args: Any) -> None:
        self.on_validation_batch_end(*args)

    def on_validation_end(self, trainer: Any, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking and (trainer.current_epoch + 1) % self.every_n_epochs == 0:
            self._draw_predictions(trainer, "val", trainer.val_dataloaders)

    def on_train_end(self, trainer: Any, pl_module: LightningModule) -> None:
        self._draw_predictions(trainer, "val", trainer.val_dataloaders)

    def on_test_end(self, trainer: Any, pl_module: LightningModule) -> None:
        self._draw_predictions(trainer, "test", trainer.test_dataloaders)

    def _draws(self, trainer: Any) -> bool:
        return self.has_pictures and isinstance(trainer.datamodule, BaseDataModule)

    def _draw_predictions(self, trainer: Any, stage: str, loader: Any) -> None:
        if not self.batches or not isinstance(loader, ResumableLoader):
            return
        indices, true, predicted, *log_probabilities = self._gather(loader)
        if not trainer.is_global_zero:
            return
        if log_probabilities:
            columns = (indices, true, predicted, *log_probabilities)
            figures = class_figures(loader.dataset, columns, trainer.datamodule, stage)
        else:
            figures = {"predictions": true_against_predicted(true, predicted, stage)}
        for kind, figure in figures.items():
            log_figure(trainer.loggers, f"view/{kind}/{stage}", figure, newest_step(trainer))

    def _gather(self, loader: ResumableLoader) -> list[Tensor]:
        """The samples' indices in the data set, and the columns of `batches`.

        They hold the samples of all processes, in the order of the data set.
        """
        order = torch.tensor([i for batch in loader.batch_sampler for i in batch])
        columns = [torch.cat(column).cpu() for column in zip(*self.batches, strict=True)]
        self.batches = []
        parts = gather([order[: len(columns[0])], *columns])
        columns = [torch.cat(column) for column in zip(*parts, strict=True)]
        by_index = columns[0].argsort()
        return [column[by_index] for column in columns]


def input_figure(data: BaseDataModule, device: torch.device) -> Figure:
    """Training images as the network gets them, with their classes."""
    samples = data.splits["train"]
    images, targets = samples.__getitems__(spread(len(samples), NUM_IMAGES))
    # the training draws the same random numbers with and without this figure
    with torch.no_grad(), isolate_rng(include_cuda=device.type == "cuda"):
        inputs = data.normalize(data.augment(images.to(device))).cpu()
    texts = [""] * len(inputs)
    if data.num_classes and targets.dim() == 1 and not targets.is_floating_point():
        texts = [shorten(data.classes[target], 9) for target in targets.tolist()]
    title = "training images as the network gets them"
    return image_grid(inputs, texts, ["black"] * len(inputs), title)


def class_figures(
    dataset: Any, columns: Sequence[Tensor], data: BaseDataModule, stage: str
) -> dict[str, Figure]:
    """Confusion matrix, and for images predictions and mistakes.

    columns: of the evaluated samples, each (N,): index in the data set, true class, predicted
    class, log-probability of the predicted class, of the true class.
    """
    indices, true, predicted, best, of_true = columns
    num_classes = max(len(data.classes), int(torch.maximum(true, predicted).max()) + 1)
    names = class_names(data.classes, num_classes)
    is_right = predicted == true
    counts = multiclass_confusion_matrix(predicted, true, num_classes)
    right = f"{int(is_right.sum()):,} of {len(true):,} right ({is_right.double().mean():.2%})"
    figures = {"confusion_matrix": confusion_matrix(counts, names, f"{stage}: {right}")}
    if not data.image_shape:
        return figures

    def grid(rows: Tensor, title: str) -> Figure:
        images: Any = dataset.__getitems__(indices[rows].tolist())[0] if len(rows) else []
        texts, colours = [], []
        for i in rows.tolist():
            text = f"{shorten(names[predicted[i]], 9)} {best[i].exp():.0%}"
            texts.append(text if is_right[i] else f"{text}\nis {shorten(names[true[i]], 9)}")
            colours.append(RIGHT if is_right[i] else WRONG)
        return image_grid(images, texts, colours, f"{stage}: {title}")

    fixed = torch.tensor(spread(len(indices), NUM_IMAGES))
    figures["predictions"] = grid(fixed, "predicted class, its probability")
    wrong = (~is_right).nonzero()[:, 0]
    worst = wrong[of_true[wrong].argsort()][:NUM_IMAGES]
    title = f"the worst of {len(wrong):,} mistakes" if len(wrong) else "no mistakes"
    figures["mistakes"] = grid(worst, title)
    return figures


def are_logits(outputs: Any, targets: Any) -> bool:
    """Whether these are logits (N, classes) and labels (N,)."""
    if not isinstance(outputs, Tensor) or not isinstance(targets, Tensor):
        return False
    has_shapes = outputs.dim() == 2 and targets.shape == outputs.shape[:1]
    return has_shapes and not targets.is_floating_point()


def class_names(names: list[str], num_classes: int) -> list[str]:
    """The names, and numbers for the classes that have none."""
    return [*names, *map(str, range(len(names), num_classes))]


def spread(num: int, count: int) -> list[int]:
    """At most `count` of the indices below `num`, evenly spread: data may be sorted by class."""
    count = min(num, count)
    return [i * num // count for i in range(count)]


def has_pictures(loggers: Sequence[Logger]) -> bool:
    """Whether one of the loggers takes pictures."""
    takers = (TensorBoardLogger, WandbLogger, MLFlowLogger)
    return any(isinstance(logger, takers) for logger in loggers)


def log_figure(loggers: Sequence[Logger], tag: str, figure: Figure, step: int) -> None:
    """Write a picture to the loggers that take one; to MLflow as the artifact TAG/STEP.png."""
    for logger in loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.experiment.add_figure(tag, figure, step)
        elif isinstance(logger, WandbLogger):
            logger.log_image(tag, [figure], step)
        elif isinstance(logger, MLFlowLogger):
            logger.experiment.log_figure(logger.run_id, figure, f"{tag}/{step}.png")


def new_figure(
    width: float, height: float, title: str = "", x: str = "", y: str = ""
) -> tuple[Figure, Axes]:
    """width, height: inches of 100 pixels. TensorBoard shrinks what is wider than 350 pixels."""
    figure = Figure((width, height), dpi=100, layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title, fontsize=9)
    axes.set(xlabel=x, ylabel=y)
    return figure, axes


def pie(shares: Sequence[float], labels: Sequence[str], title: str) -> Figure:
    """shares: in [0, 1]. Labels are in a legend: beside thin slices they would overlap."""
    figure, axes = new_figure(4.8, 2.2, title)
    wedges, *_ = axes.pie(shares, colors=COLOURS, startangle=90, counterclock=False)
    axes.legend(
        wedges, labels, loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize=8
    )
    return figure


def confusion_matrix(counts: Tensor, classes: Sequence[str], title: str) -> Figure:
    """counts: int (classes, classes), rows are true classes.

    The colour is the share of the row, so rare classes are visible. Up to 50 classes have names, up
    to 20 have counts in the cells.
    """
    num = len(classes)
    side = min(10.0, max(3.6, 0.34 * num + 1.0))
    figure, axes = new_figure(side, side, title, "predicted", "true")
    shares = counts / counts.sum(1, keepdim=True).clamp(min=1)
    axes.imshow(shares.numpy(), cmap="Blues", vmin=0, vmax=1)
    if num <= 50:
        names = [shorten(name) for name in classes]
        rotation = 0 if max(map(len, names)) < 3 else 90
        axes.set_xticks(range(num), names, rotation=rotation, fontsize=8)
        axes.set_yticks(range(num), names, fontsize=8)
    if num <= 20:
        style: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 7}
        for i, j in counts.nonzero().tolist():
            colour = "white" if shares[i, j] > 0.5 else "black"
            axes.text(j, i, str(counts[i, j].item()), color=colour, **style)
    return figure


def true_against_predicted(true: Tensor, predicted: Tensor, title: str) -> Figure:
    """Both (N, ...). At most 5,000 samples are drawn, evenly spread."""
    figure, axes = new_figure(3.6, 3.6, f"{title}: {len(true):,} samples", "true", "predicted")
    every = math.ceil(len(true) / NUM_POINTS)
    x = true.reshape(len(true), -1)[::every]
    y = predicted.reshape(len(true), -1)[::every]
    for i, colour in zip(range(x.shape[1]), COLOURS, strict=False):
        axes.plot(x[:, i], y[:, i], ".", markersize=2, alpha=0.5, color=colour)
    ends = [min(true.min(), predicted.min()), max(true.max(), predicted.max())]
    axes.plot(ends, ends, color="black", linewidth=0.8)  # where perfect predictions are
    return figure


def image_grid(
    images: Sequence[Tensor] | Tensor, texts: Sequence[str], colours: Sequence[str], title: str
) -> Figure:
    """images: up to 25 of one shape (C, H, W), uint8 or float; each has its text above."""
    num_rows = max(1, math.ceil(len(images) / NUM_COLUMNS))
    width, text_height = 0.9, 0.34  # inches
    height = text_height + width
    figure, axes = new_figure(NUM_COLUMNS * width, num_rows * height + 0.4)
    figure.suptitle(title, fontsize=9)
    axes.set_axis_off()
    style: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 7, "linespacing": 0.9}
    for k, (image, text, colour) in enumerate(zip(images, texts, colours, strict=True)):
        left, top = (k % NUM_COLUMNS) * width, (k // NUM_COLUMNS) * height
        extent = (left + 0.04, left + width - 0.04, top + height - 0.04, top + text_height)
        shown = displayable(image)
        axes.imshow(shown, extent=extent, interpolation="nearest", cmap="gray", vmin=0, vmax=1)
        axes.text(left + width / 2, top + text_height / 2, text, color=colour, **style)
    axes.set(xlim=(0, NUM_COLUMNS * width), ylim=(num_rows * height, 0))
    return figure


def displayable(image: Tensor) -> np.ndarray:
    """An image (C, H, W) as floats in [0, 1]: (H, W, 3), or (H, W) unless it has three channels.

    Bytes are divided by 255; other numbers are stretched from the least to the greatest.
    """
    x = image.detach().cpu().float()
    if image.is_floating_point():
        x = (x - x.min()) / (x.max() - x.min()).clamp(min=1e-12)
    else:
        x = x / 255
    return (x.permute(1, 2, 0) if len(x) == 3 else x.mean(0)).numpy()


def shorten(name: str, length: int = 14) -> str:
    return name if len(name) <= length else f"{name[: length - 1]}…"
