"""What a callback can say about itself, and ask about its run."""

import re
import tempfile
import warnings
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist
from lightning import Callback, LightningModule, Trainer
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torchmetrics import MetricCollection

from lightbase.compat import logged_step
from lightbase.data.module import BaseDataModule
from lightbase.metrics import Accumulator, collection
from lightbase.ranks import say


class MayMissSteps(Callback):
    """A callback whose batch hooks need not see each step.

    With `--steps_per_execution 20` its `on_train_batch_start` and `on_train_batch_end` are called
    once for 20 steps, with the first batch of them and the outputs of the last. Any other callback
    with such a hook gets single steps.
    """


class MaySampleSteps(MayMissSteps):
    """One whose `on_before_optimizer_step`, too, need not see each step: with
    `--steps_per_execution 20` one of 20."""


class RunFolder(Callback):
    """Tells all processes the folder of the run, which the first one has made; a temporary one in a
    fast_dev_run."""

    temporary: tempfile.TemporaryDirectory | None = None

    def __init__(self, path: Path | None) -> None:
        self.path = path

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self.path is None and trainer.is_global_zero:
            self.temporary = tempfile.TemporaryDirectory(prefix="fast_dev_run_")
            self.path = Path(self.temporary.name)
        self.path = trainer.strategy.broadcast(self.path)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self.temporary:
            self.temporary.cleanup()
            self.temporary = self.path = None


def run_folder(trainer: Trainer) -> Path:
    """Where a callback may write: the run's folder, on any process, from `on_fit_start` or
    `on_test_start` on.

    Unlike `trainer.log_dir` it may be asked for on one process alone. In evaluate.py it is
    `trainer.default_root_dir`.
    """
    found = [callback.path for callback in trainer.callbacks if isinstance(callback, RunFolder)]  # type: ignore[attr-defined]
    return found[0] if found and found[0] else Path(trainer.default_root_dir)


def gather(own: Any) -> list[Any]:
    """That of each process, by rank; to be called on all of them."""
    found = [own]
    if dist.is_initialized():
        found = [None] * dist.get_world_size()
        dist.all_gather_object(found, own)
    return found


Stage = Literal["train", "val", "test"]
NEVER = (
    2**62
    # epochs until Lightning steps ReduceLROnPlateau: after an epoch's checkpoint, so that a resume
    # misses it
)


