"""Batches of any structure: which samples they hold, how the samples are read, and a
DataLoader that can resume within an epoch."""

import random
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from lightning_utilities.core.apply_func import apply_to_collection, is_namedtuple
from torch import Tensor, nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    SequentialSampler,
    Subset,
)

Batch = Any
"""What the data gives: tensors, or tuples, lists and dicts of them."""
NESTED = (Tensor, np.ndarray, tuple, dict)
MAX_BATCHES_AT_ONCE = 20  # more are hardly faster
MAX_BYTES_AT_ONCE = 8 * 2**20


def map_tensors(function: Callable[[Tensor], Any], values: Any) -> Any:
    """Return `values`, of any structure, with the function's result in place of each
    tensor."""
    return apply_to_collection(values, Tensor, function)


def tensors_in(values: Any) -> list[Tensor]:
    """Return all tensors in `values`, of any structure, in their order."""
    tensors: list[Tensor] = []
    map_tensors(tensors.append, values)
    return tensors


def to_host(values: Any) -> Any:
    """Return `values`, of any structure, with the tensors on the CPU. The host waits
    only once for each GPU: the copies go to page-locked memory."""
    moved = map_tensors(lambda x: x.to("cpu", non_blocking=x.is_cuda), values)
    for device in {x.device for x in tensors_in(values) if x.is_cuda}:
        torch.cuda.current_stream(device).synchronize()
    return moved


def as_tensors(values: Any) -> Any:
    """Return `values` with tensors in place of arrays and lists of numbers. A list
    that holds arrays, tuples or dicts becomes a tuple."""
    if isinstance(values, dict):
        return {key: as_tensors(value) for key, value in values.items()}
    is_nested = isinstance(values, tuple)
    if isinstance(values, list):
        is_nested = any(isinstance(part, NESTED) for part in values)
    if is_nested:
        return with_parts(values, *map(as_tensors, values))
    return torch.as_tensor(values)


def inputs_of(batch: Any) -> Any:
    """Return the first part of a tuple or list, and any other batch itself."""
    if isinstance(batch, tuple | list) and batch:
        return batch[0]
    return batch


def targets_of(batch: Any) -> Any:
    """Return the second part of a pair, or None if the batch is not a pair."""
    if isinstance(batch, tuple | list) and len(batch) == 2:
        return batch[1]
    return None


def with_parts(batch: Any, *parts: Any) -> Any:
    """Return a tuple of the parts. It is a named tuple if `batch` is one."""
    if is_namedtuple(batch):
        return type(batch)(*parts)
    return parts


def convert_types(batch: Any) -> Any:
    """Return the batch with float32 in place of float64. The targets of a pair, if they
    are one tensor, become float32 or int64."""
    batch = map_tensors(lambda x: x.float() if x.dtype == torch.float64 else x, batch)
    targets = targets_of(batch)
    if not isinstance(targets, Tensor):
        return batch
    targets = targets.float() if targets.is_floating_point() else targets.long()
    return with_parts(batch, batch[0], targets)


class Indices(list[int]):
    """The indices of a batch's samples. `seed`, in [0, 2**63), seeds the random
    transforms of this batch."""

    seed: int


