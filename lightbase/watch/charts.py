"""Charts and pictures for loggers and for files, drawn by matplotlib without a screen."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from lightning.pytorch.loggers import Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from torch import Tensor

if TYPE_CHECKING:  # imported only where something is drawn
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ["#4c78a8", "#72b7b2", "#f58518", "#e45756", "#54a24b", "#b279a2", "#bab0ac"]
CELLS = 25  # images in a grid


def new_figure(
    width: float, height: float, title: str = "", x: str = "", y: str = ""
) -> tuple["Figure", "Axes"]:
    """width, height: inches of 100 pixels. TensorBoard shows 350 pixels in width: larger pictures
    get small letters."""
    from matplotlib.figure import Figure

    figure = Figure((width, height), dpi=100, layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title, fontsize=9)
    axes.set(xlabel=x, ylabel=y)
    return figure, axes


def write(loggers: Sequence[Logger], tag: str, figure: "Figure", step: int) -> None:
    """To those that take pictures, MLflow as the artifact TAG/STEP.png."""
    for logger in loggers:
        if isinstance(logger, TensorBoardLogger):
            add_image(logger.experiment, tag, figure, step)
        elif isinstance(logger, WandbLogger):
            logger.log_image(tag, [pixels(figure)], step)
        elif isinstance(logger, MLFlowLogger):
            logger.experiment.log_figure(logger.run_id, figure, f"{tag}/{step}.png")


def has_pictures(loggers: Sequence[Logger]) -> bool:
    """Whether one of them takes pictures."""
    return any(
        isinstance(logger, TensorBoardLogger | WandbLogger | MLFlowLogger) for logger in loggers
    )


def add_image(writer: Any, tag: str, figure: "Figure", step: int) -> None:
    """writer: of torch.utils.tensorboard."""
    writer.add_image(tag, pixels(figure), step, dataformats="HWC")


def pixels(figure: "Figure") -> np.ndarray:
    """uint8 (H, W, 3)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3]


def pie(shares: Sequence[float], labels: Sequence[str], title: str) -> "Figure":
    """shares: in [0, 1]. Labels stand in a legend: those of thin slices would cover each other."""
    figure, axes = new_figure(4.8, 2.2, title)
    wedges, *_ = axes.pie(shares, colors=COLOURS, startangle=90, counterclock=False)
    axes.legend(
        wedges, labels, loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize=8
    )
    return figure


def confusion_matrix(counts: Tensor, classes: Sequence[str], title: str) -> "Figure":
    """counts: int (classes, classes), rows are true classes. The colour is the share of its row, so
    that rare classes are seen too; names stand beside up to 50 classes, counts in the cells of up
    to 20."""
    num = len(classes)
    side = min(10.0, max(3.6, 0.34 * num + 1.0))
    figure, axes = new_figure(side, side, title, "predicted", "true")
    shares = counts / counts.sum(1, keepdim=True).clamp(min=1)
    axes.imshow(shares.numpy(), cmap="Blues", vmin=0, vmax=1)
    if num <= 50:
        names = [shorten(name) for name in classes]
        axes.set_xticks(
            range(num), names, rotation=0 if max(map(len, names)) < 3 else 90, fontsize=8
        )
        axes.set_yticks(range(num), names, fontsize=8)
    if num <= 20:
        for i, j in counts.nonzero().tolist():
            colour = "white" if shares[i, j] > 0.5 else "black"
            axes.text(
                j, i, str(counts[i, j].item()), ha="center", va="center", fontsize=7, color=colour
            )
    return figure


def true_against_predicted(true: Tensor, predicted: Tensor, title: str) -> "Figure":
    """Both (N, ...); at most 5,000 points of each are drawn, evenly spread."""
    figure, axes = new_figure(3.6, 3.6, f"{title}: {len(true):,} samples", "true", "predicted")
    true, predicted = true.reshape(len(true), -1), predicted.reshape(len(true), -1)
    every = math.ceil(len(true) / 5000)
    for i, colour in zip(range(true.shape[1]), COLOURS, strict=False):
        axes.plot(
            true[::every, i], predicted[::every, i], ".", markersize=2, alpha=0.5, color=colour
        )
    low, high = min(true.min(), predicted.min()), max(true.max(), predicted.max())
    axes.plot(
        [low, high], [low, high], color="black", linewidth=0.8
    )  # where a perfect prediction is
    return figure


def image_grid(
    images: Sequence[Tensor], texts: Sequence[str], colours: Sequence[str], title: str
) -> "Figure":
    """images: up to 25 of one shape (C, H, W), uint8 or float; a text in a colour above each."""
    columns, rows = 5, max(1, math.ceil(len(images) / 5))
    width, text_height = 0.9, 0.34  # inches
    height = text_height + width
    figure, axes = new_figure(columns * width, rows * height + 0.4)
    figure.suptitle(title, fontsize=9)
    axes.set_axis_off()
    for k, (image, text, colour) in enumerate(zip(images, texts, colours, strict=True)):
        left, top = (k % columns) * width, (k // columns) * height
        extent = (left + 0.04, left + width - 0.04, top + height - 0.04, top + text_height)
        axes.imshow(
            displayable(image), extent=extent, interpolation="nearest", cmap="gray", vmin=0, vmax=1
        )
        x, y = left + width / 2, top + text_height / 2
        axes.text(x, y, text, color=colour, ha="center", va="center", fontsize=7, linespacing=0.9)
    axes.set(xlim=(0, columns * width), ylim=(rows * height, 0))
    return figure


def displayable(image: Tensor) -> np.ndarray:
    """An image (C, H, W) as floats in [0, 1]: (H, W, 3) with three channels, otherwise the mean of
    them (H, W). Bytes are divided by 255, other numbers stretched from the least to the
    greatest."""
    x = image.detach().cpu().float()
    x = (
        (x - x.min()) / (x.max() - x.min()).clamp(min=1e-12)
        if image.is_floating_point()
        else x / 255
    )
    return (x.permute(1, 2, 0) if len(x) == 3 else x.mean(0)).numpy()


def shorten(name: str, length: int = 14) -> str:
    return name if len(name) <= length else f"{name[: length - 1]}…"
