"""What a network gets right and wrong: pictures for loggers, and the tables of
evaluate.py --report.

A callback keeps the predictions of a validation or test. When the evaluation ends,
functions draw the predictions: one function for each task, and at the end of the file
one function for each kind of picture. docs/tensorboard.md shows the pictures.

Read `PredictionKeeper` first, and `columns_of` for the values that it keeps.
`PredictionFigures` decides when the pictures are drawn, and FIGURES has the function of
each task. `ClassReport` writes the tables.
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
from torch.nn.functional import interpolate
from torchmetrics.functional.classification import multiclass_confusion_matrix

from lightbase.core.batches import inputs_of, targets_of, to_host
from lightbase.core.curves import Stage, gather, run_folder
from lightbase.core.data import BaseDataModule
from lightbase.core.errors import UserError, say
from lightbase.core.files import relative_to_cwd, write_whole
from lightbase.core.metrics import as_curve_names
from lightbase.core.module import BaseModule
from lightbase.core.pictures import has_pictures, log_figure
from lightbase.core.predictions import (
    PALETTE,
    class_names,
    predicted_masks,
    probabilities,
)
from lightbase.core.tables import as_csv, as_table

NUM_IMAGES = 25  # in a grid
NUM_MASKS = 10  # in a picture
NUM_POINTS = 5000  # in a plot of predicted numbers
REPORTED_TASKS = ("multiclass", "multilabel", "segmentation")


# Predictions are kept in an evaluation.


def columns_of(task: str, outputs: Tensor, targets: Tensor) -> list[Tensor]:
    """Return the values of a batch that are kept: tensors with a row for each sample.
    The first tensor has the true values, the second one has the predicted values.

    multiclass: Class numbers (N,). Two more tensors (N,) have the probabilities of the
        predicted class and of the true class.
    segmentation: Class numbers (N, H, W).
    multilabel, regression: The targets and the outputs as they are.

    task: The attribute `task` of the module. docs/tensorboard.md lists the shapes.
    outputs, targets: The values that a step gives to `track`. The outputs for
        multiclass may be logits or probabilities.
    """
    if task == "multiclass":
        sums_to_one = ((outputs.sum(1) - 1).abs() < 1e-3).all()
        are_shares = sums_to_one & (outputs >= 0).all()
        shares = torch.where(are_shares, outputs, outputs.softmax(1))
        best, predicted = shares.max(1)
        classes = targets.clamp(0, outputs.shape[1] - 1)  # -100 is no index
        return [targets, predicted, best, shares.gather(1, classes[:, None])[:, 0]]
    if task == "segmentation":
        masks = predicted_masks(outputs)
        return [targets.view_as(masks).long(), masks]  # targets may be (N, 1, H, W)
    return [targets, outputs]


def confusion(true: Tensor, predicted: Tensor, num_classes: int) -> Tensor:
    """Return a confusion matrix, int64 (num_classes, num_classes). Row i, column j has
    the number of samples or pixels of class i that are predicted as class j.

    true: int64 of any shape. Only values from 0 to num_classes - 1 count. The value
        -100, which the loss ignores, does not.
    predicted: Class numbers of the same shape.
    """
    counts = (true >= 0) & (true < num_classes)
    return multiclass_confusion_matrix(predicted[counts], true[counts], num_classes)


class PredictionKeeper(Callback):
    """Keeps the predictions of a validation or test that the steps give to `track`.

    A subclass calls `start` when the evaluation begins, and `gather` when it ends. All
    samples are kept, but only about NUM_MASKS masks, spread over the data set.

    loader: The loader of the evaluation. While it is None, nothing is kept.
    misfit: The reason why the outputs do not fit the task, or "" if they fit.

    These attributes exist after `gather`:
    columns: The kept samples of all processes, in the order of the data set. See
        `columns_of`.
    indices: The positions of these samples in the data set, int64 (N,).
    confusion: The confusion matrix of all samples (multiclass) or of all pixels
        (segmentation), see `confusion`. Other tasks have no counts.
    names: The names of the classes or labels.
    """

    loader: Any = None

    def start(self, trainer: Any, pl_module: Any) -> None:
        """Keep the predictions of the validation or test that begins now. Predictions
        of an earlier one are dropped."""
        self.task: Any = pl_module.task
        self.data = trainer.datamodule
        self.loader = trainer.val_dataloaders
        if trainer.testing:
            self.loader = trainer.test_dataloaders
        self.misfit = ""
        self.batches: list[list[Tensor]] = []
        self.confusion: Any = torch.tensor(0)
        pl_module.tracked = None

    def on_validation_batch_end(
        self, trainer: Any, pl_module: Any, _: Any, __: Any, batch_idx: int, *___: Any
    ) -> None:
        """Keep copies of the outputs and targets that the step has given to `track`: a
        compiled network may write its next outputs into the same memory. If they do not
        fit the task, set `misfit`, and keep nothing more."""
        if self.loader is None or self.misfit:
            return
        try:
            outputs, targets = pl_module.tracked
            columns = columns_of(self.task, outputs.float(), targets)
            fit = columns[0].shape == columns[1].shape
        except (AttributeError, IndexError, RuntimeError, TypeError):
            fit = False  # no tensors, or tensors of other shapes
        pl_module.tracked = None  # the next step may not call `track`
        if not fit:
            values = f"outputs and targets that {type(pl_module).__name__} gives track"
            self.misfit = f"the {values} do not fit task {self.task}"
            return
        # process r of n evaluates the samples r, r + n, r + 2 n, ...
        start = batch_idx * self.loader.batch_sampler.batch_size
        positions = torch.arange(start, start + len(targets))
        indices = positions * trainer.world_size + trainer.global_rank
        every = 1
        if self.task == "segmentation":
            true, predicted, *_ = columns
            counts = confusion(true, predicted, max(2, outputs.shape[1]))
            self.confusion = self.confusion + counts
            every = math.ceil(len(self.loader.dataset) / NUM_MASKS)
        first = -start % every  # the first kept position is a multiple of `every`
        columns = [indices, *columns]
        self.batches.append([column[first::every].clone() for column in columns])

    on_test_batch_end = on_validation_batch_end  # type: ignore[assignment]

    def gather(self) -> None:
        """Collect the kept samples of all processes, and sort them in the order of the
        data set. All processes must call this. Raise UserError in all processes if one
        of them has a misfit."""
        kept = (self.misfit, *to_host((self.batches, self.confusion)))
        misfits, batches, counts = zip(*gather(kept), strict=True)
        if any(misfits):
            raise UserError(max(misfits), status=2)
        try:
            columns = [torch.cat(x) for x in zip(*chain(*batches), strict=True)]
        except RuntimeError as error:  # such as texts of several lengths
            problem = "the predictions of the batches have several shapes"
            raise UserError(problem, status=2) from error
        order = columns[0].argsort()
        self.indices, *self.columns = [column[order] for column in columns]
        self.confusion = sum(counts)
        true, predicted, *_ = self.columns
        num = predicted.shape[-1]  # labels
        if self.task == "segmentation":
            num = len(self.confusion)
        if self.task == "multiclass":
            num = int(torch.maximum(true, predicted).max()) + 1
        self.names = class_names(self.data, num)
        if self.task == "multiclass":
            self.confusion = confusion(true, predicted, len(self.names))

    def scores(self) -> dict[str, Tensor]:
        """Return the scores of each class or label, {name of the score: (classes,)}.

        segmentation: `iou`, intersection over union, in [0, 1]. It is NaN for a class
            that is neither true nor predicted.
        multiclass, multilabel: `precision`, `recall` and `f1`, in [0, 1]. A score whose
            denominator is 0 is 0.

        All tasks also have `support`: how many samples or pixels have the class.
        """
        if self.task == "multilabel":
            true = self.columns[0] > 0.5
            predicted = probabilities(self.columns[1]) > 0.5
            right = (true & predicted).sum(0)
            support = true.sum(0)
            num_predicted = predicted.sum(0)
        else:
            right = self.confusion.diag()
            support = self.confusion.sum(1)
            num_predicted = self.confusion.sum(0)
        total = support + num_predicted
        if self.task == "segmentation":
            return {"iou": right / (total - right), "support": support}
        return {
            "precision": right / num_predicted.clamp(min=1),
            "recall": right / support.clamp(min=1),
            "f1": 2 * right / total.clamp(min=1),
            "support": support,
        }

    def images(self, rows: Tensor) -> Tensor:
        """Read the images of kept samples again. Return (len(rows), 3, H, W) in [0, 1].

        rows: Row numbers in `columns`, int64.
        """
        samples = self.loader.dataset.__getitems__(self.indices[rows].tolist())
        return displayable(inputs_of(samples))


class ClassReport(PredictionKeeper):
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

    def on_test_start(self, trainer: Any, pl_module: Any) -> None:
        """Keep the predictions of the test. Raise UserError if the task has no
        classes."""
        task = pl_module.task if isinstance(pl_module, BaseModule) else None
        if task not in REPORTED_TASKS:
            raise UserError(
                f"--report: the attribute task of {type(pl_module).__name__} is {task}",
                f"it has to be one of {', '.join(REPORTED_TASKS)}",
                2,
            )
        self.start(trainer, pl_module)

    def on_test_end(self, trainer: Any, pl_module: Any) -> None:
        """Write the files, and fill `lines`; only the first process does. Raise
        UserError if the predictions do not fit the task."""
        self.gather()
        if not trainer.is_global_zero:
            return
        scores = self.scores()
        label = "label" if self.task == "multilabel" else "class"
        columns = [column.tolist() for column in scores.values()]
        rows = [(label, *scores), *zip(self.names, *columns, strict=True)]
        file = self.folder / "report.csv"
        write_whole(file, as_csv(rows))
        self.lines = [*as_table(rows), f"Report: {relative_to_cwd(file)}"]
        if self.task != "multilabel":
            counts = zip(self.names, *self.confusion.T.tolist(), strict=True)
            text = as_csv([("true / predicted", *self.names), *counts])
            write_whole(self.folder / "confusion_matrix.csv", text)


class PredictionFigures(PredictionKeeper):
    """Draws pictures for the loggers, with tags that begin with view/. They need a
    BaseDataModule and a BaseModule.

    At the start it draws `inputs/train`: training images as the network gets them.
    After a validation or the test it draws the predictions, in the way that the
    module's `task` needs. It also writes metrics that are no curves to files.

    every_n_epochs: Draw after the validation of each such epoch, and after the last
        validation. 0 draws no pictures at all.
    draws: Whether pictures are drawn.
    has_task: Whether pictures of predictions are drawn.
    """

    draws = False
    has_task = False

    def __init__(self, every_n_epochs: int) -> None:
        self.every_n_epochs = every_n_epochs

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Find out which pictures can be drawn. Print a line if the task has none."""
        data = trainer.datamodule
        are_ours = isinstance(pl_module, BaseModule) and isinstance(
            data, BaseDataModule
        )
        self.draws = are_ours and self.every_n_epochs > 0 and has_pictures(trainer)
        self.has_task = self.draws and pl_module.task in FIGURES
        if self.draws and not self.has_task:
            reason = (
                f"the attribute task of {type(pl_module).__name__} is {pl_module.task}"
            )
            say(f"Pictures: none of predictions: {reason}, see docs/tensorboard.md")

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Draw the training images, but not again when a run is resumed."""
        data = trainer.datamodule
        if self.draws and has_images(data) and trainer.global_step == 0:
            log_figure(trainer, "view/inputs/train", input_figure(data, pl_module))

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Keep the predictions of every validation, also in epochs without pictures:
        early stopping may make any validation the last one."""
        if self.has_task and not trainer.sanity_checking:
            self.start(trainer, pl_module)

    on_test_start = on_validation_start

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
        try:
            self.gather()
            if trainer.is_global_zero:
                for name, figure in FIGURES[self.task](self).items():
                    log_figure(trainer, f"view/{name}/{stage}", figure)
        except UserError as error:
            say(f"Pictures: none of predictions: {error}")
            self.has_task = False
        self.loader = None


