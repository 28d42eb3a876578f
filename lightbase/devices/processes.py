"""How several processes of one run, on one machine or many, stop and end together."""

import functools
import multiprocessing
import os
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from lightning import LightningModule, Trainer
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightbase.compat import replace_signal_exchange, started_processes, stop_after_batch
from lightbase.curves import MayMissSteps
from lightbase.devices.signals import SIGNALS
from lightbase.errors import UserError
from lightbase.ranks import STARTED_BY, rank


def end_with_parent() -> None:
    """Let a process that the first one or torchrun has started end with it, even after kill -9."""

    def watch() -> None:
        while os.getppid() == STARTED_BY:
            time.sleep(0.5)
        os._exit(1)  # the main thread may be waiting for the process that has gone

    if rank() > 0 or TorchElasticEnvironment.detect():
        threading.Thread(target=watch, daemon=True).start()


class StopOnSignal(MayMissSteps):
    """Stops at Ctrl-C, SIGTERM or SIGHUP, between two steps, where the state can be saved.

    Several processes stop before the same batch, whichever of them got the signal.

    It takes the place of Lightning 2.6's own handling, which also stops between two batches of an
    accumulation and within a validation. With several processes Lightning communicates in the
    signal handler, even while another exchange is running, and before every batch, which waits for
    the GPU.
    """

    every_n_steps = 10
    """How often several processes exchange whether one got a signal."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            SIGNALS.wait(exchanges=trainer.world_size > 1 and trainer.is_global_zero)

    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        SIGNALS.install()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        SIGNALS.install()
        replace_signal_exchange(trainer, functools.partial(self._stop_together, trainer))

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        # After the last batch of an epoch the validation comes first: Lightning cannot continue
        # with a validation.
        if not SIGNALS.received or trainer.world_size > 1 or trainer.is_last_batch:
            return
        if (trainer.fit_loop.batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            stop_after_batch(trainer)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stop_if_received(trainer)
        SIGNALS.waits = False  # there is nothing to save
        SIGNALS.install()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        # a process of ddp_spawn ends here and not at the end of the script
        if multiprocessing.parent_process() is not None:
            leave(trainer)

    def _stop_together(self, trainer: Trainer) -> None:
        every_n_batches = self.every_n_steps * trainer.accumulate_grad_batches
        if (trainer.fit_loop.batch_idx + 1) % every_n_batches == 0:
            self._stop_if_received(trainer)

    def _stop_if_received(self, trainer: Trainer) -> None:
        number = torch.tensor(SIGNALS.received, device=trainer.strategy.root_device)
        if dist.is_initialized():
            dist.all_reduce(number, dist.ReduceOp.MAX)
        SIGNALS.received = int(number.item())
        if SIGNALS.received:
            raise SIGTERMException


def leave(trainer: Trainer) -> None:
    """End the process group; raise UserError if a process that this one started has failed."""
    if dist.is_initialized():
        trainer.strategy.barrier()  # the first one holds the store that the others still use
        dist.destroy_process_group()
    for process in started_processes(trainer):  # those of ddp_spawn have ended already
        if status := process.wait():
            raise UserError(f"process {process.pid} of this run ended with status {status}")
