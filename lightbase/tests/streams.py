"""Streams that tests train on, and a module that writes down what it trains on.

Each sample is its number: with ten inputs, and a class.
"""

import json
import os
import signal
from pathlib import Path
from typing import Any

import torch
from example.classifier import Classifier
from lightning import Callback
from torch.utils.data import IterableDataset, get_worker_info

from lightbase.data.module import BaseDataModule
from lightbase.model.curves import run_folder

SIZES = {"train": 1000, "val": 101, "test": 60}


def sample(number: int) -> tuple[torch.Tensor, int]:
    generator = torch.Generator().manual_seed(number)
    inputs = torch.randn(10, generator=generator) + number % 2
    inputs[0] = number
    return inputs, number % 2


class Plain(IterableDataset[Any]):
    """Divides itself among workers, as the documentation of torch does."""

    def __init__(self, num: int) -> None:
        self.num = num

    def __iter__(self):
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        yield from map(sample, range(first, self.num, step))


class Stateful(IterableDataset[Any]):
    """Continues from its state, and counts the samples that it has made."""

    def __init__(self, num: int) -> None:
        self.num, self.next, self.epoch = num, 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self):
        while self.next < self.num:
            self.next += 1
            yield sample((self.next - 1 + 7 * self.epoch) % self.num)
        self.next = 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


class Sharded(Plain):
    """Gives away its shards, as `datasets` does: here each has 125 samples."""

    def __init__(self, num: int, num_shards: int = 8, first: int = 0) -> None:
        super().__init__(num)
        self.num_shards, self.first = num_shards, first

    def shard(self, num_shards: int, index: int) -> "Sharded":
        size = self.num_shards // num_shards
        return Sharded(self.num, size, self.first + index * size)

    def __iter__(self):
        size = self.num // 8
        numbers = range(self.first * size, (self.first + self.num_shards) * size)
        yield from map(sample, numbers)


KINDS = {"plain": Plain, "stateful": Stateful, "sharded": Sharded}


class Streams(BaseDataModule):
    """Streams of all splits. kind: of the training's, see KINDS."""

    classes = ["even", "odd"]
    own_splits = ("train", "val", "test")
    shuffle_block = 40

    def __init__(self, kind: str = "plain", **options: Any) -> None:
        super().__init__(**options)
        self.kind = kind

    def load(self, split: str) -> Any:
        kind = KINDS[self.kind] if split == "train" else Plain
        return kind(SIZES[split])

    def normalize(self, inputs: torch.Tensor) -> torch.Tensor:
        self.numbers = inputs[:, 0].long().tolist()
        return torch.cat([inputs[:, :1] / 1000, inputs[:, 1:]], 1)


class Noted(Classifier):
    """Writes the numbers of the samples of each step to the file NOTES.STAGE.RANK."""

    def note(self, stage: str, batch_idx: int) -> None:
        if path := os.environ.get("NOTES"):
            line = [self.current_epoch, batch_idx, self.trainer.datamodule.numbers]
            with Path(f"{path}.{stage}.{self.global_rank}").open("a") as file:
                file.write(json.dumps(line) + "\n")

    def training_step(self, batch, batch_idx):
        self.note("train", batch_idx)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        if not self.trainer.sanity_checking:
            self.note("val", batch_idx)
        return super().validation_step(batch, batch_idx)


class SaveAndDie(Callback):
    """Writes last.ckpt after the seventh batch of the second epoch, and kills all
    processes of its group five batches later."""

    has_saved = False

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.current_epoch == 1 and batch_idx == 6:
            trainer.save_checkpoint(run_folder(trainer) / "checkpoints" / "last.ckpt")
            self.has_saved = True
        if self.has_saved and batch_idx == 11:
            os.killpg(0, signal.SIGKILL)
