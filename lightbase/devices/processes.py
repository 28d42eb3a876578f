"""How several processes of one run, on one machine or many, stop and end together."""

import contextlib
import functools
import multiprocessing
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from lightning import LightningModule, Trainer
from lightning.pytorch.plugins.environments import LightningEnvironment, TorchElasticEnvironment
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.multiprocessing import ProcessRaisedException

from lightbase.cli.script import STARTED_BY
from lightbase.compat import replace_signal_exchange, started_processes, stop_after_batch
from lightbase.curves import MayMissSteps
from lightbase.devices.signals import SIGNALS
from lightbase.errors import UserError
from lightbase.ranks import rank


def end_with_parent() -> None:
    """Let a process that the first one or torchrun has started end with it, even if that is
    killed."""

    def watch() -> None:
        while os.getppid() == STARTED_BY:
            time.sleep(0.5)
        os._exit(1)  # the main thread may be waiting for a process that is no more

    if rank() > 0 or TorchElasticEnvironment.detect():
        threading.Thread(target=watch, daemon=True).start()


class StopOnSignal(MayMissSteps):
    """At Ctrl-C, SIGTERM or SIGHUP, stop between two optimiser steps, where the state can be saved;
    several processes before the same batch, whichever of them got the signal.

    Lightning 2.6 stops between two batches of an accumulation too, and in the middle of a
    validation. With several processes its signal handler itself exchanges the word, whatever they
    are just exchanging then, and they ask for it before every batch, which waits for the GPU.
    """

    every_n_steps = 10
    """How often several processes ask each other."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            SIGNALS.wait(exchanges=trainer.world_size > 1 and trainer.is_global_zero)

    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        SIGNALS.install()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        SIGNALS.install()
        replace_signal_exchange(trainer, functools.partial(self._stop_together, trainer))

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        # not after the last batch of an epoch: Lightning cannot go on from a validation, so it
        # comes first
        is_after_step = num_batches(trainer) % trainer.accumulate_grad_batches == 0
        if (
            SIGNALS.asked
            and trainer.world_size == 1
            and is_after_step
            and not trainer.is_last_batch
        ):
            stop_after_batch(trainer)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stop_if_asked(trainer)
        SIGNALS.waits = False  # there is nothing to save
        SIGNALS.install()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if (
            multiprocessing.parent_process() is not None
        ):  # of ddp_spawn: it ends here, not at the end of the script
            leave(trainer)

    def _stop_together(self, trainer: Trainer) -> None:
        if num_batches(trainer) % (self.every_n_steps * trainer.accumulate_grad_batches) == 0:
            self._stop_if_asked(trainer)

    def _stop_if_asked(self, trainer: Trainer) -> None:
        asked = torch.tensor(SIGNALS.asked, device=trainer.strategy.root_device)
        if dist.is_initialized():
            dist.all_reduce(asked, dist.ReduceOp.MAX)
        SIGNALS.asked = int(asked.item())
        if SIGNALS.asked:
            raise SIGTERMException


def num_batches(trainer: Trainer) -> int:
    """Batches trained in this epoch."""
    return trainer.fit_loop.batch_idx + 1


def is_child(trainer: Trainer) -> bool:
    """Whether Lightning in another process has started this one, not the user, torchrun or
    SLURM."""
    strategy = trainer.strategy
    environment = strategy.cluster_environment if isinstance(strategy, ParallelStrategy) else None
    return isinstance(environment, LightningEnvironment) and trainer.local_rank > 0


@contextlib.contextmanager
def short_process_errors() -> Iterator[None]:
    """Say in short what several processes can run into, above all that gloo or NCCL has lost one of
    them; and that the memory of a device or of its processes was not enough."""
    try:
        yield
    except ProcessRaisedException as error:  # of ddp_spawn, with the whole traceback as its text
        _, is_mistake, text = str(error).rpartition(
            f"{UserError.__module__}.{UserError.__name__}: "
        )
        if not is_mistake:
            raise
        raise UserError(text.strip()) from error
    except RuntimeError as error:
        lines = str(error).strip().splitlines() or [""]
        if isinstance(error, torch.OutOfMemoryError):
            what = ". ".join(
                lines[0].split(". ")[:2]
            )  # how much was wanted; advice on torch's allocator follows
            ways = (
                "a smaller --data.batch_size, --trainer.precision bf16-mixed or "
                "--data.resident false"
            )
            way_out = f"another program may have it (nvidia-smi); else give {ways}"
        elif "DataLoader worker (pid" in str(error) or "unable to allocate shared memory" in str(
            error
        ):
            what = f"a worker process of the data failed: {lines[-1]}"
            way_out = (
                "give more memory, shared memory above all (docker run --shm-size 8g), "
                "or --data.num_workers 0"
            )
        elif "parameters that were not used in producing the loss" in str(error):
            what = (
                "the network has parameters that its loss does not depend on, for which "
                "ddp would wait:"
            )
            way_out = "take them out, or use --trainer.strategy ddp_find_unused_parameters_true"
        elif isinstance(error, dist.DistError) or "gloo/transport" in str(error):
            what = f"the processes of this run have lost each other: {lines[0]}"
            way_out = "if one of them has failed, its message is near; go on with --ckpt_path last"
        else:
            raise
        raise UserError(f"{what}\n{way_out}") from error


def leave(trainer: Trainer) -> None:
    """End the process group; fail if a process that this one has started failed after its last
    exchange with us."""
    if dist.is_initialized():
        with short_process_errors():
            trainer.strategy.barrier()  # the first one holds the store that the others still use
        dist.destroy_process_group()
    for process in started_processes(trainer):  # those of ddp_spawn have ended already
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=30)
        if process.returncode != 0:
            process.kill()
            raise UserError(
                f"process {process.pid} of this run ended with status {process.returncode}"
            )
