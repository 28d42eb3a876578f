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
from numpy.random import SeedSequence
from torch import Tensor, nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    SequentialSampler,
    Subset,
)

Batch = Any  # what the data gives: tensors, or tuples, lists and dicts of them
NESTED = (Tensor, np.ndarray, tuple, dict)
MAX_BATCHES_AT_ONCE = 20  # more are hardly faster
MAX_BYTES_AT_ONCE = 8 * 2**20


def map_tensors(function: Callable[[Tensor], Any], values: Any) -> Any:
    """The same structure, with the results of the function in place of the tensors."""
    return apply_to_collection(values, Tensor, function)


def tensors_in(values: Any) -> list[Tensor]:
    tensors: list[Tensor] = []
    apply_to_collection(values, Tensor, tensors.append)
    return tensors


def to_host(values: Any) -> Any:
    """The same structure, with its tensors on the CPU. For a GPU the host waits once:
    the copies go to page-locked memory."""
    moved = map_tensors(lambda x: x.to("cpu", non_blocking=x.is_cuda), values)
    for device in {x.device for x in tensors_in(values) if x.is_cuda}:
        torch.cuda.current_stream(device).synchronize()
    return moved


def as_tensors(values: Any) -> Any:
    """The same structure, with tensors in place of arrays and lists of numbers."""
    if isinstance(values, dict):
        return {key: as_tensors(value) for key, value in values.items()}
    is_list = isinstance(values, list) and any(
        isinstance(part, NESTED) for part in values
    )
    if isinstance(values, tuple) or is_list:
        return with_parts(values, *map(as_tensors, values))
    return torch.as_tensor(values)


def inputs_of(batch: Any) -> Any:
    """The first part of a tuple or list; else the batch itself."""
    return batch[0] if isinstance(batch, tuple | list) and batch else batch


def targets_of(batch: Any) -> Any:
    """The second part of a pair; None for a batch that is no pair."""
    return batch[1] if isinstance(batch, tuple | list) and len(batch) == 2 else None


def with_parts(batch: Any, *parts: Any) -> Any:
    """The tuple of these parts; a named one if the batch is a named tuple."""
    return type(batch)(*parts) if is_namedtuple(batch) else parts


