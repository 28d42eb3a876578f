"""What a network gets right and wrong: pictures for loggers, and the tables of
evaluate.py --report.

A callback keeps the predictions of a validation or test. When the evaluation ends,
functions draw the predictions: one function for each task, and at the end of the file
one function for each kind of picture. The functions for pictures know tensors and
matplotlib only. docs/tensorboard.md shows the pictures.

Read `PredictionKeeper` first, and `columns_of` for the values that it keeps.
`PredictionFigures` decides when the pictures are drawn, and FIGURES has the function of
each task. `ClassReport` writes the tables.
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
    """Return the values of a batch that are kept: tensors with a row for each sample.
    The first tensor has the true values, the second one has the predicted values.

    multiclass: Class numbers (N,). Two more tensors (N,) have the log-probabilities of
        the predicted class and of the true class.
    segmentation: Class numbers (N, H, W).
    text: Token numbers (N, TEXT_LENGTH). Longer texts are cut. Shorter ones are filled
        up; the true value is -100 there.
    multilabel, regression: The targets and the outputs as they are.

    The list is empty if the shapes do not fit the task. A text of which the length is
    equal to the number of tokens does not fit either, because nothing shows which
    dimension of the outputs is which.

    task: The attribute `task` of the module. docs/tensorboard.md lists the shapes.
    outputs, targets: The values that a step gives to `track`. The outputs for
        multiclass may be logits or probabilities.
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
        # the outputs are (N, length, tokens) or (N, tokens, length)
        is_last = target_shape == shape[:2]
        is_middle = target_shape == shape[::2]
        if is_last != is_middle:
            tokens = outputs.argmax(2 if is_last else 1)
            missing = (0, TEXT_LENGTH - target_shape[1])  # negative: it is cut
            return [pad(targets, missing, value=-100), pad(tokens, missing)]
    is_plain = task == "regression" or (task == "multilabel" and len(shape) == 2)
    if is_plain and target_shape == shape:
        return [targets, outputs]
    return []


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
    samples are kept, but only about NUM_SAMPLES masks or texts, spread over the data
    set.

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
        tracked: Any = pl_module.tracked or (None, None)
        outputs, targets = tracked
        pl_module.tracked = None  # the next step may not call `track`
        num = len(self.loader.dataset)
        size = self.loader.batch_sampler.batch_size
        start = batch_idx * size
        # process r of n evaluates the samples r, r + n, r + 2 n, ...
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
        # the first kept sample of this batch: its position among the samples of this
        # process is a multiple of `every`
        first = math.ceil(start / every) * every - start
        columns = [indices, *columns]
        self.batches.append([column[first::every].clone() for column in columns])

    on_test_batch_end = on_validation_batch_end  # type: ignore[assignment]

    def gather(self) -> None:
        """Collect the kept samples of all processes, and sort them in the order of the
        data set. All processes must call this. If one process has a misfit, all
        processes have it afterwards, and the attributes are not set."""
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
        """Return the scores of each class or label, {name of the score: (classes,)}.

        segmentation: `iou`, intersection over union, in [0, 1]. It is NaN for a class
            that is neither true nor predicted.
        multiclass, multilabel: `precision`, `recall` and `f1`, in [0, 1]. A score whose
            denominator is 0 is 0.

        All tasks also have `support`: how many samples or pixels have the class.
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
        """Keep the predictions of the test. Raise UserError if the task has no classes,
        or if there are several test sets."""
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
        """Write the files; only the first process does. Raise UserError if the
        predictions do not fit the task."""
        self.gather()
        if self.misfit:
            raise UserError(f"--report: {self.misfit}", status=2)
        if trainer.is_global_zero:
            self.write()

    def write(self) -> None:
        """Write the files, and fill `lines`. Call `gather` first."""
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
    """Draws pictures for the loggers, with tags that begin with view/.

    At the start it draws `inputs/train`: training images as the network gets them.
    After a validation or the test it draws the predictions, in the way that the
    module's `task` needs, and metrics with several values, which are no curves. These
    metrics are also written to files. Printed lines say which pictures are missing, and
    why.

    every_n_epochs: Draw after the validation of each such epoch, and after the last
        validation. 0 draws no pictures at all.
    has_task: Whether predictions can be drawn.
    is_drawn: Whether the newest evaluation is drawn already, or must not be drawn.
    """

    def __init__(self, every_n_epochs: int) -> None:
        self.every_n_epochs = every_n_epochs
        self.has_task = False
        self.is_drawn = True
        self.notes: set[str] = set()

    def note(self, text: str) -> None:
        """Print a line, unless it has been printed before."""
        if text not in self.notes:
            say(text)
        self.notes.add(text)

    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Find out which pictures can be drawn. All processes use the answer of the
        first one, because only the loggers of the first process write."""
        draws = self.every_n_epochs > 0 and has_pictures(trainer)
        self.draws = trainer.strategy.broadcast(draws)
        if self.draws and stage == "fit":
            self.has_task = has_task(pl_module, trainer.datamodule)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Draw the training images, but not again when a run is resumed."""
        if self.draws and has_images(trainer.datamodule) and trainer.global_step == 0:
            figure = input_figure(trainer.datamodule, pl_module)
            log_figure(trainer, "view/inputs/train", figure)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Keep the predictions of every validation, also in epochs without pictures:
        early stopping may make any validation the last one."""
        self.loader = None
        self.is_drawn = trainer.sanity_checking or not self.draws
        if self.has_task and not self.is_drawn:
            self.start(trainer, pl_module)

    on_test_start = on_validation_start

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Write the metrics with several values, and draw if it is the turn."""
        if not trainer.sanity_checking:
            write_metric_values(trainer, "val")
        if self.draws and (trainer.current_epoch + 1) % self.every_n_epochs == 0:
            self.draw(trainer, "val")

    def on_train_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Draw the last validation, unless it is drawn already."""
        self.draw(trainer, "val")

    def on_test_end(self, trainer: Any, pl_module: Any) -> None:
        """Write the metrics with several values, and draw the test."""
        write_metric_values(trainer, "test")
        self.draw(trainer, "test")

    def draw(self, trainer: Any, stage: Stage) -> None:
        """Draw the newest evaluation, unless it is drawn already. All processes must
        call this; the first one draws."""
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
        """Return the pictures that torchmetrics makes of metrics with several values,
        {name of the metric: figure}. If a metric cannot be drawn, print a line."""
        figures: dict[str, Figure] = {}
        for name, value in non_scalar_values(model, stage).items():
            try:
                metric = model.curves_callback.means[stage].metrics[name]
                # numpy warns about the code of torchmetrics
                with warnings.catch_warnings(action="ignore"):
                    figures[name], _ = metric.plot(value)
                pyplot.close(figures[name])
            except Exception as error:  # a picture that fails does not end a training
                self.note(f"Metric {name} has no picture: {first_line(error)}")
        return figures


