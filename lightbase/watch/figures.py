"""Pictures for loggers: what the network gets right and wrong, drawn without a screen."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from lightning import Callback, LightningModule
from lightning.pytorch.loggers import Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.utilities import move_data_to_device
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.seed import isolate_rng
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn.functional import interpolate, pad
from torchmetrics.functional import classification

from lightbase.curves import gather, newest_step
from lightbase.data.batches import ResumableLoader
from lightbase.data.module import BaseDataModule
from lightbase.data.nested import inputs_of, targets_of
from lightbase.module import BaseModule
from lightbase.ranks import printable, say_once

COLOURS = ["#4c78a8", "#72b7b2", "#f58518", "#e45756", "#54a24b", "#b279a2", "#bab0ac"]
RIGHT, WRONG = "#2a7a2a", "#c03030"
# (256, 3): colours of the classes in masks, as of torchvision's draw_segmentation_masks
PALETTE = torch.arange(256)[:, None] * torch.tensor([2**25 - 1, 2**15 - 1, 2**21 - 1]) % 255
NUM_IMAGES = 25  # of a grid
NUM_SAMPLES = 10  # masks or texts of a picture
NUM_POINTS = 5000  # of a plot of predicted numbers
TEXT_LENGTH = 200  # tokens
Label = tuple[str, str, bool]  # predicted and true text, and whether they agree


class Evaluated:
    """What pictures and reports need of the batches of a validation or test.

    every: For segmentation and text, one in so many samples is kept; 0 keeps none.
    indices: Of the kept samples, in the data set.
    columns: Of each batch, see `columns_of`.
    pixels: For segmentation, their number, (classes, classes), rows are true classes.
    misfit: Why the batches do not fit the task; empty if they do.
    """

    def __init__(self, model: BaseModule, data: Any, stage: str, every: int) -> None:
        self.model = model
        self.task = str(model.task)
        self.data = data
        self.stage = stage
        self.every = every if self.task in ("segmentation", "text") else 1
        self.newest = model.tracked
        self.indices: list[int] = []
        self.columns: list[tuple[Tensor, ...]] = []
        self.pixels: Any = 0
        self.num_outputs = 0
        self.misfit = ""

    def add(self, indices: Sequence[int] | None = None) -> None:
        """Add the newest batch. indices: of its samples, in the data set, if they are needed."""
        tracked: tuple[Any, Any] = (None, None)
        if self.model.tracked is not self.newest:
            tracked = self.newest = self.model.tracked or tracked
        outputs, targets = tracked
        if not fits(self.task, outputs, targets) or len(targets) != len(indices or targets):
            shapes = [tuple(x.shape) if isinstance(x, Tensor) else x for x in (outputs, targets)]
            got = f"track got outputs {shapes[0]} and targets {shapes[1]}"
            self.misfit = (
                self.misfit or f"{got}, which do not fit task {self.task}: see docs/tensorboard.md"
            )
            return
        self.num_outputs = outputs.shape[-1]
        if self.task == "segmentation":
            masks = predicted_masks(outputs)
            targets = targets.view_as(masks).long()
            self.pixels = self.pixels + confusion(masks, targets, max(2, outputs.shape[1]))
        indices = range(len(targets)) if indices is None else indices
        rows = [row for row, i in enumerate(indices) if self.every and i % self.every == 0]
        if rows:
            self.indices += [indices[row] for row in rows]
            # a copy: a compiled network may use the memory of its outputs again
            self.columns.append(columns_of(self.task, outputs[rows].float(), targets[rows]))

    def gather(self) -> None:
        """Take the samples of all processes, in the order of the data set, as one batch. All
        processes must call this."""
        if len({column.shape[1:] for columns in self.columns for column in columns[:1]}) > 1:
            self.misfit = "the batches have targets of different shapes"
        columns: Any = zip(*self.columns, strict=True) if not self.misfit else ()
        pixels = self.pixels.cpu() if isinstance(self.pixels, Tensor) else 0
        part = (self.indices, [torch.cat(column).cpu() for column in columns], pixels, self.misfit)
        parts = gather(part)
        self.misfit = next((part[3] for part in parts if part[3]), "")
        if not self.misfit:
            indices = torch.tensor([index for part in parts for index in part[0]])
            by_index = indices.argsort()
            self.indices = indices[by_index].tolist()
            columns = zip(*(part[1] for part in parts if part[1]), strict=True)
            self.columns = [tuple(torch.cat(column)[by_index] for column in columns)]
            self.pixels = sum(part[2] for part in parts)


def class_names(data: Any, num_classes: int) -> list[str]:
    """The names of the classes, and numbers for those that have none."""
    names = data.classes if isinstance(data, BaseDataModule) else []
    return [*names, *map(str, range(len(names), num_classes))]


def fits(task: str, outputs: Any, targets: Any) -> bool:
    """Whether a batch has the shapes and types of the task: see docs/tensorboard.md."""
    if not isinstance(outputs, Tensor) or not isinstance(targets, Tensor):
        return False
    shape, is_float = outputs.shape, targets.is_floating_point()
    batch_and_place = (shape[:1] + shape[2:], (*shape[:1], 1, *shape[2:]))
    fitting = {
        "multiclass": len(shape) == 2 and targets.shape == shape[:1] and not is_float,
        "multilabel": len(shape) == 2 and targets.shape == shape,
        "segmentation": len(shape) == 4 and targets.shape in batch_and_place,
        "regression": targets.shape == shape and is_float,
        # with as many tokens as places, both would fit
        "text": len(shape) == 3
        and (targets.shape == shape[:2]) != (targets.shape == batch_and_place[0])
        and not is_float,
    }
    return fitting[task]


def columns_of(task: str, outputs: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
    """What is kept of a batch, each (N, ...): true values and predicted ones, which are for text
    (N, TEXT_LENGTH), otherwise as they come. For multiclass also the log-probability of the
    predicted class and of the true class, each (N,)."""
    if task == "multiclass":
        are_probabilities = (outputs >= 0).all() & ((outputs.sum(1) - 1).abs() < 1e-3).all()
        logs = torch.where(are_probabilities, outputs.log(), outputs.log_softmax(1))
        best, predicted = logs.max(1)
        of_true = logs.gather(1, targets[:, None].clamp(0, outputs.shape[1] - 1))[:, 0]
        return targets, predicted, best, of_true
    if task == "segmentation":
        return targets, predicted_masks(outputs)
    if task == "text":
        tokens = outputs.argmax(2 if targets.shape == outputs.shape[:2] else 1)
        places = (0, TEXT_LENGTH - targets.shape[1])
        return pad(targets, places, value=-100), pad(tokens, places)
    return targets, outputs


def predicted_masks(outputs: Tensor) -> Tensor:
    """Class indices (N, H, W) of logits or probabilities (N, classes, H, W) or (N, 1, H, W)."""
    if outputs.shape[1] > 1:
        return outputs.argmax(1)
    return (probabilities(outputs)[:, 0] > 0.5).long()


def probabilities(outputs: Tensor) -> Tensor:
    """The sigmoid of logits. What lies in [0, 1] is a probability already, as for torchmetrics."""
    are_probabilities = ((outputs >= 0) & (outputs <= 1)).all()
    return torch.where(are_probabilities, outputs, outputs.sigmoid())


def confusion(predicted: Tensor, true: Tensor, num_classes: int) -> Tensor:
    """int64 (num_classes, num_classes), rows are true classes. Others, such as -100, which the loss
    ignores, do not count."""
    counts = (true >= 0) & (true < num_classes)
    return classification.multiclass_confusion_matrix(predicted[counts], true[counts], num_classes)


def iou(pixels: Tensor) -> Tensor:
    """(classes,) of a confusion matrix; NaN for a class that is neither true nor predicted."""
    return pixels.diag() / (pixels.sum(0) + pixels.sum(1) - pixels.diag())


class PredictionFigures(Callback):
    """Draws pictures of the predictions in view/, for validations and the test, by the module's
    `task`; docs/tensorboard.md lists them. At the start `inputs/train`, images as the network gets
    them. A line says what is not drawn.

    every_n_epochs: of the pictures of validations. The last validation is always drawn.
    """

    def __init__(self, every_n_epochs: int) -> None:
        self.every_n_epochs = every_n_epochs
        self.evaluated: Evaluated | None = None  # the newest evaluation, until it is drawn
        self.loader: Any = None  # of this evaluation
        self.order: list[int] = []  # indices of this process's samples
        self.has_pictures = self.has_predictions = False

    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        # only the first process's loggers write
        self.has_pictures = trainer.strategy.broadcast(has_pictures(trainer.loggers))
        missing = what_is_missing(pl_module, trainer.datamodule)
        if self.has_pictures and missing:
            say_once(f"Pictures: none {missing}")
        self.has_predictions = self.has_pictures and not missing.startswith("of")

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        data = trainer.datamodule
        draws = self.has_pictures and isinstance(data, BaseDataModule) and has_images(data)
        if draws and trainer.global_step == 0:
            figure = input_figure(data, pl_module)
            log_figure(trainer.loggers, "view/inputs/train", figure, 0)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self.evaluated = None
        self.loader = trainer.test_dataloaders if trainer.testing else trainer.val_dataloaders
        draws = self.has_predictions and not trainer.sanity_checking
        if draws and isinstance(self.loader, ResumableLoader):
            every = math.ceil(len(self.loader.dataset) / NUM_SAMPLES)
            stage = "test" if trainer.testing else "val"
            self.evaluated = Evaluated(pl_module, trainer.datamodule, stage, every)
            self.order = [i for batch in self.loader.batch_sampler for i in batch]

    def on_validation_batch_end(
        self, trainer: Any, pl_module: Any, _: Any, __: Any, batch_idx: int, *___: Any
    ) -> None:
        if self.evaluated:
            size = self.loader.batch_sampler.batch_size
            indices = self.order[batch_idx * size : (batch_idx + 1) * size]
            self.evaluated.add(indices)

    on_test_start = on_validation_start
    on_test_batch_end = on_validation_batch_end  # type: ignore[assignment]

    def on_validation_end(self, trainer: Any, pl_module: LightningModule) -> None:
        if (trainer.current_epoch + 1) % self.every_n_epochs == 0:
            self.on_test_end(trainer, pl_module)

    def on_train_end(self, trainer: Any, pl_module: LightningModule) -> None:
        self.on_test_end(trainer, pl_module)

    def on_test_end(self, trainer: Any, pl_module: LightningModule) -> None:
        evaluated, self.evaluated = self.evaluated, None
        if evaluated is None:
            return
        evaluated.gather()
        stage = evaluated.stage
        if evaluated.misfit:
            say_once(f"Pictures: none of predictions of {stage}: {evaluated.misfit}")
        elif trainer.is_global_zero:
            figures = FIGURES[evaluated.task](evaluated, self.loader.dataset)
            for kind, figure in figures.items():
                log_figure(trainer.loggers, f"view/{kind}/{stage}", figure, newest_step(trainer))


def what_is_missing(model: LightningModule, data: Any) -> str:
    """What is not drawn, and what would change that; empty if all is drawn."""
    name, data_name = type(model).__name__, type(data).__name__
    if not isinstance(data, BaseDataModule) or not isinstance(model, BaseModule):
        return f"of predictions: they need a BaseModule, {name}, and a BaseDataModule, {data_name}"
    if model.task not in FIGURES:
        return f"of predictions: set the attribute task of {name} to one of {', '.join(FIGURES)}"
    if model.task == "text" and not is_overridden("to_text", data, BaseDataModule):
        return f"of texts: {data_name} has no method to_text"
    are_images = data.empty_batch is not None and data.empty_batch.dim() == 4
    if not data.image_shape and (are_images or model.task == "segmentation"):
        return f"with images: set the attribute image_shape of {data_name}"
    if data.image_shape and not has_images(data):
        return f"with images: the inputs of {data_name} are no tensor"
    return ""


def has_images(data: BaseDataModule) -> bool:
    """Whether the inputs are images, as one tensor."""
    return bool(data.image_shape) and data.empty_batch is not None


def input_figure(data: BaseDataModule, model: LightningModule) -> Figure:
    """Training images as the network gets them, with their classes or masks."""
    samples = data.splits["train"]
    batch = samples.__getitems__(spread(len(samples), NUM_IMAGES))
    # the training draws the same random numbers with and without this figure
    with torch.no_grad(), isolate_rng(include_cuda=model.device.type == "cuda"):
        batch = data.transform_batch(move_data_to_device(batch, model.device), training=True)
    task = model.task if isinstance(model, BaseModule) else None
    images, targets = inputs_of(batch).cpu(), targets_of(batch)
    texts = [""] * len(images)
    if task == "multiclass" and data.classes and isinstance(targets, Tensor):
        texts = [shorten(data.classes[target], 9) for target in targets.tolist()]
    if task == "segmentation" and isinstance(targets, Tensor):
        masks = targets.cpu().reshape(len(images), *targets.shape[-2:])
        images = [overlay(*pair) for pair in zip(images, masks, strict=True)]
    title = "training images as the network gets them"
    return image_grid(images, texts, ["black"] * len(images), title)


def multiclass_figures(evaluated: Evaluated, dataset: Any) -> dict[str, Figure]:
    """Confusion matrix, and for images predictions and mistakes."""
    [[true, predicted, best, of_true]] = evaluated.columns
    names = class_names(evaluated.data, int(torch.maximum(true, predicted).max()) + 1)
    is_right = predicted == true
    counts = confusion(predicted, true, len(names))
    right = f"{int(is_right.sum()):,} of {len(true):,} right ({is_right.double().mean():.2%})"
    figures = {"confusion_matrix": confusion_matrix(counts, names, f"{evaluated.stage}: {right}")}
    if has_images(evaluated.data):

        def label(i: int) -> Label:
            text = f"{shorten(names[predicted[i]], 9)} {best[i].exp():.0%}"
            return text, shorten(names[true[i]], 9), bool(is_right[i])

        rows = (true >= 0).nonzero()[:, 0].tolist()  # others are ignored by the loss
        rows = [rows[i] for i in spread(len(rows), NUM_IMAGES)]
        title = "predicted class, its probability"
        figures["predictions"] = labelled_grid(evaluated, dataset, rows, label, title)
        wrong = (~is_right & (true >= 0)).nonzero()[:, 0]
        rows = wrong[of_true[wrong].argsort()][:NUM_IMAGES].tolist()
        title = f"the worst of {len(wrong):,} mistakes" if rows else "no mistakes"
        figures["mistakes"] = labelled_grid(evaluated, dataset, rows, label, title)
    return figures


def multilabel_figures(evaluated: Evaluated, dataset: Any) -> dict[str, Figure]:
    """Precision and recall of each label, and for images predictions."""
    [[true, outputs]] = evaluated.columns
    has_label, is_true = probabilities(outputs) > 0.5, true > 0.5
    names = class_names(evaluated.data, true.shape[1])
    options: Any = {"num_labels": len(names), "average": "none"}
    values = {
        "precision": classification.multilabel_precision(has_label, is_true, **options),
        "recall": classification.multilabel_recall(has_label, is_true, **options),
    }
    title = f"{evaluated.stage}: {len(true):,} samples, labels with a probability over 0.5"
    figures = {"labels": bars(values, names, title)}
    if has_images(evaluated.data):

        def label(i: int) -> Label:
            columns = has_label[i], is_true[i]
            texts = [", ".join(names[k] for k in x.nonzero()[:, 0]) or "none" for x in columns]
            return shorten(texts[0]), shorten(texts[1]), torch.equal(*columns)

        rows = spread(len(true), NUM_IMAGES)
        title = "predicted labels"
        figures["predictions"] = labelled_grid(evaluated, dataset, rows, label, title)
    return figures


def labelled_grid(
    evaluated: Evaluated, dataset: Any, rows: list[int], label: Callable[[int], Label], title: str
) -> Figure:
    labels = [label(i) for i in rows]
    texts = [text if is_right else f"{text}\nis {true}" for text, true, is_right in labels]
    colours = [RIGHT if is_right else WRONG for *_, is_right in labels]
    indices = [evaluated.indices[i] for i in rows]
    images = inputs_of(dataset.__getitems__(indices)) if rows else []
    return image_grid(images, texts, colours, f"{evaluated.stage}: {title}")


def segmentation_figures(evaluated: Evaluated, dataset: Any) -> dict[str, Figure]:
    """IoU of each class, and images with their true and predicted masks."""
    of_class = iou(evaluated.pixels)
    accuracy = evaluated.pixels.diag().sum() / evaluated.pixels.sum()
    title = f"{evaluated.stage}: mean {of_class.nanmean():.3f}, pixel accuracy {accuracy:.2%}"
    figures = {"iou": bars({"IoU": of_class}, class_names(evaluated.data, len(of_class)), title)}
    if has_images(evaluated.data):
        tiles: list[Tensor] = []
        images = inputs_of(dataset.__getitems__(evaluated.indices))
        for image, *masks in zip(images, *evaluated.columns[0], strict=True):
            tiles += [image, *(overlay(image, mask) for mask in masks)]
        texts = ["image", "true", "predicted"] * len(images)
        title = f"{evaluated.stage}: masks over the images"
        figures["predictions"] = image_grid(tiles, texts, ["black"] * len(texts), title, 6)
    return figures


def regression_figures(evaluated: Evaluated, dataset: Any) -> dict[str, Figure]:
    [[true, predicted]] = evaluated.columns
    errors = (predicted - true).flatten()
    title = f"{evaluated.stage}: mean {errors.mean():.4g}, standard deviation {errors.std():.4g}"
    histogram, axes = new_figure(3.6, 3.0, title, "predicted - true", "numbers")
    axes.hist(errors.numpy(), bins=50, color=COLOURS[0])
    predictions = true_against_predicted(true, predicted, evaluated.stage)
    return {"predictions": predictions, "errors": histogram}


def text_figures(evaluated: Evaluated, dataset: Any) -> dict[str, Figure]:
    """True and predicted texts, without the places that the loss ignores."""
    if not is_overridden("to_text", evaluated.data, BaseDataModule):
        return {}
    figure, axes = new_figure(8, 5, f"{evaluated.stage}: true and predicted texts")
    axes.set_axis_off()
    axes.set_ylim(2 * len(evaluated.indices), 0)
    style: Any = {"family": "monospace", "fontsize": 8, "parse_math": False}
    for row, (true, predicted) in enumerate(zip(*evaluated.columns[0], strict=True)):
        counts = true >= 0
        texts = [evaluated.data.to_text(tokens[counts]) for tokens in (true, predicted)]
        colour = RIGHT if texts[0] == texts[1] else WRONG
        axes.text(0, 2 * row + 0.4, shorten(printable(texts[0]), 100), **style)
        axes.text(0, 2 * row + 1.1, shorten(printable(texts[1]), 100), color=colour, **style)
    return {"predictions": figure}


FIGURES = {
    "multiclass": multiclass_figures,
    "multilabel": multilabel_figures,
    "segmentation": segmentation_figures,
    "regression": regression_figures,
    "text": text_figures,
}


def overlay(image: Tensor, mask: Tensor) -> Tensor:
    """uint8 (3, H, W): an image (C, H, W) under the colours of the classes in a mask (h, w). Pixels
    that the loss ignores have no colour."""
    mask = interpolate(mask[None, None].double(), image.shape[-2:])[0].long()
    pixels = torch.from_numpy(displayable(image)) * 255
    pixels = pixels.permute(2, 0, 1) if pixels.dim() == 3 else pixels.expand(3, -1, -1)
    mixed = (pixels + PALETTE[mask[0] % 256].permute(2, 0, 1)) / 2
    return torch.where((mask < 0) | (mask == 255), pixels, mixed).to(torch.uint8)


def bars(values: Mapping[str, Tensor], names: Sequence[str], title: str) -> Figure:
    """values: by name, (classes,) in [0, 1]. Up to 50 classes have names."""
    num = len(names)
    figure, axes = new_figure(4.8, min(10.0, 1.0 + 0.25 * num), title)
    thickness = 0.8 / len(values)
    for k, (name, numbers) in enumerate(values.items()):
        places = np.arange(num) + (k - (len(values) - 1) / 2) * thickness
        axes.barh(places, numbers.numpy(), thickness, label=name, color=COLOURS[2 * k])
    axes.set(xlim=(0, 1), ylim=(num - 0.5, -0.5))
    if num <= 50:
        axes.set_yticks(range(num), [shorten(name) for name in names], fontsize=8)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize=8)
    return figure


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
    to 20 have counts in the cells; of more every tenth has a tick.
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
    else:
        axes.set_xticks(range(0, num, 10))
        axes.set_yticks(range(0, num, 10))
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
    images: Sequence[Tensor] | Tensor,
    texts: Sequence[str],
    colours: Sequence[str],
    title: str,
    num_columns: int = 5,
) -> Figure:
    """images: a few of one size (C, H, W), uint8 or float; each has its text above."""
    num_rows = max(1, math.ceil(len(images) / num_columns))
    width, text_height = 0.9, 0.34  # inches
    height = text_height + width
    figure, axes = new_figure(num_columns * width, num_rows * height + 0.4)
    figure.suptitle(title, fontsize=9)
    axes.set_axis_off()
    style: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 7, "linespacing": 0.9}
    for k, (image, text, colour) in enumerate(zip(images, texts, colours, strict=True)):
        left, top = (k % num_columns) * width, (k // num_columns) * height
        extent = (left + 0.04, left + width - 0.04, top + height - 0.04, top + text_height)
        shown = displayable(image)
        axes.imshow(shown, extent=extent, interpolation="nearest", cmap="gray", vmin=0, vmax=1)
        axes.text(left + width / 2, top + text_height / 2, text, color=colour, **style)
    axes.set(xlim=(0, num_columns * width), ylim=(num_rows * height, 0))
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