def write_metric_values(trainer: Any, stage: Stage) -> None:
    """Write metrics/STAGE_NAME.json in the run's folder for each metric that is no
    curve. A later call overwrites the file. Print a line about each new file."""
    model = trainer.lightning_module
    if not trainer.is_global_zero or not isinstance(model, BaseModule):
        return
    means = model.curves_callback.means[stage]
    for name, value in means.non_scalar_values.items():
        (file_name,) = as_curve_names([name])
        file = run_folder(trainer) / "metrics" / f"{stage}_{file_name}.json"
        if not file.exists():
            say(f"Metric {name} is no curve: its values are in metrics/{file.name}")
        file.parent.mkdir(exist_ok=True)
        write_whole(file, json.dumps(value, default=Tensor.tolist))


def has_images(data: BaseDataModule) -> bool:
    """Return whether the data module gives images: it has an `image_shape`, and the
    inputs are one tensor."""
    return data.image_shape is not None and data.input_spec is not None


# The pictures of each task


def input_figure(data: BaseDataModule, model: BaseModule) -> Figure:
    """Draw up to NUM_IMAGES training images as the network gets them, after random
    transforms. Above each image is its class; masks lie over the images."""
    samples = data.splits["train"]
    batch = samples.__getitems__(spread(len(samples), NUM_IMAGES).tolist())
    # the training draws the same random numbers with and without this figure
    with torch.no_grad(), isolate_rng(include_cuda=model.device.type == "cuda"):
        batch = move_data_to_device(batch, model.device)
        batch = data.transform_batch(batch, training=True)
    images = displayable(inputs_of(batch))
    targets = targets_of(batch)
    texts = [""] * len(images)
    if isinstance(targets, Tensor):
        if model.task == "multiclass" and data.classes:
            texts = [f"{data.classes[target]:.9}" for target in targets.tolist()]
        if model.task == "segmentation":
            masks = targets.cpu().reshape(len(images), *targets.shape[-2:])
            images = overlay(images, masks)
    return image_grid(images, texts, "training images as the network gets them")


