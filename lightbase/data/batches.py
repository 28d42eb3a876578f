"""Samples fetched a batch at a time, and a DataLoader over them that can go on in the middle of an
epoch."""

import random
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset, default_collate

from lightbase.data.random_state import random_state, restore_random_state
from lightbase.data.sampler import EpochBatchSampler, Indices
from lightbase.errors import UserError, first_line

Batch = tuple[Tensor, Tensor]
MAX_BATCHES_AT_ONCE = 20  # more are hardly faster
MAX_BYTES_AT_ONCE = 8 * 2**20
MAX_EVAL_SAMPLES = 1024
MAX_EVAL_BYTES = 2 * 2**20


class TensorBatches(Dataset[Batch]):
    """Inputs (N, ...) and targets (N, ...) in memory: all of them or, without a copy, the `chosen`
    ones."""

    def __init__(self, inputs: Tensor, targets: Tensor, chosen: Tensor | None = None) -> None:
        self.whole, self.chosen = (inputs, targets), chosen
        self.device = inputs.device
        self.num_bytes = (inputs.nbytes + targets.nbytes) * len(self) // max(1, len(targets))

    @property
    def inputs(self) -> Tensor:
        return self.whole[0] if self.chosen is None else self.whole[0].index_select(0, self.chosen)

    @property
    def targets(self) -> Tensor:
        return self.whole[1] if self.chosen is None else self.whole[1].index_select(0, self.chosen)

    def __len__(self) -> int:
        return len(self.whole[1] if self.chosen is None else self.chosen)

    def __getitems__(self, indices: list[int]) -> Batch:
        """Inputs (len(indices), ...) and targets (len(indices), ...)."""
        index = torch.from_numpy(np.array(indices, dtype=np.int64))
        if self.device.type != "cpu":
            index = index.pin_memory().to(self.device, non_blocking=True)  # waits for nothing
        index = index if self.chosen is None else self.chosen[index]
        # copies row by row: seven times as fast as inputs[index] for small images
        return self.whole[0].index_select(0, index), self.whole[1].index_select(0, index)

    def select(self, index: Tensor) -> "TensorBatches":
        return TensorBatches(*self.whole, index if self.chosen is None else self.chosen[index])

    def batches_at_once(self, batch_size: int) -> int:
        """How many batches are fetched fastest with one call."""
        batch_bytes = batch_size * self.whole[0].nbytes // len(self.whole[0])
        return max(1, min(MAX_BATCHES_AT_ONCE, MAX_BYTES_AT_ONCE // max(1, batch_bytes)))

    def to(self, device: torch.device) -> "TensorBatches":
        return TensorBatches(self.inputs.to(device), self.targets.to(device))


class SeededSamples(Dataset[Any]):
    """A map-style Dataset, read a batch at a time.

    What it draws from the global generators of torch, Python and numpy follows from the indices'
    seed alone, whatever the workers and also after a resume, and leaves those generators as they
    were.
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
            raise UserError(
                f"{type(self.dataset).__name__} {what}:\n{first_line(error)}"
            ) from error
        return to_usual(inputs, targets, self.are_classes)

    def select(self, index: Tensor) -> "DatasetSamples":
        return DatasetSamples(Subset(self.dataset, index.tolist()), self.are_classes)


Samples = TensorBatches | DatasetSamples


def to_usual(inputs: Any, targets: Any, are_classes: bool) -> Batch:
    """float64 to float32 as weights are, whole targets to int64 as losses want them, class numbers
    (N, 1) to (N,)."""
    if isinstance(inputs, Tensor) and inputs.dtype == torch.float64:
        inputs = inputs.float()
    if isinstance(targets, Tensor):
        targets = targets.float() if targets.is_floating_point() else targets.long()
        if are_classes and targets.shape[1:] == (1,) and not targets.is_floating_point():
            targets = targets.squeeze(1)
    return inputs, targets


def eval_size(data: Samples, batch_size: int, trainer: Any) -> int:
    """Without gradients a batch takes a fraction of the memory, and a GPU is faster with a larger
    one: up to 8 times batch_size, of small samples. Of whole numbers, as of words, the outputs may
    be much larger than the inputs."""
    limits = (trainer.limit_val_batches, trainer.limit_test_batches, trainer.limit_predict_batches)
    counts_batches = any(isinstance(limit, int) or limit < 1 for limit in limits)
    if trainer.strategy.root_device.type == "cpu" or counts_batches:
        return batch_size
    if not isinstance(data, TensorBatches) or data.whole[0].dtype == torch.int64:
        return batch_size
    num_in_memory = MAX_EVAL_BYTES * len(data) // max(1, data.num_bytes)
    return max(batch_size, min(8 * batch_size, MAX_EVAL_SAMPLES, num_in_memory))


class ResumableLoader(DataLoader[Any]):
    """A DataLoader that can go on in the middle of an epoch: Lightning keeps its `state_dict()` in
    checkpoints.

    dataset: Samples, or any map-style Dataset. The global random state is left alone.
    """

    dataset: TensorBatches | SeededSamples
    batch_sampler: EpochBatchSampler
    num_batches = 0  # handed out in this pass

    def __init__(self, dataset: Any, batch_sampler: EpochBatchSampler, **options: Any) -> None:
        samples = (
            dataset
            if isinstance(dataset, TensorBatches | SeededSamples)
            else SeededSamples(dataset)
        )
        super().__init__(
            samples, batch_sampler=batch_sampler, **{"generator": torch.Generator(), **options}
        )
        self.__dict__["sampler"] = batch_sampler  # for Lightning, which asks for its type

    # torch promises its own iterator class
    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]
        self.num_batches = self.batch_sampler.first_batch
        try:
            for fetched in super().__iter__():
                batches: Iterable[Any] = [fetched]
                if self.batch_sampler.batches_at_once > 1:
                    batches = zip(
                        *(values.split(self.batch_sampler.batch_size) for values in fetched),
                        strict=True,
                    )
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
        if (
            epoch >= self.batch_sampler.epoch
        ):  # a data module that has set it knows of `limit_train_batches`, too
            self.batch_sampler.set_epoch(epoch)
            self.batch_sampler.first_batch = 0 if is_over else state["num_batches"]


def as_it_is(batch: Any) -> Any:
    """Collates batches that the samples have made. In a worker they go to shared memory at once:
    where that is too small, torch's queue would drop the batch, and the training wait for it for
    ever."""
    for values in batch if torch.utils.data.get_worker_info() else ():
        if isinstance(values, Tensor):
            values.share_memory_()
    return batch
