"""Samples fetched a batch at a time, and a DataLoader over them that can go on in the middle of an epoch."""

import random
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sized
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset, default_collate

from project.base.errors import UserError
from project.base.random_state import random_state, restore_random_state
from project.base.sampler import EpochBatchSampler, Indices

Batch = tuple[Tensor, Tensor]
Loaded = tuple[Tensor | np.ndarray, Tensor | np.ndarray] | Dataset
MAX_BATCHES_AT_ONCE = 20  # more are hardly faster
MAX_BYTES_AT_ONCE = 8 * 2**20


class Samples(Dataset[Batch], ABC):
    """Inputs with targets, fetched a whole batch at a time."""

    device = torch.device("cpu")
    """Where batches come from."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitems__(self, indices: list[int]) -> Batch:
        """Inputs (len(indices), ...) and targets (len(indices), ...)."""

    @abstractmethod
    def select(self, index: Tensor) -> "Samples":
        """Those with these indices."""

    def batches_at_once(self, batch_size: int) -> int:
        """How many batches are fetched fastest with one call."""
        return 1


class TensorBatches(Samples):
    """Inputs (N, ...) and targets (N, ...) in memory."""

    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        self.inputs = inputs
        self.targets = targets
        self.device = inputs.device

    def __len__(self) -> int:
        return len(self.targets)

    def __getitems__(self, indices: list[int]) -> Batch:
        return self._at(torch.from_numpy(np.array(indices, dtype=np.int64)).to(self.device))

    def select(self, index: Tensor) -> "TensorBatches":
        return TensorBatches(*self._at(index))

    def _at(self, index: Tensor) -> Batch:
        # copies row by row: seven times as fast as inputs[index] for small images
        return self.inputs.index_select(0, index), self.targets.index_select(0, index)

    def batches_at_once(self, batch_size: int) -> int:
        batch_bytes = batch_size * self.inputs.nbytes // len(self)
        return max(1, min(MAX_BATCHES_AT_ONCE, MAX_BYTES_AT_ONCE // max(1, batch_bytes)))

    @property
    def num_bytes(self) -> int:
        return self.inputs.nbytes + self.targets.nbytes

    def to(self, device: torch.device) -> "TensorBatches":
        return TensorBatches(self.inputs.to(device), self.targets.to(device))


class DatasetSamples(Samples):
    """Any map-style Dataset of (input, target), read sample by sample and collated by torch's default_collate.

    What it draws from the global generators of torch, Python and numpy follows from the indices' seed alone, whatever
    the workers and also after a resume, and leaves those generators as they were.
    """

    def __init__(self, dataset: Dataset) -> None:
        self.dataset: Any = dataset  # a Dataset need not say its length

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, indices: list[int]) -> Batch:
        seed = indices.seed if isinstance(indices, Indices) else indices[0]
        state = random_state([])
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed the GPUs too
        random.seed(seed)
        np.random.seed(seed % 2**32)
        try:
            items = [self.dataset[index] for index in indices]
        finally:
            restore_random_state(state, [])
        try:
            inputs, targets = default_collate(items)
        except (TypeError, ValueError, RuntimeError) as error:
            what = f"{type(self.dataset).__name__} must give (input, target), each a tensor of one shape, array or number"
            raise UserError(f"{what}:\n{str(error).splitlines()[0]}") from error
        return to_usual_types(inputs, targets)

    def select(self, index: Tensor) -> "DatasetSamples":
        return DatasetSamples(Subset(self.dataset, index.tolist()))


def to_usual_types(inputs: Any, targets: Any) -> Batch:
    """float64 to float32 as weights are, integer targets to int64 as losses want them."""
    if isinstance(targets, Tensor) and not targets.is_floating_point():
        targets = targets.long()
    return to_float32(inputs), to_float32(targets)


def to_float32(values: Any) -> Any:
    return values.float() if isinstance(values, Tensor) and values.dtype == torch.float64 else values


def as_tensor(values: Tensor | np.ndarray) -> Tensor:
    """The same memory, where torch can have it."""
    return values if isinstance(values, Tensor) else torch.from_numpy(np.require(values, requirements=["C", "W"]))


def as_samples(loaded: Loaded, where: str, classes: list[str], image_shape: tuple[int, int, int] | None) -> Samples:
    """What a data module loads, if it agrees with what the module says; else a UserError that begins with `where`."""
    samples = as_stored(loaded, where)
    if not len(samples):
        raise UserError(f"{where} is empty")
    inputs, targets = samples.__getitems__([0])
    if image_shape and isinstance(inputs, Tensor) and inputs.shape[1:] != tuple(image_shape):
        shapes = f"shape {tuple(inputs.shape[1:])} and image_shape {tuple(image_shape)}"
        raise UserError(f"{where} has samples of {shapes}: make them agree")
    if classes and isinstance(targets, Tensor) and targets.dim() == 1:  # one number a sample
        if targets.is_floating_point():
            raise UserError(f"{where} has {targets.dtype} targets: they must be integers, or `classes` empty")
        if isinstance(samples, TensorBatches):
            first, last = int(samples.targets.min()), int(samples.targets.max())
            if not 0 <= first <= last < len(classes):
                numbers = f"targets {first} to {last} for {len(classes)} classes"
                raise UserError(f"{where} has {numbers}: they must be 0 to {len(classes) - 1}, or `classes` more")
    return samples


def as_stored(loaded: Loaded, where: str) -> Samples:
    if isinstance(loaded, TensorDataset) and len(loaded.tensors) == 2:
        loaded = loaded.tensors[0], loaded.tensors[1]
    if isinstance(loaded, Dataset):
        if isinstance(loaded, IterableDataset) or not isinstance(loaded, Sized):
            raise UserError(
                f"{where} is a {type(loaded).__name__}, whose samples have no numbers:\n"
                "load a map-style Dataset (__len__, __getitem__), or write a LightningDataModule of your own"
            )
        return DatasetSamples(loaded)
    if not isinstance(loaded, tuple | list) or len(loaded) != 2:
        raise UserError(f"{where} is a {type(loaded).__name__}: let load return (inputs, targets) or a Dataset of them")
    inputs, targets = (as_tensor(part) for part in loaded)
    if len(inputs) != len(targets):
        raise UserError(f"{where} has {len(inputs)} inputs and {len(targets)} targets: each input needs one")
    return TensorBatches(*to_usual_types(inputs, targets))


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
            for fetched in super().__iter__():
                for batch in self._batches_in(fetched):
                    self.num_batches += 1
                    yield batch
        except UserError as error:  # a worker's has that process's traceback before it
            raise UserError(str(error).rpartition("UserError: ")[2].strip()) from None

    def _batches_in(self, fetched: Batch) -> Iterable[Batch]:
        if self.batch_sampler.batches_at_once == 1:
            return [fetched]
        return zip(*(tensor.split(self.batch_sampler.batch_size) for tensor in fetched), strict=True)  # views

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.batch_sampler.epoch, "num_batches": self.num_batches}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if state["epoch"] == self.batch_sampler.epoch:
            self.batch_sampler.first_batch = state["num_batches"]


def as_it_is(batch: Batch) -> Batch:
    return batch
