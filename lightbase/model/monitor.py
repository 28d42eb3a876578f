"""The metric that compares epochs, for best.ckpt and early stopping."""

from typing import Any, NamedTuple

from lightning import LightningDataModule, LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightbase.config.errors import UserError, say
from lightbase.config.yaml_files import better_by_name
from lightbase.data.module import BaseDataModule
from lightbase.model.metrics import collection
from lightbase.model.module import BaseModule, has_named_optimizer

GIVE_VALIDATION = "leave it out, or validate, such as by --data.val_fraction 0.1"


class Monitor(NamedTuple):
    """The metric that compares epochs.

    name: The name of its curve, such as val/acc.
    mode: "min" if a lower value is better, "max" if a higher one is.
    """

    name: str
    mode: str


def choose_monitor(
    config: Any, model: LightningModule, data: LightningDataModule
) -> Monitor | None:
    """Return the metric for best.ckpt and early stopping, and print it: that of
    --monitor, or the first metric of the model that can be compared, or the loss.
    Return None if best.ckpt is the last epoch. The test set never selects an epoch.

    config: The settings of the run.
    """
    reason = why_unvalidated(config.trainer, model, data)
    if reason and has_named_optimizer(model) and model.scheduler == "ReduceLROnPlateau":
        raise UserError(
            f"--model.scheduler ReduceLROnPlateau needs a validation: {reason}",
            GIVE_VALIDATION,
            2,
        )
    name = config.monitor
    if name == "auto":
        name = None  # the metrics of a plain LightningModule are not known before
        if isinstance(model, BaseModule):
            name = f"val/{first_comparable(model)}"
    if name is None and not reason:
        reason = "no --monitor"
    if reason:
        if config.patience is not None:
            raise UserError(
                f"--patience {config.patience} needs a metric of a validation: "
                f"{reason}",
                GIVE_VALIDATION,
                2,
            )
        say(f"best.ckpt is the last epoch ({reason})")
        return None
    mode = config.monitor_mode or better(name, model)
    order = "lowest" if mode == "min" else "highest"
    say(f"Best epoch: the one with the {order} {name}")
    return Monitor(name, mode)


def first_comparable(model: BaseModule) -> str:
    """Return the name of the first metric that is a number with a known direction, or
    "loss". A matrix, a curve, or a value for each class cannot be compared."""
    for name, metric in collection(model.metrics).items():
        is_of_classes = str(vars(metric).get("average", "")).lower() == "none"
        is_known = metric.higher_is_better is not None or better_by_name(name)
        if is_known and not is_of_classes:
            return name
    return "loss"


def why_unvalidated(
    trainer: Any, model: LightningModule, data: LightningDataModule
) -> str | None:
    """Return why no validation can select an epoch, as text for a message, or None if
    one can. trainer: The Trainer's flags."""
    if trainer.limit_val_batches == 0:
        return "trainer.limit_val_batches 0"
    if isinstance(data, BaseDataModule) and data.validates_on_test:
        return "data.val_fraction 0: each epoch is measured on the test set"
    every, last = trainer.check_val_every_n_epoch, trainer.max_epochs
    if every and last and 0 < last < every:
        return f"trainer.check_val_every_n_epoch {every} is above max_epochs {last}"
    if not is_overridden("validation_step", model):
        return f"{type(model).__name__} has no validation_step"
    if not is_overridden("val_dataloader", data):
        return f"{type(data).__name__} has no val_dataloader"
    return None


def better(monitor: str, model: LightningModule) -> str:
    """Return "min" if a lower value of a metric is better, else "max". The attribute
    `higher_is_better` of a metric of the model decides, and else the name.

    monitor: The name of the curve, such as val/acc.
    """
    # not rpartition: a metric's name may contain "/"
    name = monitor.removeprefix("val/").partition("/dataloader_idx_")[0]
    if isinstance(model, BaseModule):
        metrics = collection(model.metrics)
        if name in metrics and metrics[name].higher_is_better is not None:
            return "max" if metrics[name].higher_is_better else "min"
    mode = better_by_name(name)
    if mode is None:
        raise UserError(
            f"--monitor {monitor}: is a higher or a lower value better?",
            "give --monitor_mode max or min",
            2,
        )
    return mode
