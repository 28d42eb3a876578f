"""What a network gets right and wrong: pictures for loggers, and the tables of
evaluate.py --report.

A callback keeps the predictions of a validation or test. When it is over, functions
below draw them: one function for each task, whose pictures docs/tensorboard.md shows,
and below them one function for each kind of picture. They know tensors and matplotlib
only.
"""

import json
import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning import Callback, LightningModule
from lightning.pytorch.utilities import move_data_to_device
from lightning.pytorch.utilities.seed import isolate_rng
from lightning_utilities.core.apply_func import apply_to_collection
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn.functional import interpolate, pad
from torchmetrics.functional.classification import multiclass_confusion_matrix
from torchvision.utils import make_grid

from lightbase.core.batches import inputs_of, targets_of, to_host
from lightbase.core.curves import Stage, gather, run_folder
from lightbase.core.data import BaseDataModule
from lightbase.core.errors import UserError, first_line, printable, say
from lightbase.core.files import relative_to_cwd, write_whole
from lightbase.core.metrics import as_curve_names
from lightbase.core.module import BaseModule
from lightbase.core.pictures import has_pictures, log_figure
from lightbase.core.predictions import (
    PALETTE,
    class_names,
    label_names,
    predicted_masks,
    probabilities,
)
from lightbase.core.tables import as_csv, as_table

NUM_IMAGES = 25  # in a grid
NUM_SAMPLES = 10  # masks or texts in a picture
NUM_POINTS = 5000  # in a plot of predicted numbers
TEXT_LENGTH = 100  # tokens
REPORTED_TASKS = ("multiclass", "multilabel", "segmentation")


# Predictions are kept in an evaluation.


def columns_of(task: str, outputs: Any, targets: Any) -> list[Tensor]:
    """Return what is kept of a batch, tensors (N, ...): true and predicted values. They
    are class numbers except for multilabel and regression. For multiclass the
    log-probabilities (N,) of the predicted and of the true class follow.

    The list is empty if the batch does not have the shapes of the task. A text with as
    many tokens as places does not: its outputs may be meant in two ways.

    task: The attribute `task` of the module; docs/tensorboard.md lists the shapes.
    outputs, targets: What a step gives to `track`; for multiclass logits or
        probabilities.
    """
    if not isinstance(outputs, Tensor) or not isinstance(targets, Tensor):
        return []
    outputs = outputs.float()
    shape, target_shape = outputs.shape, targets.shape
    if task == "multiclass" and len(shape) == 2 and target_shape == shape[:1]:
        sums_to_one = ((outputs.sum(1) - 1).abs() < 1e-3).all()
        are_probabilities = sums_to_one & (outputs >= 0).all()
        logs = torch.where(are_probabilities, outputs.log(), outputs.log_softmax(1))
        best, predicted = logs.max(1)
        classes = targets.clamp(0, shape[1] - 1)  # -100 is no index
        return [targets, predicted, best, logs.gather(1, classes[:, None])[:, 0]]
    if task == "segmentation" and len(shape) == 4:
        masks = predicted_masks(outputs)
        if target_shape in (masks.shape, masks.unsqueeze(1).shape):
            return [targets.view_as(masks).long(), masks]
    if task == "text" and len(shape) == 3:
        is_last, is_middle = target_shape == shape[:2], target_shape == shape[::2]
        if is_last != is_middle:
            tokens = outputs.argmax(2 if is_last else 1)
            missing = (0, TEXT_LENGTH - target_shape[1])  # negative: it is cut
            return [pad(targets, missing, value=-100), pad(tokens, missing)]
    is_plain = task == "regression" or (task == "multilabel" and len(shape) == 2)
    if is_plain and target_shape == shape:
        return [targets, outputs]
    return []