def convert_types(batch: Any) -> Any:
    """A batch with float32 in place of float64. The targets of a pair, if they are one
    tensor, become float32 or int64."""
    batch = map_tensors(lambda x: x.float() if x.dtype == torch.float64 else x, batch)
    targets = targets_of(batch)
    if isinstance(targets, Tensor):
        targets = targets.float() if targets.is_floating_point() else targets.long()
        batch = with_parts(batch, batch[0], targets)
    return batch


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
    """

    num_samples: int  # at least num_ranks
    batch_size: int  # on each rank
    _: KW_ONLY
    shuffle: bool = False  # a new order in every epoch
    even: bool = (
        False  # equally many samples on all ranks: leaves out up to num_ranks - 1
    )
    drop_last: bool = False  # full batches only, and equally many on all ranks
    seed: int = 0
    rank: int = 0  # of this process, in [0, num_ranks)
    num_ranks: int = 1
    batches_at_once: int = (
        1  # yielded as one list; `len()` and `first_batch` still count batches
    )

    def __post_init__(self) -> None:
        if self.even or self.drop_last:
            num = self.num_samples // self.num_ranks
        else:
            num = len(range(self.rank, self.num_samples, self.num_ranks))
        self.num_on_rank = num - num % self.batch_size if self.drop_last else num
        self.epoch = 0
        self.first_batch = (
            0  # of the next pass; above 0 if a run resumes within an epoch
        )

    def set_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            self.first_batch = (
                0  # it was meant for the earlier epoch, which had no batch left
            )
        self.epoch = epoch

    def __len__(self) -> int:
        return -(-self.num_on_rank // self.batch_size)

    def __iter__(self) -> Iterator[Indices]:  # type: ignore[override]
        first_batch, self.first_batch = self.first_batch, 0
        epoch = self.epoch if self.shuffle else 0
        order = torch.arange(self.num_samples)
        if self.shuffle:
            generator = torch.Generator().manual_seed(
                (self.seed * 1_000_003 + epoch) % 2**63
            )
            order = torch.randperm(self.num_samples, generator=generator)
        order = order[self.rank :: self.num_ranks][: self.num_on_rank]
        for i in range(first_batch, len(self), self.batches_at_once):
            start, end = (
                i * self.batch_size,
                (i + self.batches_at_once) * self.batch_size,
            )
            indices = Indices(order[start:end].tolist())
            seed = SeedSequence((self.seed, epoch, self.rank, i)).generate_state(
                1, "uint64"
            )[0]
            indices.seed = int(seed) % 2**63
            yield indices


class TensorBatches(Dataset[Batch]):
    """Tensors (N, ...) in memory, in tuples, lists or dicts, or a single one. With
    `index`, int64 (M,), only the samples that it names, without a copy."""

    def __init__(self, values: Any, index: Tensor | None = None) -> None:
        self.all_values = values
        self.index = index
        tensors = tensors_in(values)
        self.device = tensors[0].device
        self.num_all = len(tensors[0])
        self.sample_bytes = sum(tensor.nbytes for tensor in tensors) / max(
            1, self.num_all
        )

    @property
    def values(self) -> Batch:
        return self.all_values if self.index is None else self._select(self.index)

    @property
    def inputs(self) -> Any:
        return inputs_of(self.values)

    @property
    def targets(self) -> Any:
        return targets_of(self.values)

    def _select(self, index: Tensor) -> Batch:
        # index_select copies row by row: for small images seven times as fast as
        # tensor[index]
        return map_tensors(
            lambda tensor: tensor.index_select(0, index), self.all_values
        )

    def __len__(self) -> int:
        return self.num_all if self.index is None else len(self.index)

    def __getitems__(self, indices: list[int]) -> Batch:
        """The values of these samples, (len(indices), ...)."""
        chosen = torch.from_numpy(np.array(indices, dtype=np.int64))
        if self.device.type != "cpu":
            chosen = chosen.pin_memory().to(
                self.device, non_blocking=True
            )  # does not wait
        return self._select(chosen if self.index is None else self.index[chosen])

    def __getitem__(self, index: int) -> Any:
        return map_tensors(lambda tensor: tensor[0], self.__getitems__([index]))

    def select(self, index: Tensor) -> "TensorBatches":
        return TensorBatches(
            self.all_values, index if self.index is None else self.index[index]
        )

    def batches_at_once(self, batch_size: int) -> int:
        """How many batches one call of __getitems__ should read: the fastest number."""
        batch_bytes = max(1, batch_size * self.sample_bytes)
        return max(1, min(MAX_BATCHES_AT_ONCE, int(MAX_BYTES_AT_ONCE / batch_bytes)))

    def to(self, device: torch.device) -> "TensorBatches":
        return TensorBatches(map_tensors(lambda tensor: tensor.to(device), self.values))


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
        """Of all samples, without reading them, as torchvision's sets have them; or
        None."""
        return getattr(self.dataset, "targets", None)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, indices: list[int]) -> Any:
        seed = indices.seed if isinstance(indices, Indices) else indices[0]
        with isolate_rng(include_cuda=False):
            torch.default_generator.manual_seed(
                seed
            )  # torch.manual_seed would seed the GPUs, too
            random.seed(seed)
            np.random.seed(seed % 2**32)
            samples = [self.dataset[index] for index in indices]
            return (
                samples
                if self.collate is None
                else convert_types(self.collate(samples))
            )

    def select(self, index: Tensor) -> "DatasetSamples":
        return DatasetSamples(Subset(self.dataset, index.tolist()), self.collate)


Samples = TensorBatches | DatasetSamples


def at_least_float32(outputs: Tensor) -> Tensor:
    """float16 and bfloat16, of a network in half precision, as float32 for the loss;
    float64 stays."""
    return outputs.to(torch.promote_types(outputs.dtype, torch.float32))


def for_network(inputs: Tensor, net: nn.Module) -> Tensor:
    """float64 if the weights are float64, with precision 64-true; other inputs as they
    are."""
    is_double = any(weight.dtype == torch.float64 for weight in net.parameters())
    return inputs.double() if is_double and inputs.is_floating_point() else inputs


class ResumableLoader(DataLoader[Any]):
    """A DataLoader that can resume within an epoch: Lightning saves its `state_dict()`
    in checkpoints.

    dataset: Samples, or any map-style Dataset. The global random state does not change.
    """

    dataset: TensorBatches | DatasetSamples
    batch_sampler: EpochBatchSampler
    num_batches = 0  # yielded in this pass

    def __init__(
        self, dataset: Any, batch_sampler: EpochBatchSampler, **options: Any
    ) -> None:
        if not isinstance(dataset, TensorBatches | DatasetSamples):
            dataset = DatasetSamples(dataset)
        options = {"generator": torch.Generator(), **options}
        super().__init__(dataset, batch_sampler=batch_sampler, **options)
        self.__dict__["sampler"] = (
            batch_sampler  # Lightning looks at the type of `sampler`
        )

    # torch's annotation names its iterator class
    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]
        self.num_batches = self.batch_sampler.first_batch
        for fetched in super().__iter__():
            for batch in self._split(fetched):
                self.num_batches += 1
                yield batch

    def _split(self, fetched: Any) -> Any:
        """The batches that one call of __getitems__ has read together."""
        if self.batch_sampler.batches_at_once == 1:
            return [fetched]
        size = self.batch_sampler.batch_size
        if type(fetched) is tuple and all(isinstance(part, Tensor) for part in fetched):
            return zip(
                *(tensor.split(size) for tensor in fetched), strict=True
            )  # faster
        starts = range(0, len(tensors_in(fetched)[0]), size)
        return (map_tensors(itemgetter(slice(i, i + size)), fetched) for i in starts)

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.batch_sampler.epoch, "num_batches": self.num_batches}

    def load_state_dict(self, state: dict[str, int]) -> None:
        is_over = state["num_batches"] == len(self)
        epoch = state["epoch"] + is_over
        # The data module may have set a later epoch: it knows `limit_train_batches`,
        # too.
        if epoch >= self.batch_sampler.epoch:
            self.batch_sampler.set_epoch(epoch)
            self.batch_sampler.first_batch = 0 if is_over else state["num_batches"]


def as_it_is(batch: Any) -> Any:
    """The collate function for batches that the samples have made already.

    A worker moves them to shared memory here: if it is too small, this raises an error.
    torch's queue would lose the batch without one, and the training would wait for it
    for ever.
    """
    if torch.utils.data.get_worker_info():
        map_tensors(Tensor.share_memory_, batch)
    return batch
