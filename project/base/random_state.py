"""The state of the random generators, of which a resumed run needs all to draw what it would have
drawn."""

import random
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from lightning import Callback, LightningModule, Trainer

from project.base.callback import gather


@runtime_checkable
class HasDevices(Protocol):  # the strategies dp, whose one process has them all, and ddp
    parallel_devices: list[torch.device]


class RandomState(Callback):
    """Keeps the random generators' states of all processes in checkpoints. Each process draws its
    own numbers: equal ones would be the same dropout on all of them."""

    resumed: list[dict[str, Any]] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        devices = [trainer.strategy.root_device]
        if trainer.world_size == 1 and isinstance(trainer.strategy, HasDevices):
            devices = trainer.strategy.parallel_devices
        self.gpus = [device for device in devices if device.type == "cuda"]

    def state_dict(self) -> dict[str, Any]:
        return {"ranks": gather(random_state(self.gpus))}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.resumed = state_dict["ranks"]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        rank = trainer.global_rank
        if rank < len(self.resumed):
            restore_random_state(self.resumed[rank], self.gpus)
            loop: Any = trainer.fit_loop
            if (
                loop.epoch_progress.current.processed == loop.epoch_progress.current.ready
            ):  # an epoch begins
                iter(
                    loop._data_fetcher
                )  # again: a stock DataLoader draws its order from the generators
        elif rank > 0:
            seed = (torch.initial_seed() + rank) % 2**32
            torch.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed)
        self.resumed = []


def random_state(gpus: list[torch.device]) -> dict[str, Any]:
    name, key, *rest = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "cuda": [torch.cuda.get_rng_state(gpu) for gpu in gpus],
        "python": random.getstate(),
        "numpy": [
            name,
            torch.tensor(np.asarray(key, dtype=np.int64)),
            *rest,
        ],  # safe loading knows tensors, no arrays
    }


def restore_random_state(state: dict[str, Any], gpus: list[torch.device]) -> None:
    torch.set_rng_state(state["torch"])
    for gpu, gpu_state in zip(gpus, state["cuda"], strict=False):  # it may have been another number
        torch.cuda.set_rng_state(gpu_state, gpu)
    random.setstate(state["python"])
    name, key, *rest = state["numpy"]
    np.random.set_state((name, key.numpy().astype(np.uint32), *rest))
