"""The curves and pictures of a training.

Read `Curves` first: `BaseModule.track` adds each batch to one of its accumulators, and
it decides when a curve gets a point. The functions above it are for all callbacks: the
folder of the run, the values of all processes, and the number of steps. `log_figure` at
the end gives a picture to the loggers.
"""

import io
import re
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import MLFlowLogger, TensorBoardLogger, WandbLogger
from matplotlib.figure import Figure
from matplotlib.text import Text
from PIL import Image
from torch import Tensor
from torch.optim import Optimizer

from lightbase.compat import batch_index, logged_step, num_batches
from lightbase.config.errors import UserError
from lightbase.data.module import BaseDataModule
from lightbase.data.tensors import to_host
from lightbase.model.metrics import (
    Accumulator,
    as_curve_names,
    collection,
    ignore_targets,
)
from lightbase.model.scores import add_constants, gives_probabilities

Stage = Literal["train", "val", "test"]


class RunFolder(Callback):
    """Gives all processes the folder of the run, which the first process has made. In a
    fast_dev_run it is a temporary folder.

    path: The folder ROOT/NAME/version_N. It is None in a fast_dev_run, and before
        `setup` in all processes but the first.
    """

    temporary: tempfile.TemporaryDirectory | None = None

    def __init__(self, path: Path | None) -> None:
        self.path = path

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Make the temporary folder if it is needed, and send the path to all
        processes."""
        if self.path is None and trainer.is_global_zero:
            self.temporary = tempfile.TemporaryDirectory(prefix="fast_dev_run_")
            self.path = Path(self.temporary.name)
        self.path = trainer.strategy.broadcast(self.path)

    def teardown(
        self, trainer: Trainer, pl_module: LightningModule, stage: str
    ) -> None:
        """Remove the temporary folder if there is one."""
        if self.temporary:
            self.temporary.cleanup()
            self.temporary = None
            self.path = None


def run_folder(trainer: Trainer) -> Path:
    """Return the folder of the run, in which a callback may write files. It is known
    from `on_fit_start` or `on_test_start` on.

    One process may call this without the others. `trainer.log_dir` would wait for the
    others. In evaluate.py the folder is `trainer.default_root_dir`.
    """
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, RunFolder) and callback.path:
            return callback.path
    return Path(trainer.default_root_dir)


def stage_name(trainer: Any, stage: Stage) -> str:
    """Return the name of a stage in curves and files. It is test_each_epoch for "val"
    if the samples for validation are those of the test."""
    data = trainer.datamodule
    if stage == "val" and isinstance(data, BaseDataModule) and data.validates_on_test:
        return "test_each_epoch"
    return stage


def gather(value: Any) -> list[Any]:
    """Return the values of all processes as a list, by rank. All processes must call
    this.

    value: Any object that pickle can copy. Tensors should be on the CPU.
    """
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def num_steps(trainer: Any) -> int:
    """Return the number of steps so far, as the curves count them.

    With manual optimization it is the number of batches, because `global_step` counts
    the steps of each optimizer.
    """
    if trainer.lightning_module.automatic_optimization:
        return trainer.global_step  # type: ignore[no-any-return]
    return num_batches(trainer)


def newest_step(trainer: Any) -> int:
    """Return the index of the newest step, from 0. Lightning's curves have their points
    at the same index."""
    return max(0, num_steps(trainer) - 1)


def log_values(trainer: Any, values: Mapping[str, Any]) -> None:
    """Write a point of each curve to all loggers, at the newest step.

    values: {curve: number}, such as {"train/loss": 0.5}.
    """
    for logger in trainer.loggers:
        logger.log_metrics(values, newest_step(trainer))


class Curves(Callback):
    """Writes the points of all curves.

    train/ and lr get a point on log steps and at the end of each epoch. A point of
    train/ is a mean over the samples since the point before it. val/ and test/ get a
    point after each evaluation. At the end of an epoch, callbacks and the terminal get
    means over the whole epoch.

    Lightning must call this callback before all callbacks that read what it logs.

    means: The accumulators of the samples since the last point, by stage, and of the
        training "epoch". `BaseModule.track` adds to them. The dict is empty until a
        Trainer calls `setup`.
    noted: The learning rates of the newest training step, by the id of the group.
    resumed_rates: Those of the step before a resume, in the order of the groups.
    resumed: Saved states of the accumulators "train" and "epoch", one for each process
        that was there when the checkpoint was written. It is empty unless a run
        resumes.
    ignored_target: The target that no metric counts, or None if there is none.
    """

    is_recordable = True  # in a CUDA graph: the rates stay while it is replayed

    def __init__(self) -> None:
        self.means: dict[str, Accumulator] = {}
        self.noted: dict[int, float | Tensor] = {}
        self.resumed_rates: list[float] = []
        self.ignored_target: int | None = None
        self.resumed: dict[str, list[dict[str, Any]]] = {}

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        """Make the accumulators, with copies of the module's metrics, and prepare the
        network. The classes of a BaseDataModule name the curves of single classes."""
        metrics = collection(pl_module.metrics).clone()
        data = trainer.datamodule  # type: ignore[attr-defined]
        self.ignored_target = pl_module.ignored_target()
        if isinstance(data, BaseDataModule) and data.never_has(self.ignored_target):
            self.ignored_target = None  # to leave targets out would wait for the GPU
        ignore_targets(metrics, self.ignored_target)
        classes = data.classes if isinstance(data, BaseDataModule) else []
        accumulator = partial(
            Accumulator,
            classes=classes,
            are_probabilities=gives_probabilities(pl_module),
        )
        for name in get_args(Stage):
            stage_prefix = f"{stage_name(trainer, name)}/"
            self.means[name] = accumulator(metrics.clone(), stage_prefix)
        self.means["epoch"] = accumulator(metrics.clone(), "train/")
        self.means["train"].epoch = self.means["epoch"]
        if stage == "test" and isinstance(data, BaseDataModule):
            add_constants(self.means["test"].metrics, data.constants)
        pl_module.prepare_net(trains=stage == "fit")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore the accumulators of this process if the run resumes.

        The number of processes can only change between two epochs, where all saved
        states are empty.
        """
        rank = trainer.global_rank
        for name, states in self.resumed.items():
            if rank < len(states):
                self.means[name].load_state(states[rank])
        self.resumed = {}

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        """Note the learning rates of all optimizers: some may take no step in this
        batch."""
        self.noted = {}
        for optimizer in trainer.optimizers:
            self.on_before_optimizer_step(trainer, None, optimizer)

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: Any, optimizer: Optimizer
    ) -> None:
        """Note the learning rates of this step. The schedule changes them before
        `on_train_batch_end` is called."""
        for group in optimizer.param_groups:
            self.noted[id(group)] = group["lr"]

    def rates(self, trainer: Trainer) -> dict[str, float | Tensor]:
        """Return the learning rates of the newest training step, by the names of their
        curves. A callback may have added a parameter group since the step before."""
        groups = parameter_groups(trainer)
        noted = {x: self.noted.get(id(groups[x])) for x in groups}
        if not self.noted:
            noted = dict(zip(groups, self.resumed_rates, strict=False))
        rates = {f"lr/{name}".rstrip("/"): rate for name, rate in noted.items()}
        return {name: rate for name, rate in rates.items() if rate is not None}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        """Log a point of train/ and of lr if this is a log step."""
        if not is_log_step(trainer):
            return
        point = self.result(trainer, "train")
        if not point:  # no process calls `track` in training
            return
        rates = self.rates(trainer)
        rates = {name: torch.as_tensor(rates[name]) for name in rates}
        # Lightning reads these values after every batch, for the progress bar. Each
        # time it would wait for the GPU, so they are copied to the CPU once.
        log_point(pl_module, rates | to_host(point))

    def on_train_epoch_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Write a last point of the epoch, unless its last step was a log step. Log the
        means of the whole epoch for callbacks and the terminal; the loggers do not get
        them."""
        point = self.result(trainer, "train")
        if point:  # the last step of the epoch was no log step
            values = self.rates(trainer) | point
            log_values(trainer, {name: float(values[name]) for name in values})
        means = self.result(trainer, "epoch")
        log_point(pl_module, means, logger=False, sync_dist=True)

    def on_sanity_check_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Let the validation use the metrics of the test, which no batch has reached
        yet; `setup` makes new ones for the test. A reset would not be enough: a
        MinMaxMetric would keep the values of the sanity check."""
        test = self.means["test"]
        prefix = self.means["val"].prefix
        self.means["val"] = Accumulator(
            test.metrics, prefix, test.classes, test.are_probabilities
        )

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Log the means of the validation."""
        log_point(pl_module, self.result(trainer, "val"), sync_dist=True)

    def on_test_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Log the means of the test, and the number of its samples."""
        log_point(pl_module, self.result(trainer, "test"), sync_dist=True)

    def result(self, trainer: Trainer, name: str) -> dict[str, Tensor]:
        """Return {curve: tensor ()} over the samples of all processes, and reset the
        accumulator. All processes must call this. The dict is empty if there are no
        samples.

        name: A key of `means`.

        Raise UserError if two curves have one name, or if only some processes have
        samples.
        """
        means = self.means[name]
        have_samples = gather(means.has_samples())
        if any(have_samples) and not all(have_samples):
            # the processes with samples would wait for the others for ever
            raise UserError(
                f"{sum(have_samples)} of {len(have_samples)} processes called "
                f"track() in {name}",
                "call it in each process, for its share of the batches",
            )
        values = means.result(partial(trainer.strategy.reduce, reduce_op="sum"))
        means.reset()
        if name != "test":
            values.pop(f"{means.prefix}num_samples", None)
        return values

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the two training accumulators in all processes, by rank,
        and the learning rates. All processes must call this."""
        return {
            "train": gather(self.means["train"].state()),
            "epoch": gather(self.means["epoch"].state()),
            "rates": [*map(float, self.noted.values())] or self.resumed_rates,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the saved states. `on_train_start` restores them."""
        rates = state_dict["rates"]
        # a dict until version 0.4
        self.resumed_rates = [*(rates.values() if isinstance(rates, dict) else rates)]
        self.resumed = {name: state_dict[name] for name in ("train", "epoch")}


