"""The metric by which epochs are compared, for best.ckpt and early stopping."""

from typing import Any, NamedTuple

from lightning import LightningDataModule, LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torchmetrics import Metric

from lightbase.data.module import BaseDataModule
from lightbase.errors import UserError
from lightbase.folder import better_by_name
from lightbase.metrics import collection
from lightbase.module import BaseModule, has_named_optimizer
from lightbase.ranks import say


class Selection(NamedTuple):
    """monitor: the metric's name, such as val/acc. mode: min or max.
    or_last: take the last epoch if validation does not log the metric, because no flag named it.
    """

    monitor: str
    mode: str
    or_last: bool = False


def choose_selection(
    config: Any, model: LightningModule, data: LightningDataModule
) -> Selection | None:
    """Return the metric of --monitor, or the model's first metric. Return None if best.ckpt is the
    last epoch: without a validation, or with --monitor null. The test set never selects an epoch.
    """
    reason = why_no_validation(config.trainer, model, data)
    check_that_nothing_watches(config, model, reason)
    if reason:
        is_on_test_set = reason == "data.val_fraction 0"
        measured = "; val/ is measured on the test set" if is_on_test_set else ""
        say(f"Validation: none ({reason}){measured}; best.ckpt is the last epoch")
        return None
    if config.monitor is None:
        say("Best epoch: the last one (monitor null)")
        return None
    if config.monitor != (config.monitor.strip() or None):
        raise UserError(f"--monitor {config.monitor!r} is no metric's name, such as val/loss", 2)
    is_auto = config.monitor == "auto"
    monitor = f"val/{first_metric(model)}" if is_auto else config.monitor
    mode = config.monitor_mode or better(monitor, model)
    say(f"Best epoch: the one with the {'lowest' if mode == 'min' else 'highest'} {monitor}")
    return Selection(monitor, mode, or_last=is_auto and config.patience is None)


def why_no_validation(
    trainer: Any, model: LightningModule, data: LightningDataModule
) -> str | None:
    """Return why there is no validation to select by; None if there is one. trainer: its flags."""
    if isinstance(data, BaseDataModule) and not (data.val_fraction or "val" in data.own_splits):
        return "data.val_fraction 0"
    if trainer.limit_val_batches == 0:
        return "trainer.limit_val_batches 0"
    if not is_overridden("validation_step", model):
        return f"{type(model).__name__} has no validation_step"
    if not is_overridden("val_dataloader", data):
        return f"{type(data).__name__} has no val_dataloader"
    return None


def check_that_nothing_watches(config: Any, model: LightningModule, reason: str | None) -> None:
    """Raise UserError if early stopping or ReduceLROnPlateau would watch a metric that nothing
    logs. reason: why there is no validation, if there is none."""
    what = ""
    if reason and has_named_optimizer(model) and model.scheduler == "ReduceLROnPlateau":
        what = "model.scheduler ReduceLROnPlateau"
    elif config.patience is not None and (reason or config.monitor is None):
        what = f"patience {config.patience}"
    if what:
        raise UserError(f"--{what} needs a validation to go by: {reason or '--monitor null'}", 2)


def metrics_of(model: LightningModule) -> dict[str, Metric] | None:
    """Return a model's metrics by name; None for a plain LightningModule, which names none."""
    return dict(collection(model.metrics).items()) if isinstance(model, BaseModule) else None


def first_metric(model: LightningModule) -> str:
    """Return the name that --monitor auto stands for, without val/."""
    metrics = metrics_of(model)
    if metrics is None:
        return "acc"
    return next(iter(metrics), "loss")


def better(monitor: str, model: LightningModule) -> str:
    """Return min or max. torchmetrics says it of the model's metrics; of others the name may."""
    name = monitor.removeprefix("val/")  # not rpartition: a metric's name may contain "/"
    metric = (metrics_of(model) or {}).get(name)
    if metric is not None and metric.higher_is_better is not None:
        return "max" if metric.higher_is_better else "min"
    mode = better_by_name(name)
    if mode is None:
        question = f"--monitor {monitor}: is a higher or a lower value better?"
        way_out = "give --monitor_mode max or min, or --monitor val/loss"
        raise UserError(f"{question} {way_out}", 2)
    return mode
