"""What the network gets right and wrong, as pictures for loggers."""

import contextlib
import copy
import io
import warnings
from typing import Any

import torch
from lightning import Callback, LightningModule
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torchmetrics.functional.classification import multiclass_confusion_matrix

from lightbase.curves import gather
from lightbase.data.batches import ResumableLoader
from lightbase.data.module import BaseDataModule
from lightbase.errors import first_line
from lightbase.module import BaseModule
from lightbase.ranks import say
from lightbase.watch import charts

RIGHT, WRONG = "#2a7a2a", "#c03030"


class PredictionFigures(Callback):
    """Draws into view/, for validations and the test of a BaseDataModule of images with classes:
    `confusion_matrix/val`, a fixed grid of samples with their predictions `predictions/val`, and
    the mistakes in which the true class was held least likely `mistakes/val`; of one with numbers
    as targets, true against predicted ones `predictions/val`; the same with `/test`. After the
    first epoch also `inputs/train`, images as the network gets them, and the network's graph.

    It wants the logits (N, classes), or the predicted numbers in the shape of the targets, as
    output of validation_step and test_step; without them it draws nothing. Beside every n epochs it
    draws the last validation and the test.
    """

    def __init__(self, every_n_epochs: int) -> None:
        self.every_n_epochs = every_n_epochs
        # of the newest evaluation, until it is drawn: true class, predicted class, its and the true
        # one's log-probability, each (N,); or true and predicted numbers, (N, ...)
        self.batches: list[tuple[Tensor, ...]] = []
        self.inputs_are_drawn = False
        self.has_pictures = (
            False  # a logger of the first process; the others' loggers write nothing
        )

    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        self.has_pictures = trainer.strategy.broadcast(charts.has_pictures(trainer.loggers))

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        self.inputs_are_drawn = trainer.global_step > 0

    def on_validation_batch_end(
        self, trainer: Any, _: Any, outputs: Any, batch: Any, batch_idx: int, *__: Any
    ) -> None:
        if batch_idx == 0:
            self.batches = []
        if not self._is_on(trainer) or trainer.sanity_checking:
            return
        if (
            not isinstance(outputs, Tensor)
            or not isinstance(batch, tuple | list)
            or not isinstance(batch[1], Tensor)
        ):
            return
        outputs, targets = outputs.detach().float(), batch[1]
        if outputs.shape == targets.shape and targets.is_floating_point():
            self.batches.append((targets, outputs))
        elif are_logits(outputs, targets):
            log_probabilities = outputs.log_softmax(1)
            best, predicted = log_probabilities.max(1)
            self.batches.append(
                (targets, predicted, best, log_probabilities.gather(1, targets[:, None])[:, 0])
            )

    def on_test_batch_end(self, *args: Any) -> None:
        self.on_validation_batch_end(*args)

    def on_validation_end(self, trainer: Any, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self._draw_inputs(trainer, pl_module)
            if (trainer.current_epoch + 1) % self.every_n_epochs == 0:
                self._draw(trainer, "val", trainer.val_dataloaders)

    def on_train_end(self, trainer: Any, pl_module: LightningModule) -> None:
        self._draw_inputs(trainer, pl_module)
        self._draw(
            trainer, "val", trainer.val_dataloaders
        )  # of the last validation, unless that is done

    def on_test_end(self, trainer: Any, pl_module: LightningModule) -> None:
        self._draw(trainer, "test", trainer.test_dataloaders)

    def _is_on(self, trainer: Any) -> bool:
        data = trainer.datamodule
        has_any = isinstance(data, BaseDataModule) and bool(
            data.image_shape or not data.num_classes
        )
        return self.has_pictures and has_any

    def _draw_inputs(self, trainer: Any, pl_module: LightningModule) -> None:
        """After the first epoch: training need not wait for it."""
        data = trainer.datamodule
        if (
            self.inputs_are_drawn
            or not self._is_on(trainer)
            or not trainer.is_global_zero
            or not data.image_shape
        ):
            return
        self.inputs_are_drawn = True
        images, targets = data.splits["train"].__getitems__(
            spread(len(data.splits["train"]), charts.CELLS)
        )
        # the training draws the same random numbers with and without this figure
        with torch.no_grad(), isolate_rng(include_cuda=pl_module.device.type == "cuda"):
            inputs = data.normalize(data.augment(images.to(pl_module.device))).cpu()
        if data.num_classes and targets.dim() == 1 and not targets.is_floating_point():
            texts = [charts.shorten(data.classes[target], 9) for target in targets.tolist()]
        else:
            texts = [f"{target.item():.3g}" if target.numel() == 1 else "" for target in targets]
        title = "training images as the network gets them"
        grid = charts.image_grid(list(inputs), texts, ["black"] * len(texts), title)
        charts.write(trainer.loggers, "view/inputs/train", grid, 0)
        for logger in trainer.loggers:
            if isinstance(pl_module, BaseModule) and isinstance(logger, TensorBoardLogger):
                write_graph(logger.experiment, pl_module.net, inputs[:2])

    def _draw(self, trainer: Any, stage: str, loader: Any) -> None:
        if not self.batches or not isinstance(loader, ResumableLoader):
            return
        index, true, predicted, *log_probabilities = self._gather(loader)
        data, dataset = trainer.datamodule, loader.dataset
        if not trainer.is_global_zero or (log_probabilities and not data.image_shape):
            return
        loggers, step = (
            trainer.loggers,
            max(0, trainer.global_step - 1),
        )  # as Lightning's own curves
        if not log_probabilities:
            figure = charts.true_against_predicted(true, predicted, stage)
            charts.write(loggers, f"view/predictions/{stage}", figure, step)
            return
        best, own = log_probabilities
        num_classes = max(len(data.classes), int(torch.maximum(true, predicted).max()) + 1)
        classes = class_names(data.classes, num_classes)
        is_right = predicted == true
        title = (
            f"{stage}: {int(is_right.sum()):,} of {len(true):,} right "
            f"({is_right.double().mean():.2%})"
        )
        counts = multiclass_confusion_matrix(predicted, true, num_classes)
        charts.write(
            loggers,
            f"view/confusion_matrix/{stage}",
            charts.confusion_matrix(counts, classes, title),
            step,
        )

        some = torch.tensor(spread(len(index), charts.CELLS))
        wrong = (~is_right).nonzero()[:, 0]
        worst = wrong[own[wrong].argsort()][: charts.CELLS]
        mistakes = f"the worst of {len(wrong):,} mistakes" if len(wrong) else "no mistakes"
        grids = {
            "predictions": (some, "predicted class, its probability"),
            "mistakes": (worst, mistakes),
        }
        for kind, (chosen, title) in grids.items():
            images: Any = dataset.__getitems__(index[chosen].tolist())[0] if len(chosen) else []
            texts, colours = [], []
            for i in chosen.tolist():
                text = f"{charts.shorten(classes[predicted[i]], 9)} {best[i].exp():.0%}"
                texts.append(
                    text if is_right[i] else f"{text}\nis {charts.shorten(classes[true[i]], 9)}"
                )
                colours.append(RIGHT if is_right[i] else WRONG)
            grid = charts.image_grid(list(images), texts, colours, f"{stage}: {title}")
            charts.write(loggers, f"view/{kind}/{stage}", grid, step)

    def _gather(self, loader: ResumableLoader) -> list[Tensor]:
        """Index in the data set, and what has been collected, of the samples of all processes, in
        the set's order."""
        order = torch.tensor([i for batch in loader.batch_sampler for i in batch])
        columns = [torch.cat(column).cpu() for column in zip(*self.batches, strict=True)]
        self.batches = []
        parts = gather([order[: len(columns[0])], *columns])
        columns = [torch.cat(column) for column in zip(*parts, strict=True)]
        by_index = columns[0].argsort()
        return [column[by_index] for column in columns]


def are_logits(outputs: Any, targets: Any) -> bool:
    """Whether these are logits (N, classes) and labels (N,)."""
    are_tensors = isinstance(outputs, Tensor) and isinstance(targets, Tensor)
    return (
        are_tensors
        and outputs.dim() == 2
        and targets.shape == outputs.shape[:1]
        and not targets.is_floating_point()
    )


def class_names(names: list[str], num_classes: int) -> list[str]:
    """Numbers for those that have none."""
    return [*names, *map(str, range(len(names), num_classes))]


def spread(num: int, count: int) -> list[int]:
    """Up to `count` of the indices of `num` samples, evenly spread: a data set may be sorted by
    class."""
    count = min(num, count)
    return [i * num // count for i in range(count)]


def write_graph(writer: Any, net: nn.Module, inputs: Tensor) -> None:
    """A graph by tracing a copy of the network on the CPU: one that is not compiled and keeps its
    state."""
    silence = contextlib.redirect_stdout(io.StringIO())  # it prints an error before it raises it
    try:
        with torch.random.fork_rng([]), warnings.catch_warnings(), silence:
            # an `if` on a tensor's value: the trace is drawn, not run
            warnings.simplefilter("ignore", torch.jit.TracerWarning)
            # torch's own add_graph still traces; there is no other way to the GRAPHS tab (pytorch
            # issue 49823)
            warnings.filterwarnings(
                "ignore", "`torch.jit.trace(_method)?` is (deprecated|not supported)"
            )
            writer.add_graph(copy.deepcopy(net).cpu().float().eval(), inputs.float())
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        say(f"No graph of {type(net).__name__} in TensorBoard: {first_line(error)}")