def log_point(
    module: LightningModule, values: Mapping[str, Tensor], **options: Any
) -> None:
    """Log values for loggers, callbacks and the terminal. The progress bar shows
    neither the loss of a validation, nor learning rates, nor curves of single classes.

    values: {curve: tensor ()}, equal in all processes. At the end of an epoch Lightning
        warns without `sync_dist`, although the values are equal.
    options: Arguments of LightningModule.log.
    """
    # without it Lightning would look for the number of samples in the batch
    options["batch_size"] = 1
    for name, value in values.items():
        is_hidden = name in ("val/loss", "test_each_epoch/loss")
        is_hidden = is_hidden or name.startswith("lr") or is_of_class(name)
        LightningModule.log(module, name, value, prog_bar=not is_hidden, **options)


def is_log_step(trainer: Any) -> bool:
    """Return whether Lightning logs after this batch.

    It does if the batch ends an optimizer step, and the number of steps is then a
    multiple of `log_every_n_steps`. The last batch of an epoch always ends a step.
    """
    every = trainer.log_every_n_steps
    if not every or (logged_step(trainer) + 1) % every:
        return False
    is_step = (batch_index(trainer) + 1) % trainer.accumulate_grad_batches == 0
    return bool(trainer.is_last_batch or is_step)


def parameter_groups(trainer: Trainer) -> dict[str, dict[str, Any]]:
    """Return {name: parameter group} for the groups of all optimizers. The curve of a
    group's learning rate is lr/NAME.

    The name is the group's option `name`. Without this option it is
    optimizer_I_group_J; a part is left out if there is only one optimizer or only one
    group. A single group without the option has the name "".
    """
    names = []
    groups = []
    for i, optimizer in enumerate(trainer.optimizers):
        for j, group in enumerate(optimizer.param_groups):
            parts = []
            if len(trainer.optimizers) > 1:
                parts.append(f"optimizer_{i}")
            if len(optimizer.param_groups) > 1:
                parts.append(f"group_{j}")
            names.append(str(group.get("name", "_".join(parts))))
            groups.append(group)
    return dict(zip(as_curve_names(names), groups, strict=True))


