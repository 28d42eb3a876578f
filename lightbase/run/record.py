"""What a run records about itself, in its folder.

Read `RunRecorder` first, the callback that writes config.yaml and progress.json.
"""

import math
import time
from pathlib import Path
from typing import Any

from lightning import Callback, LightningModule, Trainer

import lightbase
from lightbase.compat import epochs_done
from lightbase.config.files import Values, json_text
from lightbase.config.paths import PROJECT
from lightbase.model.curves import num_steps
from lightbase.run.checkpoint import RunCheckpoint
from lightbase.run.folder import LockedFolder


class RunRecorder(Callback):
    """Writes config.yaml and progress.json into the run's folder, and the config into
    its checkpoints.

    It also counts the seconds of training. A resumed run adds to the count of its
    checkpoint. Validations count, the test does not.

    config: The config of the run, as plain values.
    text: The config as YAML.
    run: The run's folder, or None in a process that writes nothing.
    has_started: Whether a training has begun, with the state of its checkpoint.
    history: The metrics of each epoch so far, {curve: number}, with the number of the
        epoch, from 1. Epochs before a resume are in the checkpoint.
    """

    validated_epoch = -1
    has_started = has_stepped = False

    def __init__(
        self, config: Values, text: str, run: LockedFolder | None = None
    ) -> None:
        self.config = config
        self.text = text
        self.run = run
        self.history: list[Values] = []
        self.seconds_before = 0.0  # of training, before a resume
        self.start: float | None = None

    @property
    def folder(self) -> Path | None:
        return self.run.folder if self.run else None

    def state_dict(self) -> Values:
        return {"train_seconds": self.train_seconds(), "history": self.history}

    def load_state_dict(self, state_dict: Values) -> None:
        self.seconds_before = state_dict["train_seconds"]
        self.history = state_dict.get("history", [])  # version 0.3 has none

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: Values
    ) -> None:
        """Add everything that rebuilds the run from the checkpoint alone: the config,
        the name of the user's package, and the version of the library."""
        checkpoint["config"] = self.config
        checkpoint["package"] = PROJECT.package
        checkpoint["lightbase"] = lightbase.__version__

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock. Write config.yaml, with the settings of this start."""
        self.has_started = True
        self.start = time.monotonic()
        if self.run and trainer.is_global_zero:
            self.run.write("config.yaml", self.text)
            # metrics.json marks a run that has finished
            (self.run.folder / "metrics.json").unlink(missing_ok=True)

    def on_train_epoch_start(
        self, trainer: Trainer, pl_module: LightningModule
    ) -> None:
        """Write progress.json after the checkpoints of the last epoch are written."""
        self.write_progress(trainer)

    def note_step(self, trainer: Trainer) -> None:
        """Write progress.json after the first step: now the run keeps its folder."""
        if num_steps(trainer):
            self.has_stepped = True
            self.write_progress(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.validated_epoch = trainer.current_epoch

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Add the metrics of this epoch to the history, before its checkpoints are
        written. Learning rates, and values of an earlier validation, are left out."""
        hidden = ["lr"]
        if self.validated_epoch != trainer.current_epoch:
            hidden = ["lr", "val", "test_each_epoch"]
        row: Values = {"epoch": trainer.current_epoch + 1}
        for name, value in trainer.callback_metrics.items():
            if name.split("/")[0] not in hidden:
                row[name] = float(value)
        self.history = [*self.history, row]

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop the clock: the test does not count."""
        self.seconds_before = self.train_seconds()
        self.start = None
        self.write_progress(trainer)

    def train_seconds(self) -> float:
        if self.start is None:
            return self.seconds_before
        return self.seconds_before + time.monotonic() - self.start

    def length(self, trainer: Trainer) -> dict[str, float]:
        return {
            "epochs": epochs_done(trainer),
            "steps": num_steps(trainer),
            "train_seconds": round(self.train_seconds(), 3),
        }

    def write_progress(self, trainer: Trainer, **more: str) -> None:
        """Write progress.json, which runs.py and sweep.py read: the epochs, steps and
        seconds so far, and the name, mode and best value of the monitored metric.

        more: Other entries, such as `failed`, the error that has ended the run.
        """
        if not self.run or not trainer.is_global_zero:
            return
        values: Values = self.length(trainer) | more
        best = best_callback(trainer)
        # a metric may be NaN in each epoch so far
        if best and best.best_model_score is not None:
            score = best.best_model_score.item()
            if math.isfinite(score):
                values |= {"monitor": best.monitor, "mode": best.mode, "best": score}
        self.run.write("progress.json", json_text(values, indent=2) + "\n")


def recorder_of(trainer: Any) -> RunRecorder:
    return next(x for x in trainer.callbacks if isinstance(x, RunRecorder))


def best_callback(trainer: Trainer) -> RunCheckpoint | None:
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, RunCheckpoint) and callback.filename == "best":
            return callback
    return None
