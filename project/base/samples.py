"""Samples fetched a batch at a time, and a DataLoader over them that can go on in the middle of an epoch."""

import random
from collections.abc import Iterable, Iterator, Sized
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset, default_collate

from project.base.errors import UserError, first_line
from project.base.random_state import random_state, restore_random_state
from project.base.sampler import EpochBatchSampler, Indices

Batch = tuple[Tensor, Tensor]
Values = Tensor | np.ndarray | list  # of numbers
Loaded = tuple[Values, Values] | Dataset
MAX_BATCHES_AT_ONCE = 20  # more are hardly faster
MAX_BYTES_AT_ONCE = 8 * 2**20


class TensorBatches(Dataset[Batch]):
    """Inputs (N, ...) and targets (N, ...) in memory."""

    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        self.inputs = inputs
        self.targets = targets
        self.device = inputs.device
        self.num_bytes = inputs.nbytes + targets.nbytes

    def __len__(self) -> int:
        return len(self.targets)

    def __getitems__(self, indices: list[int]) -> Batch:
        """Inputs (len(indices), ...) and targets (len(indices), ...)."""
        return self._at(torch.from_numpy(np.array(indices, dtype=np.int64)).to(self.device))

    def select(self, index: Tensor) -> "TensorBatches":
        return TensorBatches(*self._at(index))

    def _at(self, index: Tensor) -> Batch:
        # copies row by row: seven times as fast as inputs[index] for small images
        return self.inputs.index_select(0, index), self.targets.index_select(0, index)

    def batches_at_once(self, batch_size: int) -> int:
        """How many batches are fetched fastest with one call."""
        batch_bytes = batch_size * self.inputs.nbytes // len(self)
        return max(1, min(MAX_BATCHES_AT_ONCE, MAX_BYTES_AT_ONCE // max(1, batch_bytes)))

    def to(self, device: torch.device) -> "TensorBatches":
        return TensorBatches(self.inputs.to(device), self.targets.to(device))


class SeededSamples(Dataset[Any]):
    """A map-style Dataset, read a batch at a time.

    What it draws from the global generators of torch, Python and numpy follows from the indices' seed alone, whatever
    the workers and also after a resume, and leaves those generators as they were.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, indices: list[int]) -> Any:
        seed = indices.seed if isinstance(indices, Indices) else indices[0]
        state = random_state([])
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed the GPUs too
        random.seed(seed)
        np.random.seed(seed % 2**32)
        try:
            return [self.dataset[index] for index in indices]
        finally:
            restore_random_state(state, [])


class DatasetSamples(SeededSamples):
    """One of (input, target), collated by torch's default_collate."""

    def __init__(self, dataset: Any, are_classes: bool) -> None:
        super().__init__(dataset)
        self.are_classes = are_classes

    def __getitems__(self, indices: list[int]) -> Batch:
        items = super().__getitems__(indices)
        try:
            inputs, targets = default_collate([(input, target) for input, target in items])
        except Exception as error:  # of torch's collating; the data set's own have passed above
            what = "must give (input, target), each a tensor of one shape, array or number"
            raise UserError(f"{type(self.dataset).__name__} {what}:\n{first_line(error)}") from error
        return to_usual(inputs, targets, self.are_classes)

    def select(self, index: Tensor) -> "DatasetSamples":
        return DatasetSamples(Subset(self.dataset, index.tolist()), self.are_classes)


Samples = TensorBatches | DatasetSamples


def to_usual(inputs: Any, targets: Any, are_classes: bool) -> Batch:
    """float64 to float32 as weights are, whole targets to int64 as losses want them, class numbers (N, 1) to (N,)."""
    if isinstance(inputs, Tensor) and inputs.dtype == torch.float64:
        inputs = inputs.float()
    if isinstance(targets, Tensor):
        targets = targets.float() if targets.is_floating_point() else targets.long()
        if are_classes and targets.shape[1:] == (1,) and not targets.is_floating_point():
            targets = targets.squeeze(1)
    return inputs, targets


def as_samples(loaded: Any, where: str, classes: list[str], image_shape: tuple[int, int, int] | None) -> Samples:
    """What a data module loads, if it agrees with what the module says; else a UserError that begins with `where`."""
    samples = as_stored(loaded, where, bool(classes))
    if not len(samples):
        raise UserError(f"{where} is empty")
    if image_shape and isinstance(samples, TensorBatches) and (1, *samples.inputs.shape[1:]) == tuple(image_shape):
        samples.inputs = samples.inputs[:, None]  # grey images (N, H, W)
    inputs, targets = samples.__getitems__([0])
    if image_shape and isinstance(inputs, Tensor) and inputs.shape[1:] != tuple(image_shape):
        shapes = f"shape {tuple(inputs.shape[1:])} and image_shape {tuple(image_shape)}"
        raise UserError(f"{where} has samples of {shapes}: make them agree (channels, height, width)")
    if classes and isinstance(targets, Tensor) and targets.dim() == 1:  # one number a sample
        if targets.is_floating_point():
            raise UserError(f"{where} has {targets.dtype} targets: they must be integers, or `classes` empty")
        all_targets = samples.targets if isinstance(samples, TensorBatches) else targets
        first, last = int(all_targets.min()), int(all_targets.max())
        if not 0 <= first <= last < len(classes):
            numbers = f"targets {first} to {last} for {len(classes)} classes"
            raise UserError(f"{where} has {numbers}: they must be 0 to {len(classes) - 1}, or `classes` more")
    return samples


def as_stored(loaded: Any, where: str, are_classes: bool) -> Samples:
    if isinstance(loaded, TensorDataset) and len(loaded.tensors) == 2:
        loaded = loaded.tensors
    if isinstance(loaded, Dataset) and isinstance(loaded, Sized) and not isinstance(loaded, IterableDataset):
        return DatasetSamples(loaded, are_classes)
    if not isinstance(loaded, tuple | list) or len(loaded) != 2:
        what = "load returns (inputs, targets) or a map-style Dataset of them (__len__, __getitem__)"
        raise UserError(f"{where} is a {type(loaded).__name__}:\n{what}; for others write a LightningDataModule")
    try:
        # C, W: torch takes no negative strides, and warns of memory that is read-only
        arrays = [part if isinstance(part, Tensor) else np.require(part, requirements=["C", "W"]) for part in loaded]
        inputs, targets = torch.as_tensor(arrays[0]), torch.as_tensor(arrays[1])
    except (TypeError, ValueError) as error:
        raise UserError(f"{where} is not made of numbers in one shape:\n{first_line(error)}") from error
    if len(inputs) != len(targets):
        raise UserError(f"{where} has {len(inputs)} inputs and {len(targets)} targets: each input needs one")
    return TensorBatches(*to_usual(inputs, targets, are_classes))


class ResumableLoader(DataLoader[Any]):
    """A DataLoader that can go on in the middle of an epoch: Lightning keeps its `state_dict()` in checkpoints.

    dataset: Samples, or any map-style Dataset. The global random state is left alone.
    """

    dataset: TensorBatches | SeededSamples
    batch_sampler: EpochBatchSampler
    num_batches = 0  # handed out in this pass

    def __init__(self, dataset: Any, batch_sampler: EpochBatchSampler, **options: Any) -> None:
        samples = dataset if isinstance(dataset, TensorBatches | SeededSamples) else SeededSamples(dataset)
        super().__init__(samples, batch_sampler=batch_sampler, **{"generator": torch.Generator(), **options})
        self.__dict__["sampler"] = batch_sampler  # for Lightning, which asks for its type

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]  # torch promises its own iterator class
        self.num_batches = self.batch_sampler.first_batch
        try:
            for fetched in super().__iter__():
                batches: Iterable[Any] = [fetched]
                if self.batch_sampler.batches_at_once > 1:
                    batches = zip(*(values.split(self.batch_sampler.batch_size) for values in fetched), strict=True)
                for batch in batches:
                    self.num_batches += 1
                    yield batch
        except UserError as error:  # a worker's has that process's traceback before it
            raise UserError(str(error).rpartition("UserError: ")[2].strip()) from None

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.batch_sampler.epoch, "num_batches": self.num_batches}

    def load_state_dict(self, state: dict[str, int]) -> None:
        is_over = state["num_batches"] == len(self)
        epoch = state["epoch"] + is_over
        if epoch >= self.batch_sampler.epoch:  # a data module that has set it knows of `limit_train_batches`, too
            self.batch_sampler.set_epoch(epoch)
            self.batch_sampler.first_batch = 0 if is_over else state["num_batches"]


def as_it_is(batch: Any) -> Any:
    """Collates batches that the samples have made. In a worker they go to shared memory at once: where that is too
    small, torch's queue would drop the batch, and the training wait for it for ever."""
    for values in batch if torch.utils.data.get_worker_info() else ():
        if isinstance(values, Tensor):
            values.share_memory_()
    return batch