def is_of_class(name: str) -> bool:
    """Return whether a curve is of a single class. The terminal does not show such
    curves, because they are too many.

    name: The name of the curve, such as val_class_acc/cat.
    """
    # Lightning adds dataloader_idx_1 to the values of a second loader
    name = name.removeprefix("test_each_epoch/")
    return re.match("(train|val|test)_[^/]+/(?!dataloader_idx_)", name) is not None


class Picture(Figure):
    """A Figure of matplotlib that a notebook shows, also without pyplot."""

    def _repr_png_(self) -> bytes:
        """Return the content of a PNG file. Jupyter calls this."""
        return as_png(self).getvalue()


def as_png(figure: Figure) -> io.BytesIO:
    """Return a PNG file in memory."""
    image = io.BytesIO()
    figure.savefig(image, format="png")
    return image


def has_pictures(trainer: Any) -> bool:
    """Return whether one of the Trainer's loggers takes pictures. If none does, the
    caller need not draw them."""
    takers = (TensorBoardLogger, WandbLogger, MLFlowLogger)
    return any(isinstance(logger, takers) for logger in trainer.loggers)


def log_figure(trainer: Any, tag: str, figure: Any) -> None:
    """Give a picture to all loggers that take pictures, at the newest step of the
    curves. All texts are drawn as they are: `$` in a class name begins no formula.

    tag: The name of the picture. In MLflow it is the artifact TAG/STEP.png.
    figure: A Figure of matplotlib.
    """
    step = newest_step(trainer)
    if trainer.testing:  # the curves of the test are at this step, too
        step = num_steps(trainer)
    for text in figure.findobj(Text):
        text.set_parse_math(False)
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.experiment.add_figure(tag, figure, step)
        elif isinstance(logger, WandbLogger):
            # W&B takes a Figure, but no subclass of it
            logger.log_image(tag, [Image.open(as_png(figure))], step)
        elif isinstance(logger, MLFlowLogger):
            logger.experiment.log_figure(logger.run_id, figure, f"{tag}/{step}.png")
