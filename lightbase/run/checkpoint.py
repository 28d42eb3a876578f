"""The checkpoint files of a run: when they are written, and how.

A file is complete or not there at all: it is written under another name, and then
renamed. Reading a file runs no code of the file: the result holds tensors and plain
values only, and the checksum of each record must be right.

`RunCheckpoint` decides when a file is written, `AtomicCheckpointIO` writes it, and
`load_checked` in model/transfer.py reads it. `AverageFollows` and `ValidatedWeights`
are about the weights of best.ckpt: a validation has measured them.
"""

import copy
import io
import math
import time
from pathlib import Path
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint, WeightAveraging
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor
from torch.nn.parameter import is_lazy

from lightbase.compat import follow_until_averaged
from lightbase.config.errors import UserError, first_line, say
from lightbase.config.files import as_text, write_whole
from lightbase.config.spec import as_plain
from lightbase.data.tensors import tensors_in, to_host
from lightbase.model.shards import MAKE_ROOM, byte_sums, load_shards, remove_shards
from lightbase.model.transfer import load_checked

MAX_PINNED = 2**28
"""Bytes of a checkpoint that take page-locked memory, which torch keeps. With more,
copying takes longer than waiting."""


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint to a temporary file in the same folder and renames it.
    Lightning's class may copy the file; a crash would leave an incomplete one.

    validated: Checks the weights of best.ckpt before it is written, unless None.
    """

    validated: "ValidatedWeights | None" = None

    def save_checkpoint(
        self, checkpoint: Any, path: Any, storage_options: Any = None
    ) -> None:
        """Write a checkpoint to `path`.

        Raise UserError if the disk is full, or if best.ckpt would hold weights that no
        validation has measured. An earlier file of this name is unchanged then.
        """
        for key in ("hyper_parameters", "datamodule_hyper_parameters"):
            if key in checkpoint:
                # for a person who reads the file: runs are rebuilt from their config
                checkpoint[key] = as_plain(checkpoint[key])
        path = Path(path)
        if self.validated and path.name == "best.ckpt":
            self.validated.check(checkpoint)
        buffer = io.BytesIO()
        torch.save(from_gpu(checkpoint), buffer)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, buffer.getbuffer(), MAKE_ROOM)
        remove_shards(path, keep=checkpoint.get("shards"))

    def remove_checkpoint(self, path: Any) -> None:
        super().remove_checkpoint(path)
        remove_shards(Path(path))

    def load_checkpoint(self, path: Any, *_: Any, **__: Any) -> Any:
        return load_shards(load_checked(Path(path)), Path(path))


def from_gpu(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return the checkpoint with the weights and the states of the optimizers on the
    CPU. The host waits once; torch.save would wait for each tensor. The checkpoint is
    unchanged if it is large (see MAX_PINNED), or if tensors share memory."""
    keys = checkpoint.keys() & {"state_dict", "optimizer_states"}
    parts = {key: checkpoint[key] for key in keys}
    tensors = {}
    for tensor in tensors_in(parts):
        if tensor.is_cuda and tensor.layout is torch.strided:
            tensors[id(tensor)] = tensor
    pointers = {tensor.data_ptr() for tensor in tensors.values()}
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    shares_memory = len(pointers) < len(tensors)
    if num_bytes == 0 or num_bytes > MAX_PINNED or shares_memory:
        return checkpoint
    # The second argument of deepcopy is {id of an object: its copy}.
    return checkpoint | copy.deepcopy(parts, to_host(tensors))


