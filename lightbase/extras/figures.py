"""What a network gets right and wrong: pictures for loggers, and the tables of
evaluate.py --report.

`PredictionFigures` keeps the predictions of a validation or test, and draws them when
it ends. FIGURES has a function for each task, and at the end of the file there is one
for each kind of picture. docs/tensorboard.md shows the pictures. `ClassReport` counts
the predictions of a test, and writes the tables.
"""

import json
import math
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from lightning import Callback
from lightning.pytorch.utilities import move_data_to_device
from lightning.pytorch.utilities.seed import isolate_rng
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn.functional import interpolate, pad
from torchmetrics.functional.classification import multiclass_confusion_matrix
from torchvision.utils import make_grid

from lightbase.core.batches import inputs_of, targets_of, to_host
from lightbase.core.curves import Stage, gather, run_folder
from lightbase.core.data import BaseDataModule
from lightbase.core.errors import UserError, say
from lightbase.core.extra import Extra
from lightbase.core.files import relative_to_cwd, write_whole
from lightbase.core.metrics import as_curve_names
from lightbase.core.module import BaseModule
from lightbase.core.pictures import has_pictures, log_figure
from lightbase.core.predictions import (
    PALETTE,
    class_names,
    predicted_masks,
)
from lightbase.core.tables import as_csv, as_table

NUM_COLUMNS = 5  # of a grid
NUM_IMAGES = 25  # in a grid
NUM_MASKS = 10  # in a picture
NUM_POINTS = 5000  # in a plot of predicted numbers
REPORTED_TASKS = ("multiclass", "multilabel", "segmentation")
MISFITS = (AttributeError, IndexError, RuntimeError, TypeError)
"""Errors of `columns_of` and `class_counts` if outputs and targets do not fit the task:
they are no tensors, or tensors of other shapes."""


# What is kept of a batch. Outputs and targets are what a step gives to `track`.


def columns_of(task: str, outputs: Tensor, targets: Tensor) -> list[Tensor]:
    """Return the values of a batch that are kept for pictures: tensors with a row for
    each sample. The first tensor has the true values, the second one has the predicted
    values.

    regression: The targets and the outputs as they are.
    segmentation: Class numbers (N, H, W).
    multiclass: Class numbers (N,). A third tensor (N,) has the probability of the
        predicted class. The outputs may be logits or probabilities.

    task: The attribute `task` of the module. docs/tensorboard.md lists the shapes.
    Raise one of MISFITS if the values do not fit the task.
    """
    if task == "regression":
        return [targets, outputs.reshape(targets.shape)]
    predicted = predicted_masks(outputs)
    # the loss of two classes may need masks of floats
    columns = [targets.reshape(predicted.shape).long(), predicted]
    if task == "multiclass":
        # the outputs are probabilities if those of each sample add up to 1
        are_shares = ((outputs.sum(1) - 1).abs() < 1e-3).all() & (outputs >= 0).all()
        columns.append(torch.where(are_shares, outputs, outputs.softmax(1)).amax(1))
    return columns