def multiclass_figures(kept: PredictionKeeper) -> dict[str, Figure]:
    """Draw the confusion matrix. For images also draw predictions and the worst
    mistakes: samples whose true class got the lowest probability."""
    true, predicted, _, of_true = kept.columns
    rows = (true >= 0).nonzero()[:, 0]  # the loss ignores the others
    wrong = rows[true[rows] != predicted[rows]]
    title = f"{len(wrong):,} of {len(rows):,} wrong"
    figures = {"confusion_matrix": confusion_matrix(kept.confusion, kept.names, title)}
    if has_images(kept.data):
        shown = rows[spread(len(rows), NUM_IMAGES)]
        title = "predicted class, its probability"
        figures["predictions"] = class_grid(kept, shown, title)
        if len(wrong):
            worst = wrong[of_true[wrong].argsort()][:NUM_IMAGES]
            title = f"the worst of {len(wrong):,} mistakes"
            figures["mistakes"] = class_grid(kept, worst, title)
    return figures


def class_grid(kept: PredictionKeeper, rows: Tensor, title: str) -> Figure:
    """Draw images. The text above each image has the predicted class and its
    probability. If the prediction is wrong, a second line has the true class.

    rows: Row numbers of kept samples, int64.
    """
    texts = []
    for row in rows:
        true, predicted, best, _ = (column[row] for column in kept.columns)
        text = f"{kept.names[predicted]:.9} {best:.0%}"
        if predicted != true:
            text += f"\nis {kept.names[true]:.9}"
        texts.append(text)
    return image_grid(kept.images(rows), texts, title)


