"""Checkpoints: written whole or not at all, checked when they are read, kept by the run's rules."""

import io
import json
from pathlib import Path
from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightbase.cli.old_names import renamed, with_todays_package
from lightbase.errors import UserError
from lightbase.folder import write_whole
from lightbase.ranks import say
from lightbase.transfer import load_checked


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint beside its target and moves it there, so that a file with that name is
    always whole.

    Lightning stages it in the temporary folder: across file systems its move is a copy, which a
    crash cuts short.

    path, checkpoint: A checkpoint that has been read. It is handed out once, instead of a second
    read, and dropped.
    """

    path: Path | None = None
    checkpoint: dict[str, Any] | None = None

    def __init__(self, path: Path | None = None, checkpoint: dict[str, Any] | None = None) -> None:
        self.path, self.checkpoint = path, checkpoint

    def __getstate__(self) -> dict[str, Any]:
        return {}  # a process that ddp_spawn starts reads the file itself

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        for key in {"hyper_parameters", "datamodule_hyper_parameters"} & checkpoint.keys():
            # for a person who reads the file: runs are rebuilt from their config
            checkpoint[key] = plain(checkpoint[key])
        buffer = io.BytesIO()
        torch.save(checkpoint, buffer)
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        is_there = path.with_name("last.ckpt").exists()
        next_start = "go on with --ckpt_path last" if is_there else "start again"
        write_whole(path, buffer.getbuffer(), f"make room, then {next_start}")

    def load_checkpoint(self, path: Any, *_: Any, **__: Any) -> dict[str, Any]:
        checkpoint, self.checkpoint = self.checkpoint, None
        if checkpoint is not None and Path(path) == self.path:
            return checkpoint
        return load_checked(Path(path))  # type: ignore[no-any-return]


def plain(value: Any) -> Any:
    """The value with everything in it that safe loading refuses, such as paths, turned into
    text."""
    if isinstance(value, dict):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    kind = next((kind for kind in (bool, int, float) if isinstance(value, kind)), str)
    return value if value is None or type(value) is torch.Tensor else kind(value)


def read_checkpoint(path: Path) -> dict[str, Any]:
    """A run's checkpoint, with today's names of classes. Raises UserError for a file that is
    missing, damaged, unsafe or not of a run."""
    try:
        is_file = path.is_file()
    except OSError as error:
        raise UserError(f"checkpoint {path} cannot be read: {error.strerror}") from error
    if not is_file:
        folder, what = (path, "is a folder") if path.is_dir() else (path.parent, "does not exist")
        near = sorted([*folder.glob("*.ckpt"), *folder.glob("checkpoints/*.ckpt")])[-3:]
        paths = ", ".join(map(str, near))
        hint = f"there is {paths}" if near else "see logs/NAME/version_N/checkpoints"
        raise UserError(f"checkpoint {path} {what}: {hint}")
    checkpoint = load_checked(path)
    has_weights = isinstance(checkpoint, dict) and "state_dict" in checkpoint
    config = checkpoint.get("config") if has_weights else None
    if not isinstance(config, dict) or not has_shape_of_config(config):
        what = "it lacks the weights or the config that train.py saves"
        raise UserError(f"{path} is no checkpoint of a run: {what}")
    if "package" not in checkpoint:
        what = "was written before version 0.1, and only such a version can read it"
        raise UserError(f"checkpoint {path} {what}")
    config.pop("config", None)  # a flag, which would read a file
    for key in {"config", "schedule"} & checkpoint.keys():  # a schedule may name a class
        checkpoint[key] = with_todays_package(checkpoint[key], str(checkpoint["package"]))
        checkpoint[key] = renamed(checkpoint[key])
    return checkpoint


def has_shape_of_config(config: dict[str, Any]) -> bool:
    try:
        json.dumps(config, default=str, skipkeys=True)
    except (ValueError, RecursionError):  # it holds itself
        return False
    if any("." in str(key) for key in config):  # jsonargparse would take it for a part of another
        return False
    parts = [config.get(name) for name in ("model", "data", "trainer")]
    classes = [part for part in parts[:2] if isinstance(part, dict)]
    are_classes = all(isinstance(part.get("class_path"), str) for part in classes)
    have_arguments = all(isinstance(part.get("init_args", {}), dict) for part in classes)
    return all(isinstance(part, dict) for part in parts) and are_classes and have_arguments


class RunCheckpoint(ModelCheckpoint):
    """Writes FILENAME.ckpt when an epoch ends: of the best epoch by `monitor`, or of the newest
    without a monitor.

    every_n_epochs: None writes after every validation.
    """

    def __init__(
        self,
        folder: Path,
        filename: str,
        monitor: str | None = None,
        mode: str = "min",
        keep_all: bool = False,
        every_n_epochs: int | None = 1,
    ) -> None:
        super().__init__(
            dirpath=folder,
            filename=filename,
            monitor=monitor,
            mode=mode,
            save_top_k=-1 if keep_all else 1,
            every_n_epochs=every_n_epochs,
            # at the very end, so that a resumed run starts with the next epoch
            save_on_train_epoch_end=every_n_epochs is not None,
            auto_insert_metric_name=False,
            enable_version_counter=False,  # the file is replaced, not numbered
        )
        self.step_at_epoch_end = 0

    @property
    def state_key(self) -> str:
        return f"{type(self).__qualname__}/{self.filename}"

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            is_late = isinstance(callback, WeightAveraging) and callback.should_update(
                epoch_idx=10**9
            )
            if is_late or isinstance(callback, StochasticWeightAveraging):
                what = (
                    "averages weights after the validation of an epoch: nothing would compare them"
                )
                way_out = "use WeightAveraging or EMAWeightAveraging of Lightning, by steps"
                raise UserError(f"{type(callback).__name__} {what}\n{way_out}", 2)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        score = trainer.callback_metrics.get(self.monitor or "")
        if score is not None and score.isnan() and not trainer.sanity_checking:
            say(f"Validation: {self.monitor} is NaN; this epoch counts as the worst")
        super().on_validation_end(trainer, pl_module)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # without a validation yet, as with max_steps in the first epoch, there is nothing to
        # compare
        if self.monitor is None or self.monitor in trainer.callback_metrics:
            super().on_train_epoch_end(trainer, pl_module)
            self.step_at_epoch_end = trainer.global_step

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        # SIGTERM, as from a cluster that wants the machine back, stops between two batches.
        # Lightning cannot go on from the middle of a validation; and when an epoch has ended, the
        # checkpoint is there already.
        between_batches = trainer.training and self.step_at_epoch_end != trainer.global_step
        if isinstance(exception, SIGTERMException) and self.filename == "last" and between_batches:
            trainer.save_checkpoint(Path(str(self.dirpath), "last.ckpt"), weights_only=False)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the best score so far where the run goes on in its folder, also if that has
        been moved."""
        if not Path(str(self.dirpath), "last.ckpt").exists():
            return  # a new run that starts from another one's checkpoint
        old, new = state_dict["dirpath"], str(self.dirpath)
        state = {
            key: value.replace(old, new) if isinstance(value, str) else value
            for key, value in state_dict.items()
        }
        best = {
            path.replace(old, new): score for path, score in state_dict["best_k_models"].items()
        }
        super().load_state_dict(state | {"best_k_models": best})