def non_scalar_values(model: LightningModule, stage: Stage) -> dict[str, Any]:
    """Return the newest values of the metrics that are no curves because they are not a
    single number or a number for each class: {name of the metric: value}."""
    if isinstance(model, BaseModule):
        return model.curves_callback.means[stage].non_scalar_values
    return {}


def write_metric_values(trainer: Any, stage: Stage) -> None:
    """Write metrics/STAGE_NAME.json in the run's folder for each metric that is no
    curve. A later call overwrites the file. Print a line about each new file."""
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
    """Return whether predictions can be drawn. Print a line about missing pictures, and
    the attribute to set."""
    if not isinstance(data, BaseDataModule) or not isinstance(model, BaseModule):
        reason = "they need a BaseModule and a BaseDataModule"
        say(f"Pictures: none of predictions: {reason}")
        return False
    name = type(data).__name__
    inputs = data.input_spec
    if model.task is None:
        way_out = f"attribute task of {type(model).__name__}, see docs/tensorboard.md"
        say(f"Pictures: none of predictions: set the {way_out}")
    elif inputs is None and data.image_shape:
        say(f"Pictures: no images: the inputs of {name} are no tensor")
    elif inputs is not None and inputs.dim() == 4 and not data.image_shape:
        say(f"Pictures: no images: set the attribute image_shape of {name}")
    return model.task is not None


def has_images(data: Any) -> bool:
    """Return whether the data module gives images: it has an `image_shape`, and the
    inputs are one tensor."""
    if not isinstance(data, BaseDataModule):
        return False
    return data.image_shape is not None and data.input_spec is not None


# The pictures of each task


def input_figure(data: BaseDataModule, model: LightningModule) -> Figure:
    """Draw up to NUM_IMAGES training images as the network gets them, after random
    transforms. Above each image is its class; masks lie over the images."""
    samples = data.splits["train"]
    batch = samples.__getitems__(spread(len(samples), NUM_IMAGES))
    # the training draws the same random numbers with and without this figure
    with torch.no_grad(), isolate_rng(include_cuda=model.device.type == "cuda"):
        batch = move_data_to_device(batch, model.device)
        batch = data.transform_batch(batch, training=True)
    images = displayable(inputs_of(batch))
    targets = targets_of(batch)
    texts = []
    if isinstance(model, BaseModule) and isinstance(targets, Tensor):
        if model.task == "multiclass" and data.classes:
            texts = [shorten(data.classes[target], 9) for target in targets.tolist()]
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
    num = len(rows)
    num_right = num - len(wrong)
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
    """Draw images. The text above each image has the predicted class, its probability,
    and the true class if the prediction is wrong.

    rows: Row numbers of kept samples, int64.
    """
    texts = []
    for row in rows:
        true, predicted, best, _ = (column[row] for column in kept.columns)
        share = f" {best.exp():.0%}"
        texts.append(comparison(kept.names[predicted], kept.names[true], share))
    return image_grid(kept.images(rows), texts, title)


