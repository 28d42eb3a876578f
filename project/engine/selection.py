"""By which metric epochs are compared: for best.ckpt and early stopping."""

from typing import Any, NamedTuple

from lightning import LightningDataModule, LightningModule

from project.base.curves import collection
from project.base.datamodule import TensorDataModule
from project.base.errors import UserError
from project.base.rank import say
from project.base.system import System

# last words of metrics' names, for those that cannot be asked
LOWER_IS_BETTER = ("loss", "error", "err", "mae", "mse", "rmse", "nll", "perplexity")
HIGHER_IS_BETTER = ("acc", "accuracy", "f1", "auc", "auroc", "precision", "recall", "iou", "dice", "r2", "map", "psnr")


class Selection(NamedTuple):
    monitor: str
    mode: str  # min or max
    or_last: bool = False  # take the last epoch if validation turns out not to log it


def choose_selection(config: Any, model: LightningModule, data: LightningDataModule) -> Selection | None:
    """The metric of the flags, or the model's first, which is written into `config`; None where epochs cannot be
    compared. Nothing is ever selected on test data."""
    on_test_data = isinstance(data, TensorDataModule) and data.val_fraction == 0
    if on_test_data:
        say("Validation: none (data.val_fraction 0); val/ is measured on the test set, best.ckpt is the last epoch")
    if on_test_data or config.trainer.limit_val_batches == 0:
        by_plateau = isinstance(model, System) and model.scheduler == "ReduceLROnPlateau"
        if by_plateau or config.patience is not None:
            flag = "model.scheduler ReduceLROnPlateau" if by_plateau else f"patience {config.patience}"
            raise UserError(f"--{flag} needs validation data: give --data.val_fraction and limit_val_batches", 2)
        return None
    first: Any = "acc"
    if isinstance(model, System):
        first = next(iter(collection(model.metrics)), "loss")
    elif config.monitor is None and config.patience is None:
        return Selection("val/acc", "max", or_last=True)
    config.monitor = config.monitor or f"val/{first}"
    config.monitor_mode = config.monitor_mode or better(config.monitor, model)
    return Selection(config.monitor, config.monitor_mode)


def better(monitor: str, model: LightningModule) -> str:
    """min or max: of the model's metrics torchmetrics knows it; otherwise by the name."""
    name = monitor.rpartition("/")[2]
    word = name.lower().rpartition("_")[2]
    metrics = collection(model.metrics if isinstance(model, System) else None)
    if name in metrics and metrics[name].higher_is_better is not None:
        return "max" if metrics[name].higher_is_better else "min"
    if word in LOWER_IS_BETTER + HIGHER_IS_BETTER:
        return "min" if word in LOWER_IS_BETTER else "max"
    raise UserError(f"--monitor {monitor}: is a higher or a lower value better? give --monitor_mode max or min", 2)