def class_counts(task: str, outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the counts of a batch for the report: a confusion matrix, see `confusion`.
    For multilabel return six counts of each label, int64 (6, labels): the samples that
    have the label, the outputs outside [0, 1], the right predictions and all
    predictions if the outputs are probabilities, and the same two if they are logits.
    Only the whole test tells which of the two they are.

    task: One of REPORTED_TASKS.
    Raise one of MISFITS if the values do not fit the task.
    """
    if task == "multilabel":
        true = targets > 0.5
        counts = [true, (outputs < 0) | (outputs > 1)]
        for threshold in (0.5, 0.0):
            predicted = outputs > threshold
            counts += [true & predicted, predicted]
        return torch.stack(counts).sum(1)
    true, predicted, *_ = columns_of(task, outputs, targets)
    return confusion(true, predicted, max(2, outputs.shape[1]))


def confusion(true: Tensor, predicted: Tensor, num_classes: int) -> Tensor:
    """Return a confusion matrix, int64 (num_classes, num_classes). Row i, column j has
    the number of samples or pixels of class i that are predicted as class j.

    true: Integers of any shape. Only values from 0 to num_classes - 1 count. The value
        -100, which the loss ignores, does not.
    predicted: Class numbers of the same shape.
    """
    counts = (true >= 0) & (true < num_classes)
    return multiclass_confusion_matrix(predicted[counts], true[counts], num_classes)


# The tables


class ClassReport(Callback):
    """Writes report.csv, the scores of each class or label, at the end of a test. For
    multiclass and segmentation it also writes confusion_matrix.csv. The files cover all
    samples that test_step gives to `track`, in all processes.

    folder: The folder for the files. It must exist.
    lines: The table of report.csv as lines for the terminal. Empty before the test has
        ended.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lines: list[str] = []
        self.counts = torch.tensor(0)  # the sum of `class_counts`

    def on_test_start(self, trainer: Any, pl_module: Any) -> None:
        """Raise UserError if the task has no classes."""
        if (
            not isinstance(pl_module, BaseModule)
            or pl_module.task not in REPORTED_TASKS
        ):
            raise UserError(
                f"--report: {type(pl_module).__name__} predicts no classes",
                f"its attribute task has to be one of {', '.join(REPORTED_TASKS)}",
                2,
            )

    def on_test_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        """Count the predictions that the step has given to `track`. Raise UserError if
        they do not fit the task."""
        try:
            outputs, targets = pl_module.tracked
            counts = class_counts(pl_module.task, outputs.float(), targets)
        except MISFITS as error:
            problem = f"what test_step gives track does not fit task {pl_module.task}"
            raise UserError(problem, status=2) from error
        self.counts = self.counts + counts
        pl_module.tracked = None  # the next step may not call `track`

    def on_test_end(self, trainer: Any, pl_module: Any) -> None:
        """Write the files, and fill `lines`; only the first process does."""
        counts = sum(gather(self.counts.cpu()))
        if not trainer.is_global_zero:
            return
        scores = class_scores(pl_module.task, counts)
        num = counts.shape[1]
        names = class_names(trainer.datamodule, num)[:num]
        if pl_module.task == "multilabel":
            label = "label"
        else:
            label = "class"
            matrix = zip(names, *counts.T.tolist(), strict=True)
            text = as_csv([("true / predicted", *names), *matrix])
            write_whole(self.folder / "confusion_matrix.csv", text)
        columns = [column.tolist() for column in scores.values()]
        rows = [(label, *scores), *zip(names, *columns, strict=True)]
        file = self.folder / "report.csv"
        write_whole(file, as_csv(rows))
        self.lines = [*as_table(rows), f"Report: {relative_to_cwd(file)}"]


def class_scores(task: str, counts: Tensor) -> dict[str, Tensor]:
    """Return the scores of each class or label, {name of the score: (classes,)}.

    segmentation: `iou`, intersection over union, in [0, 1]. It is NaN for a class that
        is neither true nor predicted.
    multiclass, multilabel: `precision`, `recall` and `f1`, in [0, 1]. A score whose
        denominator is 0 is 0.

    All tasks also have `support`: how many samples or pixels have the class.

    counts: See `class_counts`.
    """
    if task == "multilabel":
        support, outside, right, num_predicted, *of_logits = counts
        if outside.any():
            right, num_predicted = of_logits
    else:
        right, support, num_predicted = counts.diag(), counts.sum(1), counts.sum(0)
    total = support + num_predicted
    if task == "segmentation":
        return {"iou": right / (total - right), "support": support}
    return {
        "precision": right / num_predicted.clamp(min=1),
        "recall": right / support.clamp(min=1),
        "f1": 2 * right / total.clamp(min=1),
        "support": support,
    }


# The pictures


class PredictionFigures(Extra):
    """Draws pictures for the loggers, with tags that begin with view/. They need a
    BaseDataModule and a BaseModule.

    At the start it draws `inputs/train`: training images as the network gets them.
    After a validation or the test it draws the predictions, in the way that the
    module's `task` needs. It keeps the predictions of all samples for this, but only
    about NUM_MASKS masks, spread over the data set. It also writes metrics that are no
    curves to files.

    every_n_epochs: Draw after the validation of each such epoch, and after the last
        validation. 0 draws no pictures at all.
    draws: Whether pictures are drawn.
    loader: The loader of the evaluation whose predictions are kept, or None.

    These attributes exist after `gather`:
    columns: The kept samples of all processes, in the order of the data set. See
        `columns_of`.
    indices: The positions of these samples in the data set, int64 (N,).
    """

    draws = False
    loader: Any = None

    def __init__(self, every_n_epochs: int) -> None:
        self.every_n_epochs = every_n_epochs

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Find out which pictures can be drawn. Print a line if the task has none."""
        self.data = trainer.datamodule
        if isinstance(pl_module, BaseModule) and isinstance(self.data, BaseDataModule):
            self.draws = self.every_n_epochs > 0 and has_pictures(trainer)
        if self.draws and pl_module.task not in FIGURES:
            reason = f"the attribute task of the model is {pl_module.task}"
            say(f"Pictures: none of predictions: {reason}, see docs/tensorboard.md")

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Draw the training images, but not again when a run is resumed."""
        if self.draws and has_images(self.data) and trainer.global_step == 0:
            figure = input_figure(self.data, pl_module)
            log_figure(trainer, "view/inputs/train", figure)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Keep the predictions of every validation, also in epochs without pictures:
        early stopping may make any validation the last one. Predictions of an earlier
        one are dropped."""
        if not self.draws or trainer.sanity_checking or pl_module.task not in FIGURES:
            return
        self.loader = trainer.val_dataloaders
        if trainer.testing:
            self.loader = trainer.test_dataloaders
        self.every = 1
        if pl_module.task == "segmentation":
            self.every = math.ceil(len(self.loader.dataset) / NUM_MASKS)
        self.batches: list[list[Tensor]] = []
        pl_module.tracked = None

    on_test_start = on_validation_start

    def on_validation_batch_end(
        self, trainer: Any, pl_module: Any, _: Any, __: Any, batch_idx: int, *___: Any
    ) -> None:
        """Keep copies of the outputs and targets that the step has given to `track`: a
        compiled network may write its next outputs into the same memory. If they do not
        fit the task, keep an empty list."""
        if self.loader is None:
            return
        try:
            outputs, targets = pl_module.tracked
            columns = columns_of(pl_module.task, outputs.float(), targets)
        except MISFITS:
            self.batches.append([])
            return
        pl_module.tracked = None  # the next step may not call `track`
        # process r of n evaluates the samples r, r + n, r + 2 n, ...
        start = batch_idx * self.loader.batch_sampler.batch_size
        positions = torch.arange(start, start + len(targets))
        indices = positions * trainer.world_size + trainer.global_rank
        kept = [indices, *columns]
        if self.every > 1:  # a copy of the mask to the GPU waits for it
            kept = [column[indices % self.every == 0] for column in kept]
        self.batches.append([column.clone() for column in kept])

    on_test_batch_end = on_validation_batch_end  # type: ignore[assignment]

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Write the metrics that are no curves, and draw if it is the turn."""
        if not trainer.sanity_checking:
            write_metric_values(trainer, "val")
        if self.draws and (trainer.current_epoch + 1) % self.every_n_epochs == 0:
            self.draw(trainer, "val")

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Draw the last validation, unless it is drawn already."""
        self.draw(trainer, "val")

    def on_test_end(self, trainer: Any, pl_module: Any) -> None:
        """Write the metrics that are no curves, and draw the test."""
        write_metric_values(trainer, "test")
        self.draw(trainer, "test")

    def draw(self, trainer: Any, stage: Stage) -> None:
        """Draw the newest evaluation, unless it is drawn already. All processes must
        call this; the first one draws. If the predictions do not fit the task, print a
        line, and draw no more predictions."""
        if self.loader is None:
            return
        model = trainer.lightning_module
        try:
            self.gather()
        except (IndexError, RuntimeError, ValueError):
            values = "the outputs and targets in track"
            say(f"Pictures: none of predictions: {values} do not fit task {model.task}")
            self.draws = False
        if self.draws and trainer.is_global_zero:
            for name, figure in FIGURES[model.task](self).items():
                log_figure(trainer, f"view/{name}/{stage}", figure)
        self.loader = None

    def gather(self) -> None:
        """Collect the kept samples of all processes, and sort them in the order of the
        data set. All processes must call this. Raise IndexError, RuntimeError or
        ValueError in all processes if a batch does not fit the task, or has samples of
        another shape."""
        batches = chain(*gather(to_host(self.batches)))
        columns = [torch.cat(column) for column in zip(*batches, strict=True)]
        order = columns[0].argsort()
        self.indices, *self.columns = [column[order] for column in columns]

    def images(self, rows: Tensor) -> Tensor:
        """Read the images of kept samples again. Return (len(rows), 3, H, W) in [0, 1].

        rows: Row numbers in `columns`, int64.
        """
        samples = self.loader.dataset.__getitems__(self.indices[rows].tolist())
        return displayable(inputs_of(samples))


def write_metric_values(trainer: Any, stage: Stage) -> None:
    """Write metrics/STAGE_NAME.json in the run's folder for each metric that is no
    curve. A later call overwrites the file. Print a line about each new file."""
    model = trainer.lightning_module
    if not trainer.is_global_zero or not isinstance(model, BaseModule):
        return
    means = model.curves_callback.means[stage]
    folder = run_folder(trainer) / "metrics"
    for name, value in means.non_scalar_values.items():
        folder.mkdir(exist_ok=True)
        file = folder / f"{stage}_{as_curve_names([name])[0]}.json"
        if not file.exists():
            say(f"Metric {name} is no curve: its values are in metrics/{file.name}")
        write_whole(file, json.dumps(value, default=Tensor.tolist))


def has_images(data: BaseDataModule) -> bool:
    """Return whether the data module gives images: it has an `image_shape`, and the
    inputs are one tensor."""
    return data.image_shape is not None and data.input_spec is not None


# The pictures of each task


def input_figure(data: BaseDataModule, model: BaseModule) -> Figure:
    """Draw up to NUM_IMAGES training images as the network gets them, after random
    transforms. Masks lie over the images."""
    samples = data.splits["train"]
    batch = samples.__getitems__(spread(len(samples), NUM_IMAGES).tolist())
    # the training draws the same random numbers with and without this figure
    with torch.no_grad(), isolate_rng(include_cuda=model.device.type == "cuda"):
        batch = move_data_to_device(batch, model.device)
        batch = data.transform_batch(batch, training=True)
    images = displayable(inputs_of(batch))
    masks = targets_of(batch)
    if model.task == "segmentation" and isinstance(masks, Tensor):
        images = overlay(images, masks.cpu())
    return image_grid(images, [], "training images as the network gets them")


def multiclass_figures(kept: PredictionFigures) -> dict[str, Figure]:
    """Draw the confusion matrix. For images also draw predictions and the worst
    mistakes: wrong predictions with the highest probability."""
    true, predicted, shares = kept.columns
    names = class_names(kept.data, int(torch.maximum(true, predicted).max()) + 1)
    counts = confusion(true, predicted, len(names))
    rows = (true >= 0).nonzero()[:, 0]  # the loss ignores the others
    wrong = rows[true[rows] != predicted[rows]]
    title = f"{len(wrong):,} of {len(rows):,} wrong"
    figures = {"confusion_matrix": confusion_matrix(counts, names, title)}
    if has_images(kept.data):
        shown = rows[spread(len(rows), NUM_IMAGES)]
        title = "predicted class, its probability"
        figures["predictions"] = class_grid(kept, names, shown, title)
    if has_images(kept.data) and len(wrong):
        worst = wrong[shares[wrong].argsort(descending=True)]
        title = f"the worst of {len(wrong):,} mistakes"
        figures["mistakes"] = class_grid(kept, names, worst[:NUM_IMAGES], title)
    return figures


def class_grid(
    kept: PredictionFigures, names: Sequence[str], rows: Tensor, title: str
) -> Figure:
    """Draw images. The text above each image has the predicted class and its
    probability. If the prediction is wrong, a second line has the true class.

    rows: Row numbers of kept samples, int64.
    """
    texts = []
    columns = [column[rows] for column in kept.columns]
    for true, predicted, share in zip(*columns, strict=True):
        text = f"{names[predicted]:.9} {share:.0%}"
        if predicted != true:
            text += f"\nis {names[true]:.9}"
        texts.append(text)
    return image_grid(kept.images(rows), texts, title)


def segmentation_figures(kept: PredictionFigures) -> dict[str, Figure]:
    """Draw each kept image three times, in a column: plain, with the true mask, and
    with the predicted mask."""
    if not has_images(kept.data):
        return {}
    images = kept.images(torch.arange(len(kept.indices)))
    masked = [overlay(images, masks) for masks in kept.columns]
    tiles = torch.cat([images, *masked], 2)
    title = "images, true masks, predicted masks"
    return {"predictions": image_grid(tiles, [], title)}


def regression_figures(kept: PredictionFigures) -> dict[str, Figure]:
    """Draw predicted numbers over true numbers, at most NUM_POINTS. A
    perfect prediction lies on the black line."""
    true, predicted = (column.flatten() for column in kept.columns)
    rows = spread(len(true), NUM_POINTS)
    figure, axes = new_figure(3.5, f"{len(true):,} numbers", "true", "predicted")
    axes.plot(true[rows], predicted[rows], ".", markersize=2)
    middle = float(true.mean())
    axes.axline((middle, middle), slope=1, color="black")
    return {"predictions": figure}


FIGURES = {
    "multiclass": multiclass_figures,
    "segmentation": segmentation_figures,
    "regression": regression_figures,
}


# How they are drawn


def new_figure(side: float, title: str, x: str, y: str) -> tuple[Figure, Axes]:
    """Return an empty figure and its axes.

    side: The width and the height in inches. TensorBoard shows pictures 350 pixels wide
        until they are clicked: 3.5 inches.
    x, y: The labels of the axes.
    """
    figure = Figure((side, side), dpi=100, layout="constrained")
    figure.suptitle(title, fontsize=9)
    return figure, figure.add_subplot(xlabel=x, ylabel=y)


def confusion_matrix(counts: Tensor, classes: Sequence[str], title: str) -> Figure:
    """Draw a confusion matrix.

    The colour of a cell is the square root of its share of the row. So rare mistakes
    are visible, and a rare class looks like a frequent one. The cells show their counts
    if there are at most 20 classes. There are no names of more than 100 classes,
    because they would be too small to read.

    counts: See `confusion`.
    """
    num = len(classes)
    side = min(max(3.5, 0.3 * num), 14)  # inches
    figure, axes = new_figure(side, title, "predicted", "true")
    shares = (counts / counts.sum(1, keepdim=True).clamp(min=1)).sqrt()
    # above 1, so that no cell is too dark for its number
    axes.imshow(shares.numpy(), cmap="Blues", vmin=0, vmax=1.5)
    if num <= 100:
        names = [f"{name:.14}" for name in classes]
        axes.set_xticks(range(num), names, fontsize=7, rotation=90)
        axes.set_yticks(range(num), names, fontsize=7)
    if num <= 20:
        for i, j in counts.nonzero().tolist():
            text = f"{counts[i, j]}"
            axes.text(j, i, text, ha="center", va="center", fontsize=6)
    return figure


def image_grid(images: Tensor, texts: Sequence[str], title: str) -> Figure:
    """Draw images in rows. A text of two lines tells of a mistake and is red.

    images: (N, 3, H, W) in [0, 1].
    texts: A text above each image, or an empty list.
    """
    margin = math.ceil(0.05 * images.shape[3])
    top = margin
    if texts:
        top = math.ceil(0.35 * images.shape[3])
    # one picture: axes for each image would take a second to draw
    tiles = pad(images, (margin, margin, top, margin), value=1.0)
    height, width = tiles.shape[2:]
    grid = make_grid(tiles, NUM_COLUMNS, padding=0)
    figure = Figure((3.5, 0.4 + 3.5 * grid.shape[1] / grid.shape[2]), dpi=200)
    figure.suptitle(title, fontsize=9)
    axes = figure.add_axes((0, 0, 1, 1 - 0.4 / figure.get_figheight()))
    axes.set_axis_off()
    axes.imshow(grid.permute(1, 2, 0).numpy())
    for i, text in enumerate(texts):
        row, column = divmod(i, NUM_COLUMNS)
        x, y = (column + 0.5) * width, row * height + top / 2
        colour = "black"
        if "\n" in text:
            colour = "firebrick"
        axes.text(x, y, text, fontsize=5, color=colour, ha="center", va="center")
    return figure


def overlay(images: Tensor, masks: Tensor) -> Tensor:
    """Return images that are mixed half and half with the colours of the classes.
    Pixels that the loss ignores (below 0, or 255 and above) keep their colour.

    images: (N, 3, H, W) in [0, 1].
    masks: Class numbers (N, h, w) or (N, 1, h, w). They are resized to the images.
    """
    masks = masks.reshape(len(masks), 1, *masks.shape[-2:])
    masks = interpolate(masks.float(), images.shape[-2:]).long()
    has_colour = (masks >= 0) & (masks < 255)
    colours = PALETTE[masks[:, 0].clamp(0, 255)].permute(0, 3, 1, 2) / 255
    return torch.where(has_colour, (images + colours) / 2, images)


def displayable(images: Tensor) -> Tensor:
    """Return the images as float32 (N, 3, H, W) in [0, 1] on the CPU. If they do not
    have three channels they become grey, by the mean of the channels.

    Each image is scaled, because it may be normalised: its lowest value becomes 0 and
    its highest value becomes 1.

    images: (N, C, H, W) of any dtype.
    """
    x = images.detach().cpu().float()
    if x.shape[1] != 3:
        x = x.mean(1, keepdim=True).expand(-1, 3, -1, -1)
    x = x - x.amin((1, 2, 3), keepdim=True)
    return x / x.amax((1, 2, 3), keepdim=True).clamp(min=1e-12)


def spread(num: int, count: int) -> Tensor:
    """Return at most `count` indices from 0 to num - 1, int64, with equal distances.
    The first `count` indices could all have one class, because data may be sorted by
    class."""
    stop = max(0, num - 1)
    return torch.linspace(0, stop, min(num, count), dtype=torch.float64).long()
