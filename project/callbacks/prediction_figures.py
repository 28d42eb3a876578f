"""What the network gets right and wrong, as pictures in TensorBoard."""

import contextlib
import copy
import io
import warnings
from typing import Any

import torch
import torch.distributed as dist
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor, nn
from torchmetrics.functional.classification import multiclass_confusion_matrix

from project.base.datamodule import TensorDataModule
from project.base.random_state import random_state, restore_random_state
from project.base.rank import say
from project.base.samples import ResumableLoader
from project.base.system import System
from project.callbacks import charts

RIGHT, WRONG = "#2a7a2a", "#c03030"


class PredictionFigures(Callback):
    """Draws, for validations and the test of a TensorDataModule of images with classes: `confusion_matrix/val`, a fixed
    grid of samples with their predictions `predictions/val`, and the mistakes in which the true class was held least
    likely `mistakes/val`; of one with numbers as targets, true against predicted ones `predictions/val`; the same with
    `/test`. After the first epoch also `inputs/train`, images as the network gets them, and the network's graph.

    It wants the logits (N, classes), or the predicted numbers in the shape of the targets, as output of validation_step
    and test_step; without them it draws nothing.

    every_n_epochs: how often, beside the last validation and the test; 0 draws nothing at all.
    """

    def __init__(self, every_n_epochs: int) -> None:
        self.every_n_epochs = every_n_epochs
        self.batches: list[tuple[Tensor, ...]] = []
        """Of the newest evaluation: true class, predicted class, its and the true one's log-probability, each (N,); or
        true and predicted numbers, (N, ...)."""
        self.is_drawn = True
        self.inputs_are_drawn = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.inputs_are_drawn = trainer.global_step > 0

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.batches, self.is_drawn = [], False

    def on_test_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.batches, self.is_drawn = [], False

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, *_: Any
    ) -> None:
        if self._is_on(trainer) and not trainer.sanity_checking:
            self._collect(outputs, batch)

    def on_test_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, *_: Any
    ) -> None:
        if self._is_on(trainer):
            self._collect(outputs, batch)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking:
            return
        self._draw_inputs(trainer, pl_module)
        if self.every_n_epochs and (trainer.current_epoch + 1) % self.every_n_epochs == 0:
            self._draw(trainer, "val", trainer.val_dataloaders)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._draw_inputs(trainer, pl_module)
        self._draw(trainer, "val", trainer.val_dataloaders)  # of the last validation, unless that is done

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._draw(trainer, "test", trainer.test_dataloaders)

    def _draw_inputs(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """After the first epoch: training need not wait for it."""
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        if self.inputs_are_drawn or not self._is_on(trainer) or not trainer.is_global_zero or not data.image_shape:
            return
        self.inputs_are_drawn = True
        images, targets = data.splits["train"].__getitems__(spread(len(data.splits["train"]), charts.CELLS))
        images = images.to(pl_module.device)
        gpus = [pl_module.device] if pl_module.device.type == "cuda" else []
        state = random_state(gpus)
        with torch.no_grad():
            inputs = data.normalize(data.augment(images)).cpu()
        restore_random_state(state, gpus)  # training draws what it would have drawn
        texts = [charts.shorten(label(data, target), 9) for target in targets]
        grid = charts.image_grid(
            list(inputs), texts, ["black"] * len(texts), "training images as the network gets them"
        )
        writer = trainer.logger.experiment  # type: ignore[union-attr]
        charts.write(writer, "inputs/train", grid, 0)
        if isinstance(pl_module, System):
            write_graph(writer, pl_module.net, inputs[:2])

    def _is_on(self, trainer: Trainer) -> bool:
        data = trainer.datamodule  # type: ignore[attr-defined]
        is_ours = isinstance(data, TensorDataModule) and (data.image_shape is not None or not data.num_classes)
        return self.every_n_epochs > 0 and is_ours and isinstance(trainer.logger, TensorBoardLogger)

    def _collect(self, outputs: Any, batch: Any) -> None:
        if not isinstance(outputs, Tensor) or not isinstance(batch, tuple | list) or not isinstance(batch[1], Tensor):
            return
        outputs, targets = outputs.detach().float(), batch[1]
        if outputs.shape == targets.shape and targets.is_floating_point():
            self.batches.append((targets, outputs))
        elif outputs.dim() == 2 and targets.shape == outputs.shape[:1] and not targets.is_floating_point():
            log_probabilities = outputs.log_softmax(1)
            best, predicted = log_probabilities.max(1)
            self.batches.append((targets, predicted, best, log_probabilities.gather(1, targets[:, None])[:, 0]))

    def _draw(self, trainer: Trainer, name: str, loader: Any) -> None:
        if self.is_drawn:
            return
        self.is_drawn = True
        index, true, predicted, *rest = self._gather(loader)
        if not len(index) or not trainer.is_global_zero:
            return
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        writer = trainer.logger.experiment  # type: ignore[union-attr]
        step = max(0, trainer.global_step - 1)  # as Lightning's own curves; the next step is dropped at a resume
        if not rest:
            charts.write(writer, f"predictions/{name}", charts.true_against_predicted(true, predicted, name), step)
            return
        if not data.image_shape:
            return
        best, own = rest
        num_classes = max(len(data.classes), int(predicted.max()) + 1)
        classes = [*data.classes, *map(str, range(len(data.classes), num_classes))]

        counts = multiclass_confusion_matrix(predicted, true, num_classes)
        num_right = int((predicted == true).sum())
        title = f"{name}: {num_right:,} of {len(true):,} right ({num_right / len(true):.2%})"
        charts.write(writer, f"confusion_matrix/{name}", charts.confusion_matrix(counts, classes, title), step)

        def grid(chosen: Tensor, title: str) -> Any:
            texts, colours = [], []
            for i in chosen.tolist():
                is_right = predicted[i] == true[i]
                guess = f"{charts.shorten(classes[predicted[i]], 9)} {best[i].exp():.0%}"
                texts.append(guess if is_right else f"{guess}\nis {charts.shorten(classes[true[i]], 9)}")
                colours.append(RIGHT if is_right else WRONG)
            images = loader.dataset.__getitems__(index[chosen].tolist())[0] if len(chosen) else []
            return charts.image_grid(list(images), texts, colours, title)

        some = torch.tensor(spread(len(index), charts.CELLS))
        charts.write(writer, f"predictions/{name}", grid(some, f"{name}: predicted class, its probability"), step)
        wrong = (predicted != true).nonzero()[:, 0]
        worst = wrong[own[wrong].argsort()][: charts.CELLS]
        title = f"{name}: the worst of {len(wrong):,} mistakes" if len(wrong) else f"{name}: no mistakes"
        charts.write(writer, f"mistakes/{name}", grid(worst, title), step)

    def _gather(self, loader: Any) -> list[Tensor]:
        """Index in the data set, and what has been collected, of the samples of all processes, in the set's order."""
        own = [torch.cat(column).cpu() for column in zip(*self.batches, strict=True)]
        own = own or [torch.zeros(0, dtype=torch.long) for _ in range(2)]
        self.batches = []
        order = [i for batch in loader.batch_sampler for i in batch] if isinstance(loader, ResumableLoader) else []
        parts: list[Any] = [torch.tensor(order[: len(own[0])], dtype=torch.long), *own]
        if dist.is_initialized():
            of_all: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(of_all, parts)
            parts = [torch.cat(column) for column in zip(*of_all, strict=True)]
        by_index = parts[0].argsort()
        return [part[by_index] for part in parts]


def label(data: TensorDataModule, target: Tensor) -> str:
    """The class's name, or the number."""
    if data.num_classes and target.dim() == 0 and not target.is_floating_point():
        return data.classes[int(target)]
    return f"{target.item():.3g}" if target.numel() == 1 else ""


def spread(num: int, count: int) -> list[int]:
    """Up to `count` of the indices of `num` samples, evenly spread: a data set may be sorted by class."""
    count = min(num, count)
    return [i * num // count for i in range(count)]


def write_graph(writer: Any, net: nn.Module, inputs: Tensor) -> None:
    """A graph by tracing a copy of the network on the CPU: one that is not compiled and keeps its state."""
    # it prints an error before it raises it
    silence = contextlib.redirect_stdout(io.StringIO())
    try:
        with torch.random.fork_rng([]), warnings.catch_warnings(), silence:
            # an `if` on a tensor's value: the trace is drawn, not run
            warnings.simplefilter("ignore", torch.jit.TracerWarning)
            # torch's own add_graph still traces; there is no other way to the GRAPHS tab (pytorch issue 49823)
            warnings.filterwarnings("ignore", "`torch.jit.trace(_method)?` is (deprecated|not supported)")
            writer.add_graph(copy.deepcopy(net).cpu().float().eval(), inputs.float())
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        say(f"No graph of {type(net).__name__} in TensorBoard: {str(error).strip().splitlines()[0]}")