@dataclass(eq=False)
class EpochBatchSampler(DistributedSampler[Any], SequentialSampler):
    """Batches of sample indices. Their order and their seeds depend on (seed, epoch)
    only; without `shuffle` they are the same in every epoch.

    Batch i of all ranks together is batch i of one process with `num_ranks` times the
    batch size. Every sample comes once, without padding. `even` and `drop_last` leave
    some samples out.

    Because of its base classes Lightning replaces it neither by a DistributedSampler
    nor, for `overfit_batches`, by a SequentialSampler.

    Args:
        num_samples: Number of all samples, at least `num_ranks`.
        batch_size: Samples a batch, on each rank.
        shuffle: Take a new order in every epoch.
        even: Give all ranks the same number of samples. Up to num_ranks - 1 samples
            are left out.
        drop_last: Make full batches only, and the same number on all ranks.
        rank: The rank of this process, in [0, num_ranks).
        batches_at_once: Yield the indices of so many batches as one list. `len()` and
            `first_batch` still count batches.
    """

    num_samples: int
    batch_size: int
    _: KW_ONLY
    shuffle: bool = False
    even: bool = False
    drop_last: bool = False
    seed: int = 0
    rank: int = 0
    num_ranks: int = 1
    batches_at_once: int = 1

    def __post_init__(self) -> None:
        self.num_on_rank = len(range(self.rank, self.num_samples, self.num_ranks))
        if self.even or self.drop_last:
            self.num_on_rank = self.num_samples // self.num_ranks
        if self.drop_last:
            self.num_on_rank -= self.num_on_rank % self.batch_size
        self.epoch = 0
        # of the next pass; above 0 if a run resumes within an epoch
        self.first_batch = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass."""
        if epoch != self.epoch:
            # it was meant for the earlier epoch, which had no batch left
            self.first_batch = 0
        self.epoch = epoch

    def __len__(self) -> int:
        return -(-self.num_on_rank // self.batch_size)

    def __iter__(self) -> Iterator[Indices]:  # type: ignore[override]
        first_batch, self.first_batch = self.first_batch, 0
        epoch = 0
        order = torch.arange(self.num_samples)
        if self.shuffle:
            epoch = self.epoch
            seed = (self.seed * 1_000_003 + epoch) % 2**63
            generator = torch.Generator().manual_seed(seed)
            order = torch.randperm(self.num_samples, generator=generator)
        order = order[self.rank :: self.num_ranks][: self.num_on_rank]
        for i in range(first_batch, len(self), self.batches_at_once):
            start = i * self.batch_size
            end = start + self.batches_at_once * self.batch_size
            indices = Indices(order[start:end].tolist())
            sequence = np.random.SeedSequence((self.seed, epoch, self.rank, i))
            indices.seed = int(sequence.generate_state(1, "uint64")[0]) % 2**63
            yield indices


class TensorBatches(Dataset[Batch]):
    """Samples in memory.

    Args:
        values: Tensors (N, ...) in tuples, lists or dicts, or a single tensor.
        index: int64 (M,). If given, only these samples count. Nothing is copied.
    """

    def __init__(self, values: Any, index: Tensor | None = None) -> None:
        self.all_values = values
        self.index = index
        tensors = tensors_in(values)
        self.device = tensors[0].device
        num_bytes = sum(tensor.nbytes for tensor in tensors)
        self.sample_bytes = num_bytes / max(1, len(tensors[0]))

    @property
    def values(self) -> Batch:
        if self.index is None:
            return self.all_values
        return self._select(self.index)

    @property
    def inputs(self) -> Any:
        return inputs_of(self.values)

    @property
    def targets(self) -> Any:
        return targets_of(self.values)

    def _select(self, index: Tensor) -> Batch:
        # it copies row by row: for small images seven times as fast as indexing
        return map_tensors(lambda x: x.index_select(0, index), self.all_values)

    def __len__(self) -> int:
        if self.index is None:
            return len(tensors_in(self.all_values)[0])
        return len(self.index)

    def __getitems__(self, indices: list[int]) -> Batch:
        """Return the values of these samples, (len(indices), ...)."""
        chosen = torch.from_numpy(np.array(indices, dtype=np.int64))
        if self.device.type != "cpu":
            # from pinned memory the copy does not wait for the GPU
            chosen = chosen.pin_memory().to(self.device, non_blocking=True)
        if self.index is not None:
            chosen = self.index[chosen]
        return self._select(chosen)

    def __getitem__(self, index: int) -> Any:
        return map_tensors(itemgetter(0), self.__getitems__([index]))

    def select(self, index: Tensor) -> "TensorBatches":
        """Return the samples at these positions, int64 (M,), without a copy."""
        if self.index is not None:
            index = self.index[index]
        return TensorBatches(self.all_values, index)

    def batches_at_once(self, batch_size: int) -> int:
        """Return how many batches one call of __getitems__ should read: the fastest
        number."""
        batch_bytes = max(1, batch_size * self.sample_bytes)
        return max(1, min(MAX_BATCHES_AT_ONCE, int(MAX_BYTES_AT_ONCE / batch_bytes)))

    def to(self, device: torch.device) -> "TensorBatches":
        return TensorBatches(map_tensors(lambda x: x.to(device), self.values))


@dataclass(eq=False)
class DatasetSamples(Dataset[Any]):
    """A map-style Dataset, read batch by batch. Without `collate` a batch is a list of
    samples.

    The seed of each batch seeds the global generators of torch, Python and numpy. So
    random transforms do not depend on the number of workers, and repeat after a resume.
    The generators get their state back after each batch.
    """

    dataset: Any
    collate: Callable[[list], Any] | None = None

    @property
    def targets(self) -> Any:
        """The targets of all samples, if the Dataset has them as torchvision's sets do.
        Otherwise None. No sample is read."""
        return getattr(self.dataset, "targets", None)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, indices: list[int]) -> Any:
        """Return the batch of these samples."""
        seed = indices.seed if isinstance(indices, Indices) else indices[0]
        with isolate_rng(include_cuda=False):
            # torch.manual_seed would seed the GPUs, too
            torch.default_generator.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed % 2**32)
            samples = [self.dataset[index] for index in indices]
            if self.collate is None:
                return samples
            return convert_types(self.collate(samples))

    def select(self, index: Tensor) -> "DatasetSamples":
        """Return the samples at these positions, int64 (M,)."""
        return DatasetSamples(Subset(self.dataset, index.tolist()), self.collate)


Samples = TensorBatches | DatasetSamples


def at_least_float32(outputs: Tensor) -> Tensor:
    """Return float16 and bfloat16 outputs, of a network in half precision, as float32
    for the loss. float64 stays."""
    return outputs.to(torch.promote_types(outputs.dtype, torch.float32))


def for_network(inputs: Tensor, net: nn.Module) -> Tensor:
    """Return the inputs as float64 if the weights are float64, as with precision
    64-true. Integers, and inputs of other networks, stay."""
    is_double = any(weight.dtype == torch.float64 for weight in net.parameters())
    if is_double and inputs.is_floating_point():
        return inputs.double()
    return inputs


class ResumableLoader(DataLoader[Any]):
    """A DataLoader that can resume within an epoch: Lightning saves its `state_dict()`
    in checkpoints. The global random state does not change.

    Args:
        dataset: Samples, or any map-style Dataset.
        options: Further arguments of DataLoader.
    """

    dataset: TensorBatches | DatasetSamples
    batch_sampler: EpochBatchSampler
    num_batches = 0  # yielded in this pass

    def __init__(
        self, dataset: Any, batch_sampler: EpochBatchSampler, **options: Any
    ) -> None:
        if not isinstance(dataset, Samples):
            dataset = DatasetSamples(dataset)
        options = {"generator": torch.Generator(), **options}
        super().__init__(dataset, batch_sampler=batch_sampler, **options)
        # Lightning looks at the type of `sampler`
        self.__dict__["sampler"] = batch_sampler

    # torch's annotation names its iterator class
    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]
        self.num_batches = self.batch_sampler.first_batch
        for fetched in super().__iter__():
            for batch in self._split(fetched):
                self.num_batches += 1
                yield batch

    def _split(self, fetched: Any) -> Iterator[Batch]:
        """Yield the batches that one call of __getitems__ has read together."""
        if self.batch_sampler.batches_at_once == 1:
            yield fetched
            return
        size = self.batch_sampler.batch_size
        for i in range(0, len(tensors_in(fetched)[0]), size):
            yield map_tensors(itemgetter(slice(i, i + size)), fetched)

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.batch_sampler.epoch, "num_batches": self.num_batches}

    def load_state_dict(self, state: dict[str, int]) -> None:
        epoch, first_batch = state["epoch"], state["num_batches"]
        if first_batch == len(self):  # the epoch is over
            epoch, first_batch = epoch + 1, 0
        # The data module may have set a later epoch: it knows `limit_train_batches`,
        # too.
        if epoch >= self.batch_sampler.epoch:
            self.batch_sampler.set_epoch(epoch)
            self.batch_sampler.first_batch = first_batch


def share_from_worker(batch: Any) -> Any:
    """The collate function for batches that the samples have made already. Return the
    batch itself.

    A worker process moves its tensors to shared memory here. If that memory is too
    small, this raises an error; torch's queue would lose the batch without one, and
    the training would wait for it for ever.
    """
    if torch.utils.data.get_worker_info():
        map_tensors(Tensor.share_memory_, batch)
    return batch
