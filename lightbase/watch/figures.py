"""Pictures for the loggers: what the network gets, and what it gets right and wrong.
docs/tensorboard.md shows them. FIGURES has a function for each task, and at the end of
the file there is one for each kind of picture.
"""

import json
import math
from collections.abc import Sequence, Sized
from itertools import chain
from typing import Any

import torch
from lightning import Callback
from lightning.pytorch.utilities import CombinedLoader, move_data_to_device
from lightning.pytorch.utilities.seed import isolate_rng
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn.functional import interpolate, pad
from torch.utils.data import SequentialSampler, default_collate
from torchvision.utils import make_grid

from lightbase.config.errors import say
from lightbase.config.files import write_whole
from lightbase.data.loader import DatasetSamples, Samples
from lightbase.data.module import BaseDataModule
from lightbase.data.tensors import inputs_of, spread, targets_of, to_host
from lightbase.model.curves import (
    Picture,
    Stage,
    gather,
    has_pictures,
    log_figure,
    run_folder,
    stage_name,
)
from lightbase.model.metrics import as_curve_names
from lightbase.model.module import BaseModule
from lightbase.model.predictions import (
    MISFITS,
    PALETTE,
    class_names,
    columns_of,
    confusion,
    task_of,
)
from lightbase.model.scores import gives_probabilities

NUM_COLUMNS = 5  # of a grid

NUM_IMAGES = 25  # in a grid

NUM_MASKS = 10  # in a picture

NUM_POINTS = 5000  # in a plot of predicted numbers