def comparison(predicted: str, true: str, note: str = "") -> str:
    """Return a text for `image_grid`. The first line has the predicted name and the
    note. If the true name is different, a second line has the true name."""
    text = f"{shorten(predicted, 9)}{note}"
    if predicted != true:
        text += f"\nis {shorten(true, 9)}"
    return text


def multilabel_figures(kept: PredictionKeeper) -> dict[str, Figure]:
    """Draw precision and recall of each label. For images also draw samples with the
    predicted labels, and the true labels where the prediction is wrong."""
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
    """Draw the IoU of each class. For images also draw each kept sample three times:
    plain, with the true mask, and with the predicted mask."""
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
    """Draw predicted numbers over true numbers, of at most NUM_POINTS samples. Also
    draw a histogram of the errors of all samples. A perfect prediction lies on the
    black line."""
    true, predicted = (column.reshape(len(column), -1) for column in kept.columns)
    rows = spread(len(true), NUM_POINTS)
    points, axes = new_figure(3.5, 3.5, f"{len(true):,} samples", "true", "predicted")
    axes.plot(true[rows].numpy(), predicted[rows].numpy(), ".", markersize=2, alpha=0.5)
    middle = float(true.mean())
    axes.axline((middle, middle), slope=1, color="black")
    errors = (predicted - true).flatten()
    title = f"mean {errors.mean():.4g}, standard deviation {errors.std():.4g}"
    histogram, axes = new_figure(3.5, 3.0, title, "predicted - true", "numbers")
    axes.hist(errors.numpy(), bins=50)
    return {"predictions": points, "errors": histogram}


def text_figures(kept: PredictionKeeper) -> dict[str, Figure]:
    """Draw true and predicted texts, one line each. `to_text` of the data module makes
    texts of tokens. Tokens are left out where the true value is negative, because the
    loss ignores them."""
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

    width, height: The size in inches. TensorBoard shows pictures 350 pixels wide until
        they are clicked: 3.5 inches with 100 pixels per inch.
    x, y: Labels of the axes.
    dpi: Pixels per inch.
    """
    figure = Figure((width, height), dpi=dpi, layout="constrained")
    figure.suptitle(title, fontsize=9)
    axes = figure.add_subplot()
    axes.set(xlabel=x, ylabel=y)
    return figure, axes


def confusion_matrix(counts: Tensor, classes: Sequence[str], title: str) -> Figure:
    """Draw a confusion matrix.

    The colour of a cell is the square root of its share of the row. So rare mistakes
    are visible, and a rare class looks like a frequent one. The cells show their counts
    if there are at most 20 classes.

    counts: See `confusion`.
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
    """Draw horizontal bars: for each class one bar of each score.

    values: The scores, {name in the legend: (classes,)}, in [0, 1].
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
    """Draw images in rows, with a text above each image. A text of two lines stands for
    a mistake (see `comparison`) and is red.

    images: (N, 3, H, W) in [0, 1].
    texts: A text for each image, or an empty sequence.
    num_columns: The number of images in a row.
    """
    side = max(images.shape[-2:])
    margin = math.ceil(0.05 * side)
    text_height = math.ceil(0.4 * side)
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

    images: (N, C, H, W). Integers are divided by 255. Floats may be normalised, so each
        image is scaled: its lowest value becomes 0 and its highest value becomes 1.
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
    """Write a text with its middle at (x, y), in the units of the axes."""
    axes.text(x, y, text, color=colour, ha="center", va="center", fontsize=6)


def name_ticks(axis: Axis, names: Sequence[str]) -> None:
    """Write the names along an axis. Write none if there are more than 100, because
    they would be too small to read."""
    if len(names) <= 100:
        axis.set_ticks(range(len(names)), [shorten(name) for name in names], fontsize=7)


def spread(num: int, count: int) -> list[int]:
    """Return at most `count` indices from 0 to num - 1, with equal distances. The first
    `count` indices could all have one class, because data may be sorted by class."""
    count = min(num, count)
    return [i * num // count for i in range(count)]


def shorten(name: str, length: int = 14) -> str:
    """Return the name. If it has more than `length` characters, return its beginning
    and an ellipsis, with `length` characters together."""
    if len(name) > length:
        return f"{name[: length - 1]}…"
    return name