def segmentation_figures(kept: PredictionKeeper) -> dict[str, Figure]:
    """Draw each kept image three times: plain, with the true mask, and with the
    predicted mask."""
    if not has_images(kept.data):
        return {}
    images = kept.images(torch.arange(len(kept.indices)))
    true, predicted = (overlay(images, masks) for masks in kept.columns)
    tiles = torch.stack([images, true, predicted], 1).flatten(0, 1)
    texts = ["image", "true", "predicted"] * len(images)
    title = "masks over the images"
    return {"predictions": image_grid(tiles, texts, title, num_columns=6)}


def regression_figures(kept: PredictionKeeper) -> dict[str, Figure]:
    """Draw predicted numbers over true numbers, at most NUM_POINTS. A
    perfect prediction lies on the black line."""
    true, predicted = (column.flatten() for column in kept.columns)
    rows = spread(len(true), NUM_POINTS)
    title = f"{len(true):,} numbers"
    figure, axes = new_figure(3.5, title, "true", "predicted")
    axes.plot(true[rows].numpy(), predicted[rows].numpy(), ".", markersize=2)
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
    axes.imshow(shares.numpy(), cmap="Blues", vmin=0, vmax=1)
    if num <= 100:
        names = [f"{name:.14}" for name in classes]
        axes.set_xticks(range(num), names, fontsize=7, rotation=90)
        axes.set_yticks(range(num), names, fontsize=7)
    if num <= 20:
        for i, j in counts.nonzero().tolist():
            colour = "white" if shares[i, j] > 0.6 else "black"
            text = f"{counts[i, j]}"
            axes.text(j, i, text, color=colour, ha="center", va="center", fontsize=6)
    return figure


def image_grid(
    images: Tensor, texts: Sequence[str], title: str, num_columns: int = 5
) -> Figure:
    """Draw images in rows, with a text above each image. A text of two lines tells of a
    mistake and is red.

    images: (N, 3, H, W) in [0, 1].
    texts: A text for each image.
    num_columns: The number of images in a row.
    """
    num_rows = math.ceil(len(images) / num_columns)
    figure = Figure((3.5, 0.5 + 4.5 / num_columns * num_rows), dpi=200)
    figure.subplots_adjust(0.02, 0.01, 0.98, 0.88, wspace=0.1)
    figure.suptitle(title, fontsize=9)
    for i, (image, text) in enumerate(zip(images, texts, strict=True)):
        axes = figure.add_subplot(num_rows, num_columns, i + 1)
        axes.set_axis_off()
        axes.imshow(image.permute(1, 2, 0).numpy())
        colour = "firebrick" if "\n" in text else "black"
        axes.set_title(text, fontsize=5, color=colour, pad=2)
    return figure


def overlay(images: Tensor, masks: Tensor) -> Tensor:
    """Return images that are mixed half and half with the colours of the classes.
    Pixels that the loss ignores (below 0, or 255 and above) keep their colour.

    images: (N, 3, H, W) in [0, 1].
    masks: Class numbers (N, h, w). They are resized to the images.
    """
    masks = interpolate(masks[:, None].float(), images.shape[-2:]).long()
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
    count = min(num, count)
    return torch.arange(count) * num // max(1, count)