class PredictionFigures(Callback):
    """Draws pictures of a BaseDataModule and a BaseModule for the loggers.

    At the start it draws training images as the network gets them. After a validation
    or the test it draws the predictions, in the way that the module's `task` needs. It
    keeps the predictions of all samples for this, but only about NUM_MASKS masks,
    spread over the data set. It also writes metrics without a curve to files.

    every_n_epochs: Draw after the validations of each such epoch, and of the last one
        that trainer.max_epochs allows. 0 draws no pictures at all.
    data: The data module, or None if no pictures are drawn.
    loader: The first loader of the evaluation that will be drawn, or None.
    batches: For each batch of this evaluation, the positions of the samples in the data
        set, and the tensors of `columns_of`. Empty for a batch that does not fit.

    These attributes exist when an evaluation has ended:
    columns: The kept samples of all processes, see `columns_of`.
    indices: The positions of these samples in the data set, int64 (N,).
    figures: The pictures by name.
    """

    figures: dict[str, Figure] = {}
    data: Any = None
    loader: Any = None

    def __init__(self, every_n_epochs: int) -> None:
        self.every_n_epochs = every_n_epochs

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        data = trainer.datamodule
        is_ours = isinstance(data, BaseDataModule) and isinstance(pl_module, BaseModule)
        if is_ours and self.every_n_epochs and has_pictures(trainer):
            self.data = data

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Draw the training images, but not again when a run is resumed."""
        if has_images(self.data) and trainer.global_step == 0:
            figure = input_figure(self.data, pl_module)
            log_figure(trainer, "view/inputs/train", figure)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin to keep predictions if this validation, or the test, will be drawn."""
        if not self.data or trainer.sanity_checking or pl_module.task not in FIGURES:
            return
        epoch = trainer.current_epoch + 1
        if trainer.testing:
            self.loader = first_loader(trainer.test_dataloaders)
        elif epoch % self.every_n_epochs == 0 or epoch == trainer.max_epochs:
            self.loader = first_loader(trainer.val_dataloaders)
        self.batches: list[list[Tensor]] = []
        pl_module.tracked = None

    on_test_start = on_validation_start

    def on_validation_batch_end(
        self,
        trainer: Any,
        pl_module: Any,
        _: Any,
        __: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Keep copies of the outputs and targets that the step has given to `track`: a
        compiled network may write its next outputs into the same memory."""
        if self.loader is None or dataloader_idx > 0:
            return
        try:
            outputs, targets = pl_module.tracked
            self.task = task_of(pl_module, outputs)
            ignored = pl_module.curves_callback.ignored_target
            columns = columns_of(
                self.task,
                outputs.float(),
                targets,
                ignored,
                gives_probabilities(pl_module),
            )
            if self.task == "multiclass" and columns[1].dim() > 1:
                raise TypeError("a class for each word, for example")
        except MISFITS:
            self.batches.append([])
            return
        pl_module.tracked = None  # the next step may not call `track`
        # process r of n evaluates the samples r, r + n, r + 2 n, ...
        start = batch_idx * self.loader.batch_sampler.batch_size
        positions = torch.arange(start, start + len(targets))
        indices = positions * trainer.world_size + trainer.global_rank
        kept = [indices, *columns]
        if self.task == "segmentation":  # masks take much memory
            every = math.ceil(len(self.loader.dataset) / NUM_MASKS)
            kept = [column[indices % every == 0] for column in kept]
        self.batches.append([column.clone() for column in kept])

    on_test_batch_end = on_validation_batch_end  # type: ignore[assignment]

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Write the metrics without a curve. In the first process, draw what all have
        kept. If a batch does not fit the task, or has samples of another shape, print a
        line, and draw no more predictions."""
        if trainer.sanity_checking:
            return
        stage = trainer.state.stage.dataloader_prefix  # "val" or "test"
        write_metric_values(trainer, stage)
        if self.loader is None:
            return
        batches = chain(*gather(to_host(self.batches)))
        try:
            self.indices, *self.columns = map(torch.cat, zip(*batches, strict=True))
        except (RuntimeError, ValueError):
            say(
                "Pictures: none of predictions: the outputs and targets in track do "
                f"not fit task {pl_module.task}, see docs/tensorboard.md"
            )
            self.data = None
        else:
            if trainer.is_global_zero:
                shown = stage_name(trainer, stage)
                self.figures = FIGURES[self.task](self)
                for name, figure in self.figures.items():
                    log_figure(trainer, f"view/{name}/{shown}", figure)
        self.loader = None

    on_test_end = on_validation_end

    def images(self, indices: Tensor) -> Tensor:
        """Read again the images at these positions of the data set, int64 (N,). Return
        (N, 3, H, W) in [0, 1]."""
        samples = self.loader.dataset
        if not isinstance(samples, Samples):
            samples = DatasetSamples(samples, default_collate)
        return displayable(inputs_of(samples.__getitems__(indices.tolist())))


def first_loader(loaders: Any) -> Any:
    """Return the first of the loaders that a hook of the data has returned, or None if
    it has no batches in the order of its data set: which samples would be shown?"""
    loader: Any = CombinedLoader(loaders).flattened[0]
    is_ordered = isinstance(getattr(loader, "sampler", None), SequentialSampler)
    if is_ordered and loader.batch_sampler is not None:
        return loader
    return None


def write_metric_values(trainer: Any, stage: Stage) -> None:
    """Write metrics/STAGE_NAME.json in the run's folder for each metric that has no
    curve. A later call overwrites the file."""
    model = trainer.lightning_module
    if not trainer.is_global_zero or not isinstance(model, BaseModule):
        return
    means = model.curves_callback.means[stage]
    folder = run_folder(trainer) / "metrics"
    for name, value in means.non_scalar_values.items():
        folder.mkdir(exist_ok=True)
        file = folder / f"{means.prefix[:-1]}_{as_curve_names([name])[0]}.json"
        write_whole(file, json.dumps(value, default=Tensor.tolist))


def has_images(data: Any) -> bool:
    """Return whether the data module gives images: it is a BaseDataModule with an
    `image_shape`, and the inputs are one tensor (N, C, H, W)."""
    spec = getattr(data, "input_spec", None)
    return spec is not None and spec.dim() == 4 and data.image_shape is not None


# The pictures of each task


def input_figure(data: Any, model: BaseModule) -> Figure:
    """Draw up to NUM_IMAGES training images as the network gets them, after random
    transforms. Masks lie over the images."""
    samples = data.training_samples
    indices = [*range(NUM_IMAGES)]  # of a stream the first images
    if isinstance(samples, Sized):
        indices = spread(len(samples), NUM_IMAGES).tolist()
    batch = samples.__getitems__(indices)
    # the training draws the same random numbers with and without this figure
    with torch.no_grad(), isolate_rng(include_cuda=model.device.type == "cuda"):
        batch = move_data_to_device(batch, model.device)
        batch = data.transform_batch(batch, training=True)
    images = inputs_of(batch)
    if images.dim() != 4:  # `normalize` may flatten them
        images = images.reshape(-1, *data.image_shape)
    images = displayable(images)
    masks = targets_of(batch)
    if model.task == "segmentation" and isinstance(masks, Tensor):
        images = overlay(images, masks.cpu())
    return image_grid(images, [], "training images as the network gets them")


def multiclass_figures(kept: PredictionFigures) -> dict[str, Figure]:
    """Draw the confusion matrix, and for images also predictions: the worst mistakes
    first, then the right ones that are the least sure. Above an image stand the
    predicted class and its probability, and the true class if it is another."""
    true, predicted, shares = kept.columns
    names = class_names(kept.data, int(torch.maximum(true, predicted).max()) + 1)
    counts = confusion(true, predicted, len(names))
    title = f"{counts.sum() - counts.trace():,} of {counts.sum():,} wrong"
    figures = {"confusion_matrix": confusion_matrix(counts, names, title)}
    if not has_images(kept.data):
        return figures
    badness = torch.where(true == predicted, -shares, shares)
    rows = badness.argsort(descending=True, stable=True)
    rows = rows[true[rows] >= 0][:NUM_IMAGES]  # the loss ignores the others
    texts = []
    for row in rows.tolist():
        text = f"{names[predicted[row]]:.9} {shares[row]:.0%}"
        if predicted[row] != true[row]:
            text += f"\nis {names[true[row]]:.9}"
        texts.append(text)
    title += ", the worst first"
    images = kept.images(kept.indices[rows])
    figures["predictions"] = image_grid(images, texts, title)
    return figures


def segmentation_figures(kept: PredictionFigures) -> dict[str, Figure]:
    """Draw each kept image three times, in a column: plain, with the true mask, and
    with the predicted mask."""
    if not has_images(kept.data):
        return {}
    images = kept.images(kept.indices)
    masked = [overlay(images, masks) for masks in kept.columns]
    tiles = torch.cat([images, *masked], 2)
    title = "images, true masks, predicted masks"
    return {"predictions": image_grid(tiles, [], title)}


def regression_figures(kept: PredictionFigures) -> dict[str, Figure]:
    """Draw predicted numbers over true numbers. A perfect prediction lies on the black
    line."""
    true, predicted = (column.flatten() for column in kept.columns)
    rows = spread(len(true), NUM_POINTS)
    figure, axes = new_figure(f"{len(true):,} numbers")
    axes.set(xlabel="true", ylabel="predicted")
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


def new_figure(
    title: str, width: float = 3.5, height: float = 3.5, dpi: int = 100
) -> tuple[Figure, Axes]:
    """Return an empty figure and its axes. width, height: In inches. TensorBoard shows
    pictures 350 pixels wide until they are clicked."""
    figure = Picture((width, height), dpi=dpi, layout="constrained")
    figure.suptitle(title, fontsize=9)
    return figure, figure.add_subplot()


def confusion_matrix(counts: Tensor, classes: Sequence[str], title: str) -> Figure:
    """Draw a confusion matrix, see `confusion`.

    The colour of a cell is the square root of its share of the row. So rare mistakes
    are visible, and a rare class looks like a frequent one. The names of more than 100
    classes, and the counts of more than 20, would be too small to read.
    """
    num = len(classes)
    side = min(max(3.5, 0.3 * num), 14)  # inches
    figure, axes = new_figure(title, side, side)
    axes.set(xlabel="predicted", ylabel="true")
    shares = (counts / counts.sum(1, keepdim=True).clamp(min=1)).sqrt()
    # above 1, so that no cell is too dark for its number
    axes.imshow(shares.numpy(), cmap="Blues", vmin=0, vmax=1.5)
    if num <= 100:
        names = [f"{name:.14}" for name in classes]
        axes.set_xticks(range(num), names, fontsize=7, rotation=90)
        axes.set_yticks(range(num), names, fontsize=7)
    if num <= 20:
        for i, j in counts.nonzero().tolist():
            axes.text(j, i, f"{counts[i, j]}", ha="center", va="center", fontsize=6)
    return figure


def image_grid(images: Tensor, texts: Sequence[str], title: str) -> Figure:
    """Draw images in rows.

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
    inches = 3.5 * grid.shape[1] / grid.shape[2] + 0.4
    figure, axes = new_figure(title, height=inches, dpi=200)
    axes.set_axis_off()
    axes.imshow(grid.permute(1, 2, 0).numpy())
    for i, text in enumerate(texts):
        row, column = divmod(i, NUM_COLUMNS)
        axes.text(
            (column + 0.5) * width,
            row * height + top / 2,
            text,
            fontsize=5,
            ha="center",
            va="center",
        )
    return figure


def overlay(images: Tensor, masks: Tensor) -> Tensor:
    """Return images that are mixed half and half with the colours of the classes.
    Pixels that the loss ignores (below 0, or 255 and above) keep their colour.

    images: (N, 3, H, W) in [0, 1].
    masks: Class numbers (N, h, w) or (N, 1, h, w). They are resized to the images.
    """
    masks = masks.reshape(len(masks), 1, *masks.shape[-2:])
    masks = interpolate(masks.float(), images.shape[-2:]).long()
    classes = masks.clamp(0, 254)
    colours = PALETTE[classes[:, 0]].permute(0, 3, 1, 2) / 255
    return torch.where(masks == classes, (images + colours) / 2, images)


def displayable(images: Tensor) -> Tensor:
    """Return images (N, C, H, W) of any dtype as float32 (N, 3, H, W) on the CPU. If
    they do not have three channels they become grey, by the mean of the channels. Each
    image is scaled to [0, 1], because it may be normalised."""
    x = images.detach().cpu().float()
    if x.shape[1] != 3:
        x = x.mean(1, keepdim=True).repeat(1, 3, 1, 1)
    x = x - x.amin((1, 2, 3), keepdim=True)
    return x / x.amax((1, 2, 3), keepdim=True).clamp(min=1e-12)