class Curves(Callback):
    """Writes train/ and lr on log steps and at the end of each epoch, of the samples since the last
    point; val/ and test/ after each evaluation. What callbacks watch and a terminal shows at the
    end of an epoch is of all its samples.

    It stands first among the callbacks.
    """

    def __init__(self) -> None:
        self.means: dict[Stage, Accumulator] = {}
        self.epoch = Accumulator(MetricCollection({}))
        self.lr: float | Tensor = 0.0  # of the newest step
        self.saw_views = False  # whether test_views had an effect
        self.reported: set[str] = set()  # names of metrics that make no curve
        self.resumed: dict[str, list[dict[str, Any]]] = {}

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        metrics, data = collection(pl_module.metrics), trainer.datamodule  # type: ignore[attr-defined]
        classes = data.classes if isinstance(data, BaseDataModule) else None
        self.epoch = Accumulator(metrics.clone(), None, classes, self.reported)
        self.means = {"train": Accumulator(metrics.clone(), self.epoch, classes, self.reported)}
        self.means |= {
            name: Accumulator(metrics.clone(), None, classes, self.reported)
            for name in ("val", "test")
        }
        pl_module.prepare_net(trains=stage == "fit")
        # such an epoch has its point at its end
        warnings.filterwarnings(
            "ignore", "The number of training batches .* is smaller than the logging interval"
        )

    def result(
        self, trainer: Trainer, stage: Stage, means: Accumulator | None = None, keep: bool = False
    ) -> dict[str, Any]:
        """The means so far, by their curves' names; unless kept they start anew."""
        means = means or self.means[stage]
        found = means.result(lambda sums: trainer.strategy.reduce(sums, reduce_op="sum"))
        if not keep:
            means.reset()
        found = {
            name: value for name, value in found.items() if stage == "test" or name != "num_samples"
        }
        # of each class: a group of their own in TensorBoard, val_class_acc/cat beside val/acc
        own = [name for name in found if name.partition("/")[2] in means.classes]
        return {
            f"{stage}_{name}" if name in own else f"{stage}/{name}": value
            for name, value in found.items()
        }

    def log_train(self, trainer: Any, pl_module: LightningModule) -> None:
        """On a log step. A mean over a few batches would be noise: shortly before the end of an
        epoch the samples stay for the epoch's point, too, and shortly after it they still count for
        the next log step."""
        pl_module.log("lr", self.lr)
        num_left = trainer.num_training_batches - trainer.fit_loop.batch_idx - 1
        keep = 0 < num_left < batches_between_points(trainer) / 2
        point = self.result(trainer, "train", keep=keep)
        # on the CPU: after every batch Lightning reads again what a progress bar shows, and would
        # wait for the GPU
        for name, value in point.items():
            pl_module.log(name, value.cpu(), prog_bar=not is_of_class(name))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for name, means in (("train", self.means["train"]), ("epoch", self.epoch)):
            # it may have been another number of processes
            for state in self.resumed.get(name, [])[trainer.global_rank :: trainer.world_size]:
                means.add_state(state, pl_module.device)
        self.resumed = {}

    def on_train_epoch_end(self, trainer: Any, pl_module: LightningModule) -> None:
        every = batches_between_points(trainer)
        until_next = -trainer.global_step * trainer.accumulate_grad_batches % every if every else 0
        keep = trainer.num_training_batches > every and until_next < every / 2
        if point := self.result(trainer, "train", keep=keep):  # none right after a log step
            values = {name: float(value) for name, value in {"lr": self.lr, **point}.items()}
            for logger in trainer.loggers:
                logger.log_metrics(values, logged_step(trainer) - 1)  # as Lightning counts
        # equal in all processes already, but Lightning warns without sync_dist, here and below
        for name, value in self.result(trainer, "train", self.epoch).items():
            pl_module.log(name, value, prog_bar=not is_of_class(name), logger=False, sync_dist=True)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        found = self.result(trainer, "val")
        for name, value in found.items():
            pl_module.log(
                name, value, prog_bar=name != "val/loss" and not is_of_class(name), sync_dist=True
            )
        if found and trainer.state.fn == "fit" and not trainer.sanity_checking:
            step_plateau(trainer, found)

    def on_test_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        pl_module.log_dict(self.result(trainer, "test"), sync_dist=True)
        if pl_module.test_views is not None and not self.saw_views:
            say(
                f"model.test_views had no effect: test_step of {type(pl_module).__name__} "
                "does not call self(x)"
            )

    def state_dict(self) -> dict[str, Any]:
        states = gather({"train": self.means["train"].state(), "epoch": self.epoch.state()})
        return {name: [state[name] for state in states] for name in ("train", "epoch")} | {
            "lr": float(self.lr)
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.lr = state_dict["lr"]
        self.resumed = {name: state_dict[name] for name in ("train", "epoch")}


def is_of_class(name: str) -> bool:
    """Whether a curve is one class's of a metric: too many for a line in the terminal."""
    return re.match("(train|val|test)_[^/]+/", name) is not None


def batches_between_points(trainer: Trainer) -> int:
    return trainer.log_every_n_steps * trainer.accumulate_grad_batches  # type: ignore[attr-defined]


def is_log_step(module: Any) -> bool:
    """Whether this batch is the last of an optimiser step after which Lightning logs."""
    trainer = module.trainer
    num_done = (
        module.global_step if module.automatic_optimization else trainer.fit_loop.total_batch_idx
    )
    if not trainer.log_every_n_steps or (num_done + 1) % trainer.log_every_n_steps:
        return False
    return (
        trainer.fit_loop.batch_idx + 1
    ) % trainer.accumulate_grad_batches == 0 or trainer.is_last_batch


def step_plateau(trainer: Trainer, found: dict[str, Tensor]) -> None:
    """Step ReduceLROnPlateau after a validation, whose values are `found`."""
    metrics = [name for name in found if name != "val/loss" and not is_of_class(name)]
    for config in trainer.lr_scheduler_configs:
        if config.frequency == NEVER and isinstance(config.scheduler, ReduceLROnPlateau):
            watched = metrics[0] if metrics and config.scheduler.mode == "max" else "val/loss"
            config.scheduler.step(found[watched])
