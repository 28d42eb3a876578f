"""What `System.track` is told of each batch, as curves: a callback, so that no hook of a user can
switch it off."""

import re
import warnings
from typing import Any, Literal

from lightning import Callback, LightningModule, Trainer
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torchmetrics import MetricCollection

from project.base.callback import gather
from project.base.datamodule import TensorDataModule
from project.base.means import Means, collection
from project.base.rank import say

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
        self.means: dict[Stage, Means] = {}
        self.epoch = Means(MetricCollection({}))
        self.lr: float | Tensor = 0.0  # of the newest step
        self.saw_views = False  # whether test_views had an effect
        self.reported: set[str] = set()  # names of metrics that make no curve
        self.resumed: dict[str, list[dict[str, Any]]] = {}

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        metrics, data = collection(pl_module.metrics), trainer.datamodule  # type: ignore[attr-defined]
        classes = data.classes if isinstance(data, TensorDataModule) else None
        self.epoch = Means(metrics.clone(), None, classes, self.reported)
        self.means = {"train": Means(metrics.clone(), self.epoch, classes, self.reported)}
        self.means |= {
            name: Means(metrics.clone(), None, classes, self.reported) for name in ("val", "test")
        }
        pl_module.prepare_net(trains=stage == "fit")
        # such an epoch has its point at its end
        warnings.filterwarnings(
            "ignore", "The number of training batches .* is smaller than the logging interval"
        )

    def result(
        self, trainer: Trainer, stage: Stage, means: Means | None = None, keep: bool = False
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
                logger.log_metrics(
                    values, trainer.fit_loop.epoch_loop._batches_that_stepped - 1
                )  # as Lightning counts
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