def confusion(true: Tensor, predicted: Tensor, num_classes: int) -> Tensor:
    """Return int64 (num_classes, num_classes); rows are true classes.

    true: int64 of any shape. Values that are no class, such as -100, which the loss
        ignores, do not count.
    predicted: Class numbers of the same shape.
    """
    counts = (true >= 0) & (true < num_classes)
    return multiclass_confusion_matrix(predicted[counts], true[counts], num_classes)


class PredictionKeeper(Callback):
    """Keeps the predictions of a validation or test as the steps give them to `track`,
    from `start` on. Of masks and texts it keeps about NUM_SAMPLES samples.

    loader: The loader of the evaluation. While it is None, nothing is kept.
    misfit: Why the outputs do not fit the task; empty if they do.
    columns: See `columns_of`. After `gather` they hold the kept samples of all
        processes, in the order of the data set.
    indices: After `gather`, the positions of these samples in the data set.
    confusion: After `gather`, int (classes, classes), counts of all samples or pixels;
        rows are true classes. Not for all tasks.
    names: After `gather`, the names of the classes or labels.
    """

    loader: Any = None

    def start(self, trainer: Any, pl_module: Any) -> None:
        """Keep what the validation or test that begins now predicts."""
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
        """Keep the batch that the step has given to `track`, as copies: a compiled
        network may use the memory of its outputs again."""
        if self.loader is None or self.misfit:
            return
        tracked: Any = pl_module.tracked or (None, None)
        outputs, targets = tracked
        pl_module.tracked = None  # the next step may not call `track`
        num, size = len(self.loader.dataset), self.loader.batch_sampler.batch_size
        start = batch_idx * size
        order = torch.arange(num)[trainer.global_rank :: trainer.world_size]
        indices = order[start : start + size]
        columns = columns_of(self.task, outputs, targets)
        if not columns or len(targets) != len(indices):
            values = f"outputs and targets that {type(pl_module).__name__} gives track"
            reason = f"do not fit task {self.task}: see docs/tensorboard.md"
            self.misfit = f"the {values} {reason}"
            return
        if self.task == "segmentation":
            true, predicted = columns
            counts = confusion(true, predicted, max(2, outputs.shape[1]))
            self.confusion = self.confusion + counts
        every = 1
        if self.task in ("segmentation", "text"):
            every = math.ceil(num / NUM_SAMPLES)
        first = math.ceil(start / every) * every - start
        columns = [indices, *columns]
        self.batches.append([column[first::every].clone() for column in columns])

    on_test_batch_end = on_validation_batch_end  # type: ignore[assignment]

    def gather(self) -> None:
        """Take the samples of all processes, in the order of the data set. All
        processes must call this. If one of them has a misfit, all have it then."""
        batches: list[list[Tensor]] = []
        parts = gather((self.misfit, *to_host((self.batches, self.confusion))))
        self.misfit = max(misfit for misfit, _, _ in parts)  # "" comes before any text
        self.confusion = sum(counts for _, _, counts in parts)
        for _, batches_of_rank, _ in parts:
            batches += batches_of_rank
        if len({true.shape[1:] for _, true, *_ in batches}) > 1:
            self.misfit = self.misfit or "the batches have targets of different shapes"
        if self.misfit:
            return
        columns = [torch.cat(column) for column in zip(*batches, strict=True)]
        order = columns[0].argsort()
        self.indices, *self.columns = [column[order] for column in columns]
        true, predicted, *_ = self.columns
        num = true.shape[-1]
        if self.task == "segmentation":
            num = len(self.confusion)
        if self.task == "multiclass":
            num = int(torch.maximum(true, predicted).max()) + 1
        self.names = class_names(self.data, num)
        if self.task == "multiclass":
            self.confusion = confusion(true, predicted, len(self.names))

    def scores(self) -> dict[str, Tensor]:
        """Return tensors (classes,) by their name.

        Masks have the IoU, which is NaN for a class that is neither true nor predicted.
        Other tasks have precision, recall and F1, which are 0 then. `support` is how
        often a class is true.
        """
        if self.task == "multilabel":
            true, predicted = self.labels()
            right, support = (true & predicted).sum(0), true.sum(0)
            num_predicted = predicted.sum(0)
        else:
            right, support = self.confusion.diag(), self.confusion.sum(1)
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

    def labels(self) -> tuple[Tensor, Tensor]:
        """Return true and predicted labels of a multilabel task, bool (N, labels)."""
        true, outputs = self.columns
        return true > 0.5, probabilities(outputs) > 0.5

    def images(self, rows: Tensor) -> Tensor:
        """Return images (len(rows), 3, H, W) in [0, 1]. rows: which kept samples."""
        samples = self.loader.dataset.__getitems__(self.indices[rows].tolist())
        return displayable(inputs_of(samples))


