"""Batches out of tensors in memory, by a DataLoader that can go on in the middle of an epoch."""

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from project.base.errors import UserError
from project.base.sampler import EpochBatchSampler

Batch = tuple[Tensor, Tensor]


class Samples(Dataset[Batch], ABC):
    """Samples with labels int64 (N,), fetched a whole batch at a time."""

    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    @abstractmethod
    def __getitems__(self, indices: list[int]) -> Batch:
        """Inputs (len(indices), ...) and labels."""

    @abstractmethod
    def select(self, index: Tensor) -> "Samples":
        """Those with these indices."""


class TensorBatches(Samples):
    """Inputs (N, ...) and labels (N,) in memory. A DataLoader fetches a whole batch with one indexing call."""

    def __init__(self, inputs: Tensor, labels: Tensor) -> None:
        self.inputs = inputs
        self.labels = labels

    def __getitem__(self, index: int) -> Batch:
        return self.inputs[index], self.labels[index]

    def __getitems__(self, indices: list[int]) -> Batch:
        index = torch.tensor(indices, device=self.labels.device)
        return self.inputs[index], self.labels[index]

    def select(self, index: Tensor) -> "TensorBatches":
        return TensorBatches(self.inputs[index], self.labels[index])

    @property
    def num_bytes(self) -> int:
        return self.inputs.nbytes + self.labels.nbytes

    def to(self, device: torch.device) -> "TensorBatches":
        return TensorBatches(self.inputs.to(device), self.labels.to(device))


class ResumableLoader(DataLoader[Batch]):
    """A DataLoader over an EpochBatchSampler that can go on in the middle of an epoch.

    Lightning keeps `state_dict()` in its checkpoints and hands it to `load_state_dict()` when it resumes.
    """

    batch_sampler: EpochBatchSampler
    num_batches = 0
    """Batches handed out in this pass."""

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]  # torch promises its own iterator class
        self.num_batches = self.batch_sampler.first_batch
        try:
            for batch in super().__iter__():
                self.num_batches += 1
                yield batch
        except UserError as error:  # a worker's has that process's traceback before it
            raise UserError(str(error).rpartition("UserError: ")[2].strip()) from None

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.batch_sampler.epoch, "num_batches": self.num_batches}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if state["epoch"] == self.batch_sampler.epoch:
            self.batch_sampler.first_batch = state["num_batches"]


def as_it_is(batch: Batch) -> Batch:
    return batch