class RunCheckpoint(ModelCheckpoint):
    """Writes FILENAME.ckpt at the end of an epoch: of the best one by `monitor`, or of
    the newest one without a monitor. best.ckpt may also be written after a validation,
    last.ckpt between two steps and after a signal. Files of earlier epochs with other
    names stay.

    folder: The folder of the checkpoints, ROOT/NAME/version_N/checkpoints.
    filename: The name without .ckpt. It may have a field such as {epoch:03d}.
    monitor: The name of a logged metric, such as "val/acc". Of two epochs with equal
        values, the one with the lower val/loss is the best.
    mode: "min" if lower values of the metric are better, otherwise "max".
    every_n_epochs: None writes after every validation.
    minutes: How long after the newest checkpoint `is_due` becomes true; 0: never.
    best_epoch, best_loss: The number of the best epoch, from 1, and its val/loss.
        They are 0 and infinite before the first one.
    """

    def __init__(
        self,
        folder: Path,
        filename: str,
        monitor: str | None = None,
        mode: str = "min",
        every_n_epochs: int | None = 1,
        minutes: float = 0,
    ) -> None:
        super().__init__(
            dirpath=folder,
            filename=filename,
            monitor=monitor,
            mode=mode,
            # -1 keeps every file; with a monitor it would save every epoch
            save_top_k=1 if monitor else -1,
            every_n_epochs=every_n_epochs,
            # at the very end, so that a resumed run starts with the next epoch
            save_on_train_epoch_end=every_n_epochs is not None,
            auto_insert_metric_name=False,
            enable_version_counter=False,  # the file is replaced, not numbered
        )
        self.minutes = minutes
        self.tried_at = math.inf  # the time of the newest checkpoint, or of a try
        self.saved_step = 0  # global_step of the newest checkpoint
        self.best_epoch = 0
        self.best_loss = math.inf

    @property
    def state_key(self) -> str:
        """The key of this callback's state, of which a run has several."""
        return f"{type(self).__qualname__}/{self.filename}"

    def on_sanity_check_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Raise UserError if the sanity check has not logged the metric of --monitor.
        Lightning alone would find it only at the end of the first epoch."""
        names = trainer.callback_metrics
        # Lightning keeps no values of several loaders here
        has_one_loader = len(trainer.num_sanity_val_batches) == 1
        if self.monitor and has_one_loader and self.monitor not in names:
            raise UserError(
                f"--monitor {self.monitor!r} is not among the metrics of a validation: "
                f"{', '.join(names)}",
                status=2,
            )

    on_train_batch_end = None  # type: ignore[assignment]  # it writes after no batch

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        if not trainer.fast_dev_run:  # type: ignore[attr-defined]
            self.note_saved(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the checkpoint, unless the metric is not measured yet, as with
        max_steps in the first epoch."""
        if self.monitor is None or self.monitor in trainer.callback_metrics:
            super().on_train_epoch_end(trainer, pl_module)
            self.note_saved(trainer)

    def note_saved(self, trainer: Trainer) -> None:
        self.saved_step = trainer.global_step
        self.tried_at = time.monotonic()

    def is_due(self) -> bool:
        """Return whether `minutes` have passed since the newest checkpoint or try."""
        return 0 < self.minutes * 60 <= time.monotonic() - self.tried_at

    def save(self, trainer: Trainer) -> None:
        """Write last.ckpt between two optimizer steps. All processes call this."""
        trainer.save_checkpoint(self.in_folder("last.ckpt"), weights_only=False)
        self.note_saved(trainer)

    def save_if_possible(self, trainer: Trainer) -> bool:
        """Write last.ckpt as `save` does, and return True. If the file cannot be
        written, print a line and try again after `minutes`: the earlier file is whole.
        """
        try:
            self.save(trainer)
            return True
        except UserError as error:
            if not isinstance(error.__cause__, OSError):
                raise
            self.tried_at = time.monotonic()
            say(f"{first_line(error)}; the training goes on")
            # the others wait there for the process that writes
            trainer.strategy.barrier("Trainer.save_checkpoint")
            return False

    def is_better(self, trainer: Trainer) -> bool:
        """Return whether this epoch is better than the best one before it: the same in
        all processes, which all call this."""
        current = trainer.callback_metrics.get(str(self.monitor))
        is_best = bool(super().check_monitor_top_k(trainer, current))
        if current is not None and current == self.best_model_score:
            loss = float(trainer.callback_metrics.get("val/loss", math.inf))
            is_best = is_best or loss < self.best_loss
        # a module of the user's may log other values on each rank
        return trainer.strategy.reduce_boolean_decision(is_best, all=False)

    def check_monitor_top_k(
        self, trainer: Trainer, current: Tensor | None = None
    ) -> bool:
        """Return whether this epoch is the best so far, and note its number and its
        loss. Lightning calls this before it writes best.ckpt."""
        is_best = self.is_better(trainer)
        if is_best:
            self.best_epoch = trainer.current_epoch + 1
            self.best_loss = float(trainer.callback_metrics.get("val/loss", math.inf))
        return is_best

    def state_dict(self) -> dict[str, Any]:
        best = {"best_epoch": self.best_epoch, "best_loss": self.best_loss}
        return super().state_dict() | best

    def on_exception(self, trainer: Trainer, _: Any, exception: BaseException) -> None:
        """Write last.ckpt if a signal has stopped the training between two batches.
        Lightning cannot continue from the middle of a validation."""
        if self.filename != "last" or not isinstance(exception, SIGTERMException):
            return
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        # `training` is false in a validation
        is_new = trainer.training and self.saved_step != trainer.global_step
        # after a failed write, only the process that writes knows that it is missing
        if trainer.strategy.reduce_boolean_decision(is_new, all=False):
            self.save(trainer)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the best score so far if the run continues in its folder, which may
        have been moved."""
        if not any(Path(str(self.dirpath)).glob("*.ckpt")):
            return  # a new run that starts from another one's checkpoint
        state = state_dict | {"dirpath": str(self.dirpath)}
        for key in ("best_model_path", "last_model_path", "kth_best_model_path"):
            state[key] = self.in_folder(state[key])
        scores = state["best_k_models"].items()
        state["best_k_models"] = {self.in_folder(path): score for path, score in scores}
        self.best_epoch = state.get("best_epoch", 0)  # version 0.3 has none
        self.best_loss = state.get("best_loss", math.inf)
        super().load_state_dict(state)

    def say_best(self, num_epochs: int) -> None:
        """Print the best epoch, such as "Best epoch: 2 of 5, val/acc 0.96", if a metric
        compares epochs."""
        if not self.best_epoch or self.best_model_score is None:
            return
        score = as_text(float(self.best_model_score))
        say(f"Best epoch: {self.best_epoch} of {num_epochs}, {self.monitor} {score}")

    def in_folder(self, path: str) -> str:
        """Return `path`, if it is not empty, in the folder of this run. Lightning
        deletes the checkpoints that it replaces, so a state must not name others."""
        if not path:
            return ""
        return str(Path(str(self.dirpath), Path(path).name))


class AverageFollows(Callback):
    """Before the first update of a WeightAveraging, lets validations, checkpoints and
    the end of the training take the weights that train. Lightning must call it before
    the WeightAveraging."""

    def follow(self, trainer: Any, pl_module: LightningModule, *_: Any) -> None:
        """Copy the weights, unless the first update comes at the end of this epoch:
        after the validation, which would measure other weights."""
        for callback in trainer.callbacks:
            is_average = isinstance(callback, WeightAveraging)
            if is_average and not callback.should_update(
                epoch_idx=trainer.current_epoch
            ):
                follow_until_averaged(callback, pl_module)

    on_validation_epoch_start = on_train_end = follow
    on_save_checkpoint = follow  # type: ignore[assignment]


class ValidatedWeights(Callback):
    """Compares the weights in best.ckpt with the weights that the validation has
    measured. They differ if a callback such as ModelPruning changes them in between.

    Lightning must call it before other callbacks. WeightAveraging validates averaged
    weights and puts the others back when the validation ends.

    step: The number of optimizer steps at the newest validation, -1 before it.
    measured: The `fingerprints` of the weights in this validation.
    """

    step = -1
    measured: dict[str, Tensor] = {}

    def on_validation_epoch_end(
        self, trainer: Trainer, pl_module: LightningModule
    ) -> None:
        self.step = trainer.global_step
        self.measured = fingerprints(pl_module.state_dict())

    def check(self, checkpoint: dict[str, Any]) -> None:
        """Raise UserError if the weights of a checkpoint differ from the weights that
        were validated after the same step."""
        if self.step != checkpoint["global_step"]:
            return
        saved = fingerprints(checkpoint["state_dict"])
        for name, value in checkpoint.get("shard_sums", {}).items():
            saved[name.removeprefix("state_dict.")] = value
        saved, measured = to_host((saved, self.measured))
        if any(saved[name] != measured[name] for name in saved.keys() & measured):
            raise UserError(
                "a callback or the model changes the weights between a validation and "
                "best.ckpt, which would hold others than were measured",
                "change them after optimizer steps, in on_train_batch_end, or use "
                "--monitor null",
            )


def fingerprints(state: dict[str, Any]) -> dict[str, Tensor]:
    """Return the `byte_sums` of the tensors of floating-point numbers in a state_dict.

    state: Parameters of lazy modules have no values before the first batch, and are
        left out.
    """
    return byte_sums(
        {
            name: value
            for name, value in state.items()
            if isinstance(value, Tensor)
            and not is_lazy(value)
            and value.is_floating_point()
        }
    )
