"""By which metric epochs are compared: for best.ckpt and early stopping."""

from typing import Any, NamedTuple

from lightning import LightningDataModule, LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightbase.data.module import BaseDataModule
from lightbase.errors import UserError
from lightbase.folder import better_by_name
from lightbase.metrics import collection
from lightbase.module import BaseModule
from lightbase.ranks import say
from lightbase.resume.state import has_named_optimizer


class Selection(NamedTuple):
    monitor: str
    mode: str  # min or max
    or_last: bool = (
        False  # take the last epoch if validation turns out not to log it: nobody asked for it
    )


def choose_selection(
    config: Any, model: LightningModule, data: LightningDataModule
) -> Selection | None:
    """The metric of the flags, or the model's first; None for the last epoch, where epochs cannot
    be compared or are not to be. Nothing is ever selected on test data."""
    has_part = (
        not isinstance(data, BaseDataModule) or data.val_fraction > 0 or "val" in data.own_splits
    )
    missing = {
        "data.val_fraction 0": not has_part,
        "trainer.limit_val_batches 0": config.trainer.limit_val_batches == 0,
        f"{type(model).__name__} has no validation_step": not is_overridden(
            "validation_step", model
        ),
        f"{type(data).__name__} has no val_dataloader": not is_overridden("val_dataloader", data),
    }
    reason = next((reason for reason, applies in missing.items() if applies), None)
    by_plateau = reason and has_named_optimizer(model) and model.scheduler == "ReduceLROnPlateau"
    if by_plateau or (config.patience is not None and (reason or config.monitor is None)):
        flag = "model.scheduler ReduceLROnPlateau" if by_plateau else f"patience {config.patience}"
        raise UserError(f"--{flag} needs a validation to go by: {reason or '--monitor null'}", 2)
    if reason:
        tested = (
            "fold that is tested" if isinstance(data, BaseDataModule) and data.fold else "test set"
        )
        measured = (
            f"; val/ is measured on the {tested}" if reason.startswith("data.val_fraction") else ""
        )
        say(f"Validation: none ({reason}){measured}; best.ckpt is the last epoch")
    elif config.monitor is None:
        say("Best epoch: the last one (monitor null)")
    if reason or config.monitor is None:
        return None
    if is_auto := config.monitor == "auto":
        first = (
            next(iter(collection(model.metrics)), "loss")
            if isinstance(model, BaseModule)
            else "acc"
        )
    monitor = f"val/{first}" if is_auto else config.monitor
    mode = config.monitor_mode or better(monitor, model)
    say(f"Best epoch: the one with the {'lowest' if mode == 'min' else 'highest'} {monitor}")
    return Selection(monitor, mode, or_last=is_auto and config.patience is None)


def better(monitor: str, model: LightningModule) -> str:
    """min or max: of the model's metrics torchmetrics knows it; otherwise by the name."""
    name = monitor.removeprefix("val/")  # a metric's name may have "/" too
    metrics = collection(model.metrics if isinstance(model, BaseModule) else None)
    higher = {key: metric.higher_is_better for key, metric in metrics.items()}.get(name)
    if higher is not None:
        return "max" if higher else "min"
    if (mode := better_by_name(name)) is not None:
        return mode
    question = f"--monitor {monitor}: is a higher or a lower value better?"
    raise UserError(f"{question} give --monitor_mode max or min, or --monitor val/loss", 2)
