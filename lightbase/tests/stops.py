"""Callbacks that end a training in the middle of an epoch."""

import signal
from typing import Any

from lightning import Callback, LightningModule, Trainer


class InterruptedRunError(Exception):
    """Stands for whatever ends a process in the middle of an epoch."""


class Interrupt(Callback):
    """Raises an error after the eighth batch of an epoch.

    at_epoch: The epoch, from 0; None: no epoch.
    """

    at_epoch: int | None = None

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, *_: Any
    ) -> None:
        if trainer.current_epoch == self.at_epoch and trainer.fit_loop.batch_idx == 7:
            raise InterruptedRunError


class Terminate(Callback):
    """Sends a signal to this process when a batch of the second epoch ends.

    at_batch: The index of the batch; None: no batch.
    """

    at_batch: int | None = None
    number = signal.SIGTERM

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, *_: Any
    ) -> None:
        if trainer.current_epoch == 1 and trainer.fit_loop.batch_idx == self.at_batch:
            signal.raise_signal(self.number)
