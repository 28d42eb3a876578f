"""Checkpoints: written whole or not at all, checked when they are read, kept by the run's rules."""

import io
from pathlib import Path
from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightbase.cli.command_line import checked, renamed, without_removed
from lightbase.errors import UserError
from lightbase.folder import write_whole
from lightbase.ranks import say
from lightbase.transfer import load_checked


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint beside its target and moves it there, so that a file with that name is
    always whole. Lightning's move may be a copy, which a crash cuts short.

    path, checkpoint: A checkpoint that has been read. It is handed out once, instead of a second
    read, and dropped.
    """

    def __init__(self, path: Path | None = None, checkpoint: dict[str, Any] | None = None) -> None:
        self.path, self.checkpoint = path, checkpoint

    def __getstate__(self) -> dict[str, Any]:
        # a process that ddp_spawn starts reads the file itself
        return {"path": None, "checkpoint": None}

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
        write_whole(
            path, buffer.getbuffer(), "make room, then start again or go on with --ckpt_path last"
        )

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
    checkpoint = load_checked(path)
    config: Any = checkpoint.get("config") if isinstance(checkpoint, dict) else None
    if not is_config(config) or "state_dict" not in checkpoint:
        what = "it lacks the weights or the config that train.py saves"
        raise UserError(f"{path} is no checkpoint of a run: {what}")
    if "package" not in checkpoint:
        what = "was written before version 0.1, and only such a version can read it"
        raise UserError(f"checkpoint {path} {what}")
    config.pop("config", None)  # the flag --config would read a file
    checkpoint["config"] = without_removed(config)
    for key in {"config", "schedule"} & checkpoint.keys():  # a schedule may name a class
        checkpoint[key] = renamed(checkpoint[key], str(checkpoint["package"]))
    return checkpoint


def is_config(config: Any) -> bool:
    """Whether it has the form that train.py saves. jsonargparse would take a key with a dot for a
    part of another one."""
    try:
        checked(config)
    except ValueError:
        return False
    if not isinstance(config, dict) or any("." in str(key) for key in config):
        return False
    for name in ("model", "data"):
        part = config.get(name)
        if not isinstance(part, dict) or not isinstance(part.get("class_path"), str):
            return False
        if not isinstance(part.get("init_args", {}), dict):
            return False
    return isinstance(config.get("trainer"), dict)


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
            is_late = isinstance(callback, StochasticWeightAveraging) or (
                isinstance(callback, WeightAveraging) and callback.should_update(epoch_idx=10**9)
            )
            if is_late:
                what = f"{type(callback).__name__} averages weights after an epoch's validation"
                way_out = "use WeightAveraging or EMAWeightAveraging of Lightning, by steps"
                raise UserError(f"{what}: nothing would compare them\n{way_out}", 2)

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
        # Lightning cannot go on from the middle of a validation; and when an epoch has ended, the
        # checkpoint is there already
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
        best = state_dict["best_k_models"]
        state["best_k_models"] = {path.replace(old, new): best[path] for path in best}
        super().load_state_dict(state)
