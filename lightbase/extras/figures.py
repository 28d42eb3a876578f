"""Pictures for loggers: what the network gets right and wrong, drawn without a
screen."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from lightning import Callback, LightningModule
from lightning.pytorch.loggers import (
    Logger,
    MLFlowLogger,
    TensorBoardLogger,
    WandbLogger,
)
from lightning.pytorch.utilities import move_data_to_device
from lightning.pytorch.utilities.seed import isolate_rng
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn.functional import interpolate, pad
from torchmetrics.functional import classification
from torchvision.utils import draw_segmentation_masks, make_grid

from lightbase.core.batches import inputs_of, targets_of
from lightbase.core.curves import Stage, gather, newest_step
from lightbase.core.data import BaseDataModule
from lightbase.core.errors import printable, say_once
from lightbase.core.module import BaseModule
from lightbase.extras.metric_values import metric_figures, write_values

NUM_IMAGES = 25  # of a grid
NUM_SAMPLES = 10  # masks or texts of a picture
NUM_POINTS = 5000  # of a plot of predicted numbers
TEXT_LENGTH = 100  # tokens
# The shapes that targets may have, from the shape of the outputs
SHAPES: dict[str, Callable[..., list[tuple[int, ...]]]] = {
    "multiclass": lambda n, classes: [(n,)],
    "multilabel": lambda n, labels: [(n, labels)],
    "segmentation": lambda n, classes, h, w: [(n, h, w), (n, 1, h, w)],
    "text": lambda n, a, b: [(n, a), (n, b)],
    "regression": lambda *shape: [shape],
}
MEASURES = {
    "precision": classification.precision,
    "recall": classification.recall,
    "f1": classification.f1_score,
}


def class_names(data: Any, num_classes: int) -> list[str]:
    """The names of the classes, and numbers for those that have none."""
    names = data.classes if isinstance(data, BaseDataModule) else []
    return [*names, *map(str, range(len(names), num_classes))]


def fits(task: str, outputs: Any, targets: Any) -> bool:
    """Whether a batch has the shapes of the task. A text with as many tokens as places
    does not: it may be meant in two ways."""
    try:
        return SHAPES[task](*outputs.shape).count(tuple(targets.shape)) == 1
    except (AttributeError, TypeError):  # no tensors, or of other dimensions
        return False


def predicted_masks(outputs: Tensor) -> Tensor:
    """Class indices (N, H, W) of logits or probabilities (N, classes, H, W) or (N, 1,
    H, W)."""
    if outputs.shape[1] > 1:
        return outputs.argmax(1)
    return (probabilities(outputs)[:, 0] > 0.5).long()


def probabilities(outputs: Tensor) -> Tensor:
    """The sigmoid of logits. What lies in [0, 1] is a probability already, as for
    torchmetrics."""
    are_probabilities = ((outputs >= 0) & (outputs <= 1)).all()
    return torch.where(are_probabilities, outputs, outputs.sigmoid())


def confusion(true: Tensor, predicted: Tensor, num_classes: int) -> Tensor:
    """int64 (num_classes, num_classes), rows are true classes. Others, such as -100,
    which the loss ignores, do not count."""
    counts = (true >= 0) & (true < num_classes)
    return classification.multiclass_confusion_matrix(
        predicted[counts], true[counts], num_classes
    )


def columns_of(task: str, outputs: Tensor, targets: Tensor) -> list[Tensor]:
    """What is kept of a batch, each (N, ...): true and predicted values, which are
    class numbers except for multilabel and regression. For multiclass also the
    log-probability of the predicted class and of the true class, each (N,)."""
    if task == "multiclass":
        are_probabilities = (outputs >= 0).all() & (
            (outputs.sum(1) - 1).abs() < 1e-3
        ).all()
        logs = torch.where(are_probabilities, outputs.log(), outputs.log_softmax(1))
        best, predicted = logs.max(1)
        of_true = logs.gather(1, targets[:, None].clamp(0, outputs.shape[1] - 1))[:, 0]
        return [targets, predicted, best, of_true]
    if task == "segmentation":
        masks = predicted_masks(outputs)
        return [targets.view_as(masks).long(), masks]
    if task == "text":
        tokens = outputs.argmax(2 if targets.shape == outputs.shape[:2] else 1)
        places = (0, TEXT_LENGTH - targets.shape[1])
        return [pad(targets, places, value=-100), pad(tokens, places)]
    return [targets, outputs]


class PredictionKeeper(Callback):
    """Keeps what pictures and reports need of a validation or test, as its steps give
    it to `track`, after `start`. Of masks and texts it keeps NUM_SAMPLES samples.

    loader: Of the evaluation; None: nothing is kept.
    misfit: Why the outputs do not fit the task; empty if they do.
    columns: After `gather`, of the kept samples, in the order of the data set: see
        `columns_of`.
    indices: Of these samples in the data set.
    confusion: After `gather`, int (classes, classes) of all samples or pixels; rows are
        true.
    names: Of the classes or labels.
    """

    loader: Any = None

    def start(self, trainer: Any, pl_module: Any) -> None:
        self.task: Any = pl_module.task
        self.data = trainer.datamodule
        self.loader = (
            trainer.test_dataloaders if trainer.testing else trainer.val_dataloaders
        )
        self.misfit = ""
        self.batches: list[list[Tensor]] = []
        self.confusion: Any = torch.tensor(0)

    def on_validation_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if self.loader is not None:
            pl_module.tracked = None  # this step may not call `track`

    def on_validation_batch_end(
        self, trainer: Any, pl_module: Any, _: Any, __: Any, batch_idx: int, *___: Any
    ) -> None:
        if self.loader is None or self.misfit:
            return
        tracked: Any = pl_module.tracked or (None, None)
        outputs, targets = tracked
        num, size = len(self.loader.dataset), self.loader.batch_sampler.batch_size
        order = range(num)[trainer.global_rank :: trainer.world_size]
        indices = torch.tensor(order[batch_idx * size :][:size])
        if not fits(self.task, outputs, targets) or len(targets) != len(indices):
            what = (
                f"the outputs and targets that {type(pl_module).__name__} gives track"
            )
            self.misfit = f"{what} do not fit task {self.task}: see docs/tensorboard.md"
            return
        columns = columns_of(self.task, outputs.float(), targets)
        if self.task == "segmentation":
            num_classes = max(2, outputs.shape[1])
            self.confusion = self.confusion + confusion(
                columns[0], columns[1], num_classes
            )
        every = (
            math.ceil(num / NUM_SAMPLES) if self.task in ("segmentation", "text") else 1
        )
        rows = [row for row, index in enumerate(indices.tolist()) if index % every == 0]
        self.batches.append([some_rows(column, rows) for column in (indices, *columns)])
        if columns[0].shape[1:] != self.batches[0][1].shape[1:]:
            self.misfit = "the batches have targets of different shapes"

    on_test_batch_start = on_validation_batch_start  # type: ignore[assignment]
    on_test_batch_end = on_validation_batch_end  # type: ignore[assignment]

    def gather(self) -> None:
        """Take the samples of all processes. All processes must call this."""
        batches = [] if self.misfit else self.batches
        columns = [torch.cat(parts).cpu() for parts in zip(*batches, strict=True)]
        parts = gather((self.misfit, columns, self.confusion.cpu()))
        self.misfit = next((misfit for misfit, *_ in parts if misfit), "")
        if self.misfit:
            return
        columns = [
            torch.cat(column)
            for column in zip(*(part[1] for part in parts), strict=True)
        ]
        by_index = columns[0].argsort()
        self.indices, *self.columns = [column[by_index] for column in columns]
        self.confusion = sum(part[2] for part in parts)
        true, predicted, *_ = self.columns
        num = len(self.confusion) if self.task == "segmentation" else true.shape[-1]
        if self.task == "multiclass":
            num = len(
                class_names(self.data, int(torch.maximum(true, predicted).max()) + 1)
            )
            self.confusion = confusion(true, predicted, num)
        self.names = class_names(self.data, num)

    def scores(self) -> dict[str, Tensor]:
        """Of each class: for masks the IoU, which is NaN for a class that is neither
        true nor predicted, otherwise precision, recall and F1. support: how often it is
        true."""
        true, predicted, *_ = self.columns
        support = self.confusion.sum(-1)
        if self.task == "segmentation":
            right = self.confusion.diag()
            return {
                "iou": right / (support + self.confusion.sum(0) - right),
                "support": support,
            }
        if self.task == "multilabel":
            true, predicted = (true > 0.5).long(), probabilities(predicted)
            support = true.sum(0)
        else:  # without those that the loss ignores
            true, predicted = true[true >= 0], predicted[true >= 0]
        num = len(self.names)
        options: Any = {"num_classes": num, "num_labels": num, "average": "none"}
        scores = {
            name: f(predicted, true, self.task, **options)
            for name, f in MEASURES.items()
        }
        return scores | {"support": support}

    def images(self, rows: Tensor) -> Tensor:
        """Of some of the kept samples, (N, 3, H, W) in [0, 1]."""
        return displayable(
            inputs_of(self.loader.dataset.__getitems__(self.indices[rows].tolist()))
        )


def some_rows(values: Tensor, rows: list[int]) -> Tensor:
    """A copy, because a compiled network may use the memory of its outputs again. An
    index on the CPU would wait for the GPU."""
    if len(rows) in (0, len(values)):
        return values[: len(rows)].clone()
    return torch.stack([values[row] for row in rows])


class PredictionFigures(PredictionKeeper):
    """Draws pictures in view/, after validations and the test: of predictions, by the
    module's `task`, and of metrics that are no curves, which also get a file.
    docs/tensorboard.md lists them. At the start `inputs/train`, images as the network
    gets them. A line says what is not drawn.

    every_n_epochs: of the pictures of validations; 0 draws none. The last one is always
        drawn.
    """

    def __init__(self, every_n_epochs: int) -> None:
        self.every_n_epochs = every_n_epochs
        self.is_drawn = True

    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        # only the first process's loggers write
        draws = self.every_n_epochs > 0 and has_pictures(trainer.loggers)
        self.draws = trainer.strategy.broadcast(draws)
        self.has_task = self.draws and has_task(pl_module, trainer.datamodule)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if self.draws and has_images(trainer.datamodule) and trainer.global_step == 0:
            figure = input_figure(trainer.datamodule, pl_module)
            log_figure(trainer.loggers, "view/inputs/train", figure, 0)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self.loader = None
        self.is_drawn = trainer.sanity_checking or not self.draws
        if self.has_task and not self.is_drawn:
            self.start(trainer, pl_module)

    on_test_start = on_validation_start

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            write_values(trainer, pl_module, "val")
        if self.draws and (trainer.current_epoch + 1) % self.every_n_epochs == 0:
            self.draw(trainer, pl_module, "val")

    def on_train_end(self, trainer: Any, pl_module: LightningModule) -> None:
        self.draw(trainer, pl_module, "val")

    def on_test_end(self, trainer: Any, pl_module: Any) -> None:
        write_values(trainer, pl_module, "test")
        self.draw(trainer, pl_module, "test")

    def draw(self, trainer: Any, pl_module: Any, stage: Stage) -> None:
        """Draw the newest evaluation, once."""
        if self.is_drawn:
            return
        self.is_drawn = True
        figures = metric_figures(pl_module, stage)
        if self.loader is not None:
            self.gather()
            if self.misfit:
                say_once(f"Pictures: none of predictions of {stage}: {self.misfit}")
            elif trainer.is_global_zero:
                figures |= FIGURES[self.task](self)
        if trainer.is_global_zero:
            for name, figure in figures.items():
                log_figure(
                    trainer.loggers,
                    f"view/{name}/{stage}",
                    figure,
                    newest_step(trainer),
                )


def has_task(model: LightningModule, data: Any) -> bool:
    """Whether predictions are drawn. A line says what is missing."""
    if not isinstance(data, BaseDataModule) or not isinstance(model, BaseModule):
        say_once(
            "Pictures: none of predictions: they need a BaseModule and a BaseDataModule"
        )
        return False
    if model.task is None:
        way_out = (
            f"set the attribute task of {type(model).__name__}, see docs/tensorboard.md"
        )
        say_once(f"Pictures: none of predictions: {way_out}")
    elif (
        data.empty_batch is not None
        and data.empty_batch.dim() == 4
        and not data.image_shape
    ):
        say_once(
            f"Pictures: no images: set the attribute image_shape of {type(data).__name__}"
        )
    elif data.image_shape and not has_images(data):
        say_once(
            f"Pictures: no images: the inputs of {type(data).__name__} are no tensor"
        )
    return model.task is not None


def has_images(data: Any) -> bool:
    """Whether the inputs are images of one size, in one tensor."""
    is_ours = isinstance(data, BaseDataModule)
    return is_ours and data.image_shape is not None and data.empty_batch is not None


def input_figure(data: BaseDataModule, model: LightningModule) -> Figure:
    """Training images as the network gets them, with their classes or masks."""
    samples = data.splits["train"]
    batch = samples.__getitems__(spread(len(samples), NUM_IMAGES))
    # the training draws the same random numbers with and without this figure
    with torch.no_grad(), isolate_rng(include_cuda=model.device.type == "cuda"):
        batch = data.transform_batch(
            move_data_to_device(batch, model.device), training=True
        )
    images, texts = displayable(inputs_of(batch)), []
    task = model.task if isinstance(model, BaseModule) else None
    targets = targets_of(batch)
    if task == "multiclass" and data.classes and isinstance(targets, Tensor):
        texts = [shorten(data.classes[target], 9) for target in targets.tolist()]
    if task == "segmentation" and isinstance(targets, Tensor):
        images = overlay(
            images, targets.cpu().reshape(len(images), *targets.shape[-2:])
        )
    return image_grid(images, texts, "training images as the network gets them")


def multiclass_figures(kept: PredictionKeeper) -> dict[str, Figure]:
    """Confusion matrix, and for images predictions and mistakes."""
    true, predicted, best, of_true = kept.columns
    rows = (true >= 0).nonzero()[:, 0]  # others are ignored by the loss
    wrong = rows[(true != predicted)[rows]]
    num_right = len(rows) - len(wrong)
    title = (
        f"{num_right:,} of {len(rows):,} right ({num_right / max(1, len(rows)):.2%})"
    )
    figures = {"confusion_matrix": confusion_matrix(kept.confusion, kept.names, title)}
    if has_images(kept.data):
        names = kept.names

        def grid(rows: Tensor, title: str) -> Figure:
            values = zip(predicted[rows], true[rows], best[rows].exp(), strict=True)
            texts = [label_text(names[i], names[j], f" {p:.0%}") for i, j, p in values]
            return image_grid(kept.images(rows), texts, title)

        shown = rows[spread(len(rows), NUM_IMAGES)]
        figures["predictions"] = grid(shown, "predicted class, its probability")
        if len(wrong):
            worst = wrong[of_true[wrong].argsort()][:NUM_IMAGES]
            figures["mistakes"] = grid(worst, f"the worst of {len(wrong):,} mistakes")
    return figures


def multilabel_figures(kept: PredictionKeeper) -> dict[str, Figure]:
    """Precision and recall of each label, and for images predictions."""
    true, outputs = kept.columns
    scores = kept.scores()
    values = {name: scores[name] for name in ("precision", "recall")}
    title = f"{len(true):,} samples, labels with a probability over 0.5"
    figures = {"labels": bars(values, kept.names, title)}
    if has_images(kept.data):
        rows = torch.tensor(spread(len(true), NUM_IMAGES))
        pairs = zip(probabilities(outputs)[rows] > 0.5, true[rows] > 0.5, strict=True)
        texts = [
            label_text(*(labels(row, kept.names) for row in pair)) for pair in pairs
        ]
        figures["predictions"] = image_grid(
            kept.images(rows), texts, "predicted labels"
        )
    return figures


def label_text(predicted: str, true: str, note: str = "") -> str:
    text = f"{shorten(predicted, 9)}{note}"
    return text if predicted == true else f"{text}\nis {shorten(true, 9)}"


def labels(is_set: Tensor, names: Sequence[str]) -> str:
    return ", ".join(names[i] for i in is_set.nonzero()[:, 0])


def segmentation_figures(kept: PredictionKeeper) -> dict[str, Figure]:
    """IoU of each class, and images with their true and predicted masks."""
    of_class = kept.scores()["iou"]
    figures = {
        "iou": bars({"IoU": of_class}, kept.names, f"mean {of_class.nanmean():.3f}")
    }
    if has_images(kept.data):
        images = kept.images(torch.arange(len(kept.indices)))
        tiles = torch.stack(
            [images, *(overlay(images, masks) for masks in kept.columns)], dim=1
        )
        texts = ["image", "true", "predicted"] * len(images)
        figures["predictions"] = image_grid(
            tiles.flatten(0, 1), texts, "masks over the images", 6
        )
    return figures


def regression_figures(kept: PredictionKeeper) -> dict[str, Figure]:
    """True against predicted numbers of at most NUM_POINTS samples, and a histogram of
    errors."""
    true, predicted = (
        column.flatten(1) if column.dim() > 1 else column for column in kept.columns
    )
    rows = spread(len(true), NUM_POINTS)
    points, axes = new_figure(3.5, 3.5, f"{len(true):,} samples", "true", "predicted")
    axes.plot(true[rows].numpy(), predicted[rows].numpy(), ".", markersize=2, alpha=0.5)
    middle = float(true.mean())
    axes.axline(
        (middle, middle), slope=1, color="black"
    )  # where perfect predictions are
    errors = (predicted - true).flatten()
    title = f"mean {errors.mean():.4g}, standard deviation {errors.std():.4g}"
    histogram, axes = new_figure(3.5, 3.0, title, "predicted - true", "numbers")
    axes.hist(errors.numpy(), bins=50)
    return {"predictions": points, "errors": histogram}


def text_figures(kept: PredictionKeeper) -> dict[str, Figure]:
    """True and predicted texts, without the places that the loss ignores."""
    lines = []
    for true, predicted in zip(*kept.columns, strict=True):
        for name, tokens in (("true", true), ("predicted", predicted)):
            text = printable(kept.data.to_text(tokens[true >= 0]))
            lines.append(f"{name:10} {shorten(text, 100)}")
    figure, axes = new_figure(8, 5)
    axes.set_axis_off()
    text = "\n".join(lines)
    axes.text(0, 1, text, va="top", family="monospace", fontsize=8, parse_math=False)
    return {"predictions": figure}


FIGURES = {
    "multiclass": multiclass_figures,
    "multilabel": multilabel_figures,
    "segmentation": segmentation_figures,
    "regression": regression_figures,
    "text": text_figures,
}


def overlay(images: Tensor, masks: Tensor) -> Tensor:
    """Images (N, 3, H, W) in [0, 1] under the colours of the classes in masks (N, h,
    w). Pixels that the loss ignores, such as -100 or 255, have no colour."""
    masks = interpolate(masks[:, None].float(), images.shape[-2:])
    num_classes = int(masks.where(masks < 255, 0).max()) + 1
    of_classes = (
        masks == torch.arange(max(1, num_classes))[:, None, None]
    )  # (N, classes, H, W)
    pairs = zip(images, of_classes, strict=True)
    return torch.stack(
        [draw_segmentation_masks(image, mask, 0.5) for image, mask in pairs]
    )


def bars(values: Mapping[str, Tensor], names: Sequence[str], title: str) -> Figure:
    """values: by name, (classes,) in [0, 1]."""
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


def spread(num: int, count: int) -> list[int]:
    """At most `count` of the indices below `num`, evenly spread: data may be sorted by
    class."""
    count = min(num, count)
    return [i * num // count for i in range(count)]


def has_pictures(loggers: Sequence[Logger]) -> bool:
    """Whether one of the loggers takes pictures."""
    takers = (TensorBoardLogger, WandbLogger, MLFlowLogger)
    return any(isinstance(logger, takers) for logger in loggers)


def log_figure(loggers: Sequence[Logger], tag: str, figure: Figure, step: int) -> None:
    """Write a picture to the loggers that take one; to MLflow as the artifact
    TAG/STEP.png."""
    for logger in loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.experiment.add_figure(tag, figure, step)
        elif isinstance(logger, WandbLogger):
            logger.log_image(tag, [figure], step)
        elif isinstance(logger, MLFlowLogger):
            logger.experiment.log_figure(logger.run_id, figure, f"{tag}/{step}.png")


def new_figure(
    width: float,
    height: float,
    title: str = "",
    x: str = "",
    y: str = "",
    dpi: int = 100,
) -> tuple[Figure, Axes]:
    """width, height: inches of `dpi` pixels. Before a click, TensorBoard shows 350
    pixels."""
    figure = Figure((width, height), dpi=dpi, layout="constrained")
    axes = figure.add_subplot()
    figure.suptitle(title, fontsize=9)
    axes.set(xlabel=x, ylabel=y)
    return figure, axes


def pie(shares: Sequence[float], labels: Sequence[str], title: str) -> Figure:
    """shares: in [0, 1]. Labels are in a legend: beside thin slices they would
    overlap."""
    figure, axes = new_figure(3.5, 2.0, title)
    wedges, *_ = axes.pie(shares, startangle=90, counterclock=False)
    figure.legend(wedges, labels, loc="outside right center", fontsize=7)
    return figure


def confusion_matrix(counts: Tensor, classes: Sequence[str], title: str) -> Figure:
    """counts: int (classes, classes), rows are true classes. The colour is the share of
    the row, so rare classes are visible. Up to 20 classes have counts in the cells."""
    num = len(classes)
    cell = 0.3 if num <= 20 else 0.14  # inches
    side = max(3.5, 0.5 + cell * min(num, 100))
    figure, axes = new_figure(side, side, title, "predicted", "true")
    shares = (counts / counts.sum(1, keepdim=True).clamp(min=1)).sqrt()
    axes.imshow(shares.numpy(), cmap="Blues", vmin=0, vmax=1)
    name_ticks(axes.xaxis, classes)
    name_ticks(axes.yaxis, classes)
    axes.tick_params("x", rotation=90 if max(map(len, classes)) > 2 else 0)
    for i, j in counts.nonzero().tolist() if num <= 20 else ():
        colour = "white" if shares[i, j] > 0.6 else "black"
        axes.text(
            j, i, f"{counts[i, j]}", color=colour, ha="center", va="center", fontsize=6
        )
    return figure


def name_ticks(axis: Axis, names: Sequence[str]) -> None:
    """With more than 100 names they could not be read."""
    if len(names) <= 100:
        axis.set_ticks(range(len(names)), [shorten(name) for name in names], fontsize=7)


def image_grid(
    images: Tensor, texts: Sequence[str], title: str, num_columns: int = 5
) -> Figure:
    """images: (N, 3, H, W) in [0, 1], each with its text above. A text of two lines,
    which is a mistake, is red."""
    side = max(images.shape[-2:])
    margin, text_height = math.ceil(0.05 * side), math.ceil(0.4 * side)
    images = pad(images, (margin, margin, text_height, margin), value=1.0)
    height, width = images.shape[-2:]
    num_rows = math.ceil(len(images) / num_columns)
    rows_height = 3.5 / num_columns * num_rows * height / width
    figure, axes = new_figure(
        3.5, 0.4 + rows_height, title, dpi=100 if side <= 64 else 200
    )
    axes.set_axis_off()
    axes.imshow(make_grid(images, num_columns, padding=0).permute(1, 2, 0).numpy())
    for k, text in enumerate(texts):
        x, y = (
            (k % num_columns + 0.5) * width,
            k // num_columns * height + text_height / 2,
        )
        colour = "firebrick" if "\n" in text else "black"
        axes.text(x, y, text, color=colour, ha="center", va="center", fontsize=6)
    return figure


def displayable(images: Tensor) -> Tensor:
    """Images (N, C, H, W) as floats (N, 3, H, W) in [0, 1], grey unless they have three
    channels. Bytes are divided by 255; other numbers are stretched from the least to
    the greatest."""
    x = images.detach().cpu().float()
    if images.is_floating_point():
        lowest, highest = (
            x.amin((1, 2, 3), keepdim=True),
            x.amax((1, 2, 3), keepdim=True),
        )
        x = (x - lowest) / (highest - lowest).clamp(min=1e-12)
    else:
        x = x / 255
    return x if x.shape[1] == 3 else x.mean(1, keepdim=True).expand(-1, 3, -1, -1)


def shorten(name: str, length: int = 14) -> str:
    return name if len(name) <= length else f"{name[: length - 1]}…"