class ClassReport(PredictionKeeper):
    """Writes report.csv, and confusion_matrix.csv of classes or pixels, at the end of a
    test. They cover the samples of all processes, as test_step gives them to `track`.

    folder: Where the files are written.
    lines: The table of report.csv for the terminal, after the test.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lines: list[str] = []

    def on_test_start(self, trainer: Any, pl_module: Any) -> None:
        """Keep what the test predicts. Raise UserError for a task without classes."""
        task = pl_module.task if isinstance(pl_module, BaseModule) else None
        if task not in REPORTED_TASKS or isinstance(trainer.test_dataloaders, list):
            name = type(pl_module).__name__
            raise UserError(
                f"--report: the attribute task of {name} is {task}",
                f"it has to be one of {', '.join(REPORTED_TASKS)}, for one test set",
                2,
            )
        self.start(trainer, pl_module)

    def on_test_end(self, trainer: Any, pl_module: Any) -> None:
        """Write the files, in the first process. Raise UserError if the predictions do
        not fit the task."""
        self.gather()
        if self.misfit:
            raise UserError(f"--report: {self.misfit}", status=2)
        if trainer.is_global_zero:
            self.write()

    def write(self) -> None:
        """Write the files, and make `lines`."""
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
    """Draws pictures in view/ after validations and the test: of predictions, by the
    module's `task`, and of metrics that are no curves, which also get a file. At the
    start it draws `inputs/train`, images as the network gets them. A line says which
    pictures are not drawn.

    every_n_epochs: How often validations have pictures; 0 draws none at all. The last
        validation always has some.
    """

    def __init__(self, every_n_epochs: int) -> None:
        self.every_n_epochs = every_n_epochs
        self.has_task = False
        self.is_drawn = True
        self.notes: set[str] = set()

    def note(self, text: str) -> None:
        """Print a line, once in a run."""
        if text not in self.notes:
            say(text)
        self.notes.add(text)

    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Find out which pictures can be drawn. All processes decide alike."""
        # only the first process's loggers write
        draws = self.every_n_epochs > 0 and has_pictures(trainer)
        self.draws = trainer.strategy.broadcast(draws)
        if self.draws and stage == "fit":
            self.has_task = has_task(pl_module, trainer.datamodule)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if self.draws and has_images(trainer.datamodule) and trainer.global_step == 0:
            figure = input_figure(trainer.datamodule, pl_module)
            log_figure(trainer, "view/inputs/train", figure)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Keep the predictions of each validation, because any may be the last one."""
        self.loader = None
        self.is_drawn = trainer.sanity_checking or not self.draws
        if self.has_task and not self.is_drawn:
            self.start(trainer, pl_module)

    on_test_start = on_validation_start

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            write_metric_values(trainer, "val")
        if self.draws and (trainer.current_epoch + 1) % self.every_n_epochs == 0:
            self.draw(trainer, "val")

    def on_train_end(self, trainer: Any, pl_module: LightningModule) -> None:
        self.draw(trainer, "val")

    def on_test_end(self, trainer: Any, pl_module: Any) -> None:
        write_metric_values(trainer, "test")
        self.draw(trainer, "test")

    def draw(self, trainer: Any, stage: Stage) -> None:
        """Draw the newest evaluation, unless it is drawn already."""
        if self.is_drawn:
            return
        self.is_drawn = True
        if self.loader is not None:
            self.gather()
        if not trainer.is_global_zero:
            return
        figures = self.metric_figures(trainer.lightning_module, stage)
        if self.loader is not None and self.misfit:
            self.note(f"Pictures: none of predictions of {stage}: {self.misfit}")
        elif self.loader is not None:
            figures |= FIGURES[self.task](self)
        for name, figure in figures.items():
            log_figure(trainer, f"view/{name}/{stage}", figure)

    def metric_figures(self, model: Any, stage: Stage) -> dict[str, Figure]:
        """Return torchmetrics' own pictures of metrics that are no curves, by name. A
        line says which metric has none."""
        figures: dict[str, Figure] = {}
        for name, value in non_scalar_values(model, stage).items():
            try:
                metric = model.curves_callback.means[stage].metrics[name]
                # numpy warns of what torchmetrics does
                with warnings.catch_warnings(action="ignore"):
                    figures[name], _ = metric.plot(value)
                pyplot.close(figures[name])
            except Exception as error:  # a picture that fails does not end a training
                self.note(f"Metric {name} has no picture: {first_line(error)}")
        return figures


def non_scalar_values(model: LightningModule, stage: Stage) -> dict[str, Any]:
    """Return the newest values of metrics that are no curves, by name."""
    if isinstance(model, BaseModule):
        return model.curves_callback.means[stage].non_scalar_values
    return {}


def write_metric_values(trainer: Any, stage: Stage) -> None:
    """Write metrics/STAGE_NAME.json into the run's folder for each metric that is no
    curve. A line names a new file."""
    if not trainer.is_global_zero:
        return
    for name, value in non_scalar_values(trainer.lightning_module, stage).items():
        (file_name,) = as_curve_names([name])
        file = run_folder(trainer) / "metrics" / f"{stage}_{file_name}.json"
        if not file.exists():
            say(f"Metric {name} is no curve: its values are in metrics/{file.name}")
        file.parent.mkdir(exist_ok=True)
        lists = apply_to_collection(value, Tensor, Tensor.tolist)
        write_whole(file, json.dumps(lists, default=str))


def has_task(model: LightningModule, data: Any) -> bool:
    """Return whether predictions can be drawn. A line says what is missing."""
    if not isinstance(data, BaseDataModule) or not isinstance(model, BaseModule):
        reason = "they need a BaseModule and a BaseDataModule"
        say(f"Pictures: none of predictions: {reason}")
        return False
    name, inputs = type(data).__name__, data.input_spec
    if model.task is None:
        way_out = f"attribute task of {type(model).__name__}, see docs/tensorboard.md"
        say(f"Pictures: none of predictions: set the {way_out}")
    elif inputs is None and data.image_shape:
        say(f"Pictures: no images: the inputs of {name} are no tensor")
    elif inputs is not None and inputs.dim() == 4 and not data.image_shape:
        say(f"Pictures: no images: set the attribute image_shape of {name}")
    return model.task is not None


def has_images(data: Any) -> bool:
    """Return whether the inputs are images of one size, in one tensor."""
    if not isinstance(data, BaseDataModule):
        return False
    return data.image_shape is not None and data.input_spec is not None


# The pictures of each task


def input_figure(data: BaseDataModule, model: LightningModule) -> Figure:
    """Draw training images as the network gets them, with their classes or masks."""
    samples = data.splits["train"]
    batch = samples.__getitems__(spread(len(samples), NUM_IMAGES))
    # the training draws the same random numbers with and without this figure
    with torch.no_grad(), isolate_rng(include_cuda=model.device.type == "cuda"):
        batch = move_data_to_device(batch, model.device)
        batch = data.transform_batch(batch, training=True)
    images, texts = displayable(inputs_of(batch)), []
    targets = targets_of(batch)
    if isinstance(model, BaseModule) and isinstance(targets, Tensor):
        if model.task == "multiclass" and data.classes:
            texts = [shorten(data.classes[target], 9) for target in targets.tolist()]
        if model.task == "segmentation":
            masks = targets.cpu().reshape(len(images), *targets.shape[-2:])
            images = overlay(images, masks)
    return image_grid(images, texts, "training images as the network gets them")


def multiclass_figures(kept: PredictionKeeper) -> dict[str, Figure]:
    """Draw the confusion matrix, and for images predictions and the worst mistakes."""
    true, predicted, _, of_true = kept.columns
    rows = (true >= 0).nonzero()[:, 0]  # the loss ignores the others
    wrong = rows[true[rows] != predicted[rows]]
    num, num_right = len(rows), len(rows) - len(wrong)
    title = f"{num_right:,} of {num:,} right ({num_right / max(1, num):.2%})"
    figures = {"confusion_matrix": confusion_matrix(kept.confusion, kept.names, title)}
    if has_images(kept.data):
        shown = rows[spread(num, NUM_IMAGES)]
        title = "predicted class, its probability"
        figures["predictions"] = class_grid(kept, shown, title)
        if len(wrong):
            worst = wrong[of_true[wrong].argsort()][:NUM_IMAGES]
            title = f"the worst of {len(wrong):,} mistakes"
            figures["mistakes"] = class_grid(kept, worst, title)
    return figures


def class_grid(kept: PredictionKeeper, rows: Tensor, title: str) -> Figure:
    """Draw images with the predicted class, its probability, and the true class if it
    is another one. rows: which kept samples."""
    texts = []
    for row in rows:
        true, predicted, best, _ = (column[row] for column in kept.columns)
        share = f" {best.exp():.0%}"
        texts.append(comparison(kept.names[predicted], kept.names[true], share))
    return image_grid(kept.images(rows), texts, title)


def comparison(predicted: str, true: str, note: str = "") -> str:
    """Return a text for `image_grid`: what is predicted, and in a second line what is
    true if that is something else. note: Printed behind the predicted text."""
    text = f"{shorten(predicted, 9)}{note}"
    if predicted != true:
        text += f"\nis {shorten(true, 9)}"
    return text


def multilabel_figures(kept: PredictionKeeper) -> dict[str, Figure]:
    """Draw precision and recall of each label, and for images the predicted labels."""
    true, predicted = kept.labels()
    scores = kept.scores()
    values = {name: scores[name] for name in ("precision", "recall")}
    title = f"{len(true):,} samples, labels with a probability over 0.5"
    figures = {"labels": bars(values, kept.names, title)}
    if has_images(kept.data):
        rows = torch.tensor(spread(len(true), NUM_IMAGES))
        texts = []
        for row in rows:
            labels = [label_names(x[row], kept.names) for x in (predicted, true)]
            texts.append(comparison(*labels))
        figures["predictions"] = image_grid(
            kept.images(rows), texts, "predicted labels"
        )
    return figures


def segmentation_figures(kept: PredictionKeeper) -> dict[str, Figure]:
    """Draw the IoU of each class, and images with their true and predicted masks."""
    iou = kept.scores()["iou"]
    figures = {"iou": bars({"IoU": iou}, kept.names, f"mean {iou.nanmean():.3f}")}
    if has_images(kept.data):
        images = kept.images(torch.arange(len(kept.indices)))
        true, predicted = (overlay(images, masks) for masks in kept.columns)
        tiles = torch.stack([images, true, predicted], 1).flatten(0, 1)
        texts = ["image", "true", "predicted"] * len(images)
        title = "masks over the images"
        figures["predictions"] = image_grid(tiles, texts, title, num_columns=6)
    return figures


def regression_figures(kept: PredictionKeeper) -> dict[str, Figure]:
    """Draw true against predicted numbers of at most NUM_POINTS samples, and a
    histogram of errors."""
    true, predicted = (column.reshape(len(column), -1) for column in kept.columns)
    rows = spread(len(true), NUM_POINTS)
    points, axes = new_figure(3.5, 3.5, f"{len(true):,} samples", "true", "predicted")
    axes.plot(true[rows].numpy(), predicted[rows].numpy(), ".", markersize=2, alpha=0.5)
    middle = float(true.mean())
    # where perfect predictions are
    axes.axline((middle, middle), slope=1, color="black")
    errors = (predicted - true).flatten()
    title = f"mean {errors.mean():.4g}, standard deviation {errors.std():.4g}"
    histogram, axes = new_figure(3.5, 3.0, title, "predicted - true", "numbers")
    axes.hist(errors.numpy(), bins=50)
    return {"predictions": points, "errors": histogram}


def text_figures(kept: PredictionKeeper) -> dict[str, Figure]:
    """Draw true and predicted texts, without the places that the loss ignores. The data
    module turns tokens into texts."""
    lines = []
    for true, predicted in zip(*kept.columns, strict=True):
        for name, tokens in (("true", true), ("predicted", predicted)):
            text = printable(kept.data.to_text(tokens[true >= 0]))
            lines.append(f"{name:10} {shorten(text, 100)}")
    figure, axes = new_figure(8, 5)
    axes.set_axis_off()
    options: Any = {"va": "top", "family": "monospace", "fontsize": 8}
    axes.text(0, 1, "\n".join(lines), parse_math=False, **options)
    return {"predictions": figure}


FIGURES = {
    "multiclass": multiclass_figures,
    "multilabel": multilabel_figures,
    "segmentation": segmentation_figures,
    "regression": regression_figures,
    "text": text_figures,
}


# How they are drawn


def new_figure(
    width: float,
    height: float,
    title: str = "",
    x: str = "",
    y: str = "",
    dpi: int = 100,
) -> tuple[Figure, Axes]:
    """Return an empty figure and its axes.

    width, height: In inches of `dpi` pixels. TensorBoard shows 350 pixels before a
        click.
    x, y: Labels of the axes.
    """
    figure = Figure((width, height), dpi=dpi, layout="constrained")
    figure.suptitle(title, fontsize=9)
    axes = figure.add_subplot()
    axes.set(xlabel=x, ylabel=y)
    return figure, axes


def confusion_matrix(counts: Tensor, classes: Sequence[str], title: str) -> Figure:
    """Draw a confusion matrix. The colour is the square root of the share of the row,
    so that rare classes are visible. Up to 20 classes have counts in the cells.

    counts: int (classes, classes); rows are true classes.
    """
    num = len(classes)
    cell = 0.3 if num <= 20 else 0.14  # inches
    side = max(3.5, 0.5 + cell * min(num, 100))
    figure, axes = new_figure(side, side, title, "predicted", "true")
    shares = (counts / counts.sum(1, keepdim=True).clamp(min=1)).sqrt()
    axes.imshow(shares.numpy(), cmap="Blues", vmin=0, vmax=1)
    name_ticks(axes.xaxis, classes)
    name_ticks(axes.yaxis, classes)
    if max(map(len, classes)) > 2:
        axes.tick_params("x", rotation=90)
    if num <= 20:
        for i, j in counts.nonzero().tolist():
            colour = "white" if shares[i, j] > 0.6 else "black"
            centred_text(axes, j, i, f"{counts[i, j]}", colour)
    return figure


def bars(values: Mapping[str, Tensor], names: Sequence[str], title: str) -> Figure:
    """Draw a bar for each class and value.

    values: Numbers (classes,) in [0, 1], by their name in the legend.
    names: The names of the classes, from top to bottom.
    """
    figure, axes = new_figure(3.5, 1.2 + 0.15 * min(len(names), 100), title)
    thickness = 0.8 / len(values)
    for k, (name, numbers) in enumerate(values.items()):
        places = torch.arange(len(names)) + k * thickness
        axes.barh(places.numpy(), numbers.numpy(), thickness, label=name)
    axes.set_xlim(0, 1)
    axes.invert_yaxis()
    name_ticks(axes.yaxis, names)
    figure.legend(loc="outside lower center", ncols=2, fontsize=7)
    return figure


def image_grid(
    images: Tensor, texts: Sequence[str], title: str, num_columns: int = 5
) -> Figure:
    """Draw images with a text above each. A text of two lines, which is a mistake, is
    red.

    images: (N, 3, H, W) in [0, 1].
    texts: One for each image, or none at all.
    num_columns: How many images are side by side.
    """
    side = max(images.shape[-2:])
    margin, text_height = math.ceil(0.05 * side), math.ceil(0.4 * side)
    tiles = pad(images, (margin, margin, text_height, margin), value=1.0)
    height, width = tiles.shape[-2:]
    num_rows = math.ceil(len(tiles) / num_columns)
    inches = 0.4 + 3.5 / num_columns * num_rows * height / width
    dpi = 100 if side <= 64 else 200
    figure, axes = new_figure(3.5, inches, title, dpi=dpi)
    axes.set_axis_off()
    axes.imshow(make_grid(tiles, num_columns, padding=0).permute(1, 2, 0).numpy())
    for i, text in enumerate(texts):
        row, column = divmod(i, num_columns)
        x, y = (column + 0.5) * width, row * height + text_height / 2
        colour = "firebrick" if "\n" in text else "black"
        centred_text(axes, x, y, text, colour)
    return figure


def overlay(images: Tensor, masks: Tensor) -> Tensor:
    """Return images with the colours of the classes over them. Pixels that the loss
    ignores, such as -100 or 255, have no colour.

    images: (N, 3, H, W) in [0, 1].
    masks: Class numbers (N, h, w) of any size.
    """
    masks = interpolate(masks[:, None].float(), images.shape[-2:]).long()
    has_colour = (masks >= 0) & (masks < 255)
    colours = PALETTE[masks[:, 0].clamp(0, 255)].permute(0, 3, 1, 2) / 255
    return torch.where(has_colour, (images + colours) / 2, images)


def displayable(images: Tensor) -> Tensor:
    """Return floats (N, 3, H, W) in [0, 1], grey unless the images have three channels.

    images: (N, C, H, W). Bytes are divided by 255; other numbers are stretched from the
        least to the greatest of each image.
    """
    x = images.detach().cpu().float()
    if images.is_floating_point():
        lowest = x.amin((1, 2, 3), keepdim=True)
        highest = x.amax((1, 2, 3), keepdim=True)
        x = (x - lowest) / (highest - lowest).clamp(min=1e-12)
    else:
        x = x / 255
    if x.shape[1] != 3:
        x = x.mean(1, keepdim=True).expand(-1, 3, -1, -1)
    return x


def centred_text(axes: Axes, x: float, y: float, text: str, colour: str) -> None:
    """Write a text whose middle is at (x, y) in the units of the axes."""
    axes.text(x, y, text, color=colour, ha="center", va="center", fontsize=6)


def name_ticks(axis: Axis, names: Sequence[str]) -> None:
    """Write the names along an axis. More than 100 names could not be read."""
    if len(names) <= 100:
        axis.set_ticks(range(len(names)), [shorten(name) for name in names], fontsize=7)


def spread(num: int, count: int) -> list[int]:
    """Return at most `count` of the indices below `num`, evenly spread: data may be
    sorted by class."""
    count = min(num, count)
    return [i * num // count for i in range(count)]


def shorten(name: str, length: int = 14) -> str:
    """Return the name, or its beginning if it is longer than `length`."""
    if len(name) > length:
        return f"{name[: length - 1]}…"
    return name
