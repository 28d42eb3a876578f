"""Charts and pictures for TensorBoard's IMAGES tab and for files, drawn by matplotlib without a screen."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

if TYPE_CHECKING:  # imported only where something is drawn
    from matplotlib.figure import Figure

COLOURS = ["#4c78a8", "#72b7b2", "#f58518", "#e45756", "#54a24b", "#b279a2", "#bab0ac"]
CELLS = 25
"""Images in a grid."""


def new_figure(width: float, height: float) -> "Figure":
    """width, height: inches of 100 pixels. TensorBoard shows 350 pixels in width: larger pictures get small letters."""
    from matplotlib.figure import Figure

    return Figure((width, height), dpi=100, layout="constrained")


def pixels(figure: "Figure") -> np.ndarray:
    """uint8 (H, W, 3)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3]


def write(writer: Any, tag: str, figure: "Figure", step: int) -> None:
    """writer: of torch.utils.tensorboard."""
    writer.add_image(tag, pixels(figure), step, dataformats="HWC")


def pie(shares: Sequence[float], labels: Sequence[str], title: str) -> "Figure":
    """shares: in [0, 1]. Labels stand in a legend: those of thin slices would cover each other."""
    figure = new_figure(4.8, 2.2)
    axes = figure.add_subplot()
    wedges, *_ = axes.pie(shares, colors=COLOURS, startangle=90, counterclock=False)
    axes.legend(wedges, labels, loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize=8)
    axes.set_title(title, fontsize=9)
    return figure


def stacked_bars(heights: dict[str, list[float]], x_label: str, y_label: str) -> "Figure":
    """heights: of each part, in each bar."""
    from matplotlib.ticker import MaxNLocator

    figure = new_figure(4.4, 2.6)
    axes = figure.add_subplot()
    bottom = np.zeros(len(next(iter(heights.values()))))
    x = np.arange(1, len(bottom) + 1)
    for (label, values), colour in zip(heights.items(), COLOURS, strict=True):
        axes.bar(x, values, bottom=bottom, label=label, color=colour)
        bottom += np.asarray(values)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    figure.legend(
        *(part[::-1] for part in axes.get_legend_handles_labels()), loc="outside right upper", frameon=False, fontsize=8
    )
    return figure


def confusion_matrix(counts: Tensor, classes: Sequence[str], title: str) -> "Figure":
    """counts: int (classes, classes), rows are true classes. The colour is the share of its row, so that rare classes
    are seen too; counts are written into the cells of up to 20 classes."""
    num = len(classes)
    side = min(10.0, max(3.6, 0.34 * num + 1.0))
    figure = new_figure(side, side)
    axes = figure.add_subplot()
    shares = counts / counts.sum(1, keepdim=True).clamp(min=1)
    axes.imshow(shares.numpy(), cmap="Blues", vmin=0, vmax=1)
    axes.set_title(title, fontsize=9)
    axes.set_xlabel("predicted")
    axes.set_ylabel("true")
    if num > 50:
        return figure
    names = [shorten(name) for name in classes]
    axes.set_xticks(range(num), names, rotation=0 if max(map(len, names)) < 3 else 90, fontsize=8)
    axes.set_yticks(range(num), names, fontsize=8)
    if num <= 20:
        for i, row in enumerate(counts.tolist()):
            for j, count in enumerate(row):
                if count:
                    colour = "white" if shares[i, j] > 0.5 else "black"
                    axes.text(j, i, str(count), ha="center", va="center", fontsize=7, color=colour)
    return figure


def true_against_predicted(true: Tensor, predicted: Tensor, title: str) -> "Figure":
    """Both (N, ...); at most 5,000 points of each are drawn, evenly spread."""
    figure = new_figure(3.6, 3.6)
    axes = figure.add_subplot()
    true, predicted = true.flatten(1) if true.dim() > 1 else true[:, None], predicted.reshape(len(true), -1)
    every = -(-len(true) // 5000)
    for i in range(min(true.shape[1], len(COLOURS))):
        axes.plot(true[::every, i], predicted[::every, i], ".", markersize=2, alpha=0.5, color=COLOURS[i])
    low, high = min(true.min(), predicted.min()), max(true.max(), predicted.max())
    axes.plot([low, high], [low, high], color="black", linewidth=0.8)  # where a perfect prediction is
    axes.set_xlabel("true")
    axes.set_ylabel("predicted")
    axes.set_title(f"{title}: {len(true):,} samples", fontsize=9)
    return figure


def image_grid(images: Sequence[Tensor], texts: Sequence[str], colours: Sequence[str], title: str) -> "Figure":
    """images: up to 25 of one shape (C, H, W), uint8 or float; a text in a colour above each."""
    columns = 5
    rows = max(1, -(-len(images) // columns))
    cell, text_height = 0.9, 0.34
    figure = new_figure(columns * cell, rows * (cell + text_height) + 0.4)
    figure.suptitle(title, fontsize=9)
    axes = figure.add_subplot()
    axes.set_axis_off()
    height = cell + text_height
    for k, (image, text, colour) in enumerate(zip(images, texts, colours, strict=True)):
        left, top = (k % columns) * cell, (k // columns) * height
        extent = (left + 0.04, left + cell - 0.04, top + height - 0.04, top + text_height)
        axes.imshow(displayable(image), extent=extent, interpolation="nearest", cmap="gray", vmin=0, vmax=1)
        axes.text(
            left + cell / 2,
            top + text_height / 2,
            text,
            color=colour,
            ha="center",
            va="center",
            fontsize=7,
            linespacing=0.9,
        )
    axes.set_xlim(0, columns * cell)
    axes.set_ylim(rows * height, 0)
    return figure


def displayable(image: Tensor) -> np.ndarray:
    """An image (C, H, W) as floats in [0, 1]: (H, W, 3) with three channels, otherwise the mean of them (H, W). Bytes
    are divided by 255, other numbers stretched from the least to the greatest."""
    is_bytes = not image.is_floating_point()
    x = image.detach().cpu().float()
    x = x / 255 if is_bytes else (x - x.min()) / (x.max() - x.min()).clamp(min=1e-12)
    return (x.permute(1, 2, 0) if len(x) == 3 else x.mean(0)).numpy()


def curve(
    x: Sequence[float], y: Sequence[float], chosen: int | None, x_label: str, y_label: str, title: str
) -> "Figure":
    """y over x on a logarithmic axis, one point marked."""
    figure = new_figure(6, 4)
    axes = figure.add_subplot()
    axes.plot(x, y, marker="o" if len(x) < 30 else None, markersize=4, color=COLOURS[0])
    if chosen is not None:
        axes.plot(x[chosen], y[chosen], marker="o", markersize=10, color=COLOURS[3])
    axes.set_xscale("log")
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.set_title(title, fontsize=9)
    return figure


def shorten(name: str, length: int = 14) -> str:
    return name if len(name) <= length else f"{name[: length - 1]}…"
