"""Batches of any structure: which samples they have, how the samples are read, and a
DataLoader that can resume within an epoch.

Read three classes first. `EpochBatchSampler` chooses the indices of each batch.
`TensorBatches` or `DatasetSamples` makes the batch of these indices. `ResumableLoader`
connects them. The functions at the beginning take batches apart and convert them.
"""

import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass, replace
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

from lightbase.config.errors import UserError, say

Batch = Any
"""A batch: a tensor, or tuples, lists and dicts of tensors, also nested."""

NESTED = (Tensor, np.ndarray, tuple, dict)
"""A list with a value of these types is a structure. Other lists have numbers."""

MAX_BATCHES_AT_ONCE = 20  # more are hardly faster

MAX_BYTES_AT_ONCE = 8 * 2**20  # 8 MiB


def map_tensors(function: Callable[[Tensor], Any], values: Any) -> Any:
    """Return `values` with each tensor replaced by the function's result. `values` may
    have any structure; values that are no tensors stay."""
    return apply_to_collection(values, Tensor, function)


def tensors_in(values: Any) -> list[Tensor]:
    """Return all tensors in `values`, which may have any structure, in their order."""
    tensors: list[Tensor] = []
    map_tensors(tensors.append, values)
    return tensors


def to_host(values: Any) -> Any:
    """Return `values` with all tensors on the CPU. `values` may have any structure.

    `tensor.cpu()` would wait for the GPU once for each tensor. Here the copies are
    queued, to page-locked memory, and the host waits only once for each GPU.
    """
    moved = map_tensors(lambda x: x.to("cpu", non_blocking=x.is_cuda), values)
    for device in {x.device for x in tensors_in(values) if x.is_cuda}:
        torch.cuda.current_stream(device).synchronize()
    return moved


def as_tensors(values: Any) -> Any:
    """Return `values` with arrays, numbers and lists of numbers converted to tensors,
    and whatever else NumPy reads, such as a table of pandas.
    Tuples and dicts keep their structure. A list that holds tensors, arrays, tuples or
    dicts becomes a tuple. Raise UserError for text and other values."""
    if isinstance(values, dict):
        return {key: as_tensors(value) for key, value in values.items()}
    if isinstance(values, list) and any(isinstance(part, NESTED) for part in values):
        values = tuple(values)
    if isinstance(values, tuple):
        return with_parts(values, *map(as_tensors, values))
    try:
        if not isinstance(values, Tensor | list):
            values = native_array(np.asarray(values))
        return torch.as_tensor(values)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"load returned what is no array of numbers: {error}",
            "text labels become numbers: the position of each label in `classes`",
        ) from error


def native_array(values: np.ndarray) -> np.ndarray:
    """Return the array as torch takes it. Others are copied: arrays with negative
    strides, of another byte order, or of objects."""
    if values.dtype == object:
        values = np.asarray(values.tolist())  # numbers, or texts
    if any(stride < 0 for stride in values.strides):
        values = values.copy()
    return values.astype(values.dtype.newbyteorder("="), copy=False)


def plain_numbers(values: Any) -> Any:
    """Return `values` with the scalars of NumPy as numbers of Python. A checkpoint may
    hold no others. `values` may have any structure."""
    return apply_to_collection(values, np.generic, np.generic.item)


def inputs_of(batch: Any) -> Any:
    """Return the inputs of a batch: the first part of a tuple or list. Any other batch
    is the inputs itself."""
    if isinstance(batch, tuple | list) and batch:
        return batch[0]
    return batch


def targets_of(batch: Any) -> Any:
    """Return the targets of a batch: the second part of a tuple or list with two parts.
    Return None if the batch is not such a pair, or if both parts are uint8 images
    (N, C, H, W) of one shape."""
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        return None
    shapes = []  # of uint8 images
    for part in batch:
        if isinstance(part, Tensor) and part.dtype == torch.uint8 and part.dim() > 3:
            shapes.append(part.shape)
    if len(shapes) == 2 and shapes[0] == shapes[1]:
        return None  # such as two views; masks of this shape have to be int64
    return batch[1]


def with_parts(batch: Any, *parts: Any) -> Any:
    """Return a tuple of the parts. If `batch` is a named tuple, the result has the same
    type."""
    if is_namedtuple(batch):
        return type(batch)(*parts)
    return parts


def convert_types(batch: Any, keeps_float64: bool = False) -> Any:
    """Return the batch with dtypes that networks and losses take. float64 becomes
    float32. If the batch has targets (see `targets_of`) and they are one tensor, float
    targets become float32, and integers and bools become int64.

    keeps_float64: Leave inputs of float64 as they are.
    """
    if not keeps_float64:
        batch = map_tensors(
            lambda x: x.float() if x.dtype == torch.float64 else x, batch
        )
    targets = targets_of(batch)
    if isinstance(targets, Tensor):
        dtype = torch.int64
        if targets.is_floating_point():
            dtype = torch.float32
        batch = with_parts(batch, batch[0], targets.to(dtype))
    return batch


def rows_of(values: Any, index: Tensor | None) -> Any:
    """Return `values` with the rows at these positions of each tensor, int64 (M,).
    Without an index all rows are returned, and nothing is copied."""
    if index is None:
        return values
    # index_select copies whole rows. For small images it is seven times as fast as
    # x[index].
    return map_tensors(lambda x: x.index_select(0, index), values)


def seeded_order(num: int, seed: int) -> Tensor:
    """Return the numbers from 0 to num - 1, int64, in an order that depends only on the
    seed. The CPU makes it, so it is the same with and without a GPU."""
    return torch.randperm(num, generator=torch.Generator().manual_seed(seed))


def spread(num: int, count: int) -> Tensor:
    """Return at most `count` positions from 0 to num - 1, int64, with equal distances.
    The first `count` samples could all have one class, because data may be sorted by
    class."""
    count = min(num, count)
    return torch.arange(count) * (num - 1) // max(count - 1, 1)


class Indices(list[int]):
    """The indices of the samples in a batch. `seed` is the seed of the random
    transforms of this batch, in [0, 2**63)."""

    seed: int


@dataclass(eq=False)
class EpochBatchSampler(DistributedSampler[Any], SequentialSampler):
    """Yields the indices of each batch of this process.

    With `shuffle` the order of the samples depends only on `seed` and the epoch.
    Without it the order and the seeds of the batches are the same in every epoch.

    Rank r gets the samples r, r + num_ranks, r + 2 num_ranks, ... of the order. So
    batch i of all ranks together has the same samples as batch i of one process with
    `num_ranks` times the batch size. No sample comes twice in an epoch, unlike with
    torch's DistributedSampler, which repeats some to make the ranks equal.

    With `weights` the order consists of draws with replacement. Everything else stays:
    the number of batches, and the ranks' shares of one order.

    The base classes have no function here. Without them Lightning would replace this
    sampler: by a DistributedSampler, and for `overfit_batches` by a SequentialSampler.

    Args:
        num_samples: The number of all samples, at least `num_ranks`.
        batch_size: Samples in a batch, on each rank.
        shuffle: Whether every epoch has a new order.
        even: Give all ranks the same number of samples. Up to num_ranks - 1 samples
            are left out.
        drop_last: Make full batches only, and the same number on all ranks.
        seed: The seed of the orders and of the random transforms.
        rank: The rank of this process, in [0, num_ranks).
        num_ranks: The number of processes.
        batches_at_once: Yield the indices of this number of batches as one list.
            `len()` and `first_batch` still count batches.
        weights: Draw the samples with replacement, by these weights, float64
            (num_samples,), at least 0 and not all 0. Without `shuffle` every epoch has
            the same draws.
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
    weights: Tensor | None = None

    def __post_init__(self) -> None:
        self.num_on_rank = len(range(self.rank, self.num_samples, self.num_ranks))
        if self.even or self.drop_last:
            self.num_on_rank = self.num_samples // self.num_ranks
        if self.drop_last:
            self.num_on_rank -= self.num_on_rank % self.batch_size
        self.epoch = 0
        # where the next pass begins; above 0 if a run resumes within an epoch
        self.first_batch = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass. Lightning calls this before each epoch."""
        if epoch != self.epoch:
            # `first_batch` is for the earlier epoch. Lightning does not continue that
            # epoch, for example because `limit_train_batches` had ended it.
            self.first_batch = 0
        self.epoch = epoch

    def __len__(self) -> int:
        """Return the number of batches in a whole epoch, on this rank."""
        return -(-self.num_on_rank // self.batch_size)  # rounded up

    def __iter__(self) -> Iterator[Indices]:  # type: ignore[override]
        """Yield the indices of the batches of an epoch, from `first_batch` on. The pass
        after it begins at batch 0 again."""
        first_batch = self.first_batch
        self.first_batch = 0
        epoch = 0  # without shuffle, all epochs have the same seeds
        if self.shuffle:
            epoch = self.epoch
        seed = (self.seed * 1_000_003 + epoch) % 2**63
        order = torch.arange(self.num_samples)
        if self.weights is not None:
            generator = torch.Generator().manual_seed(seed)
            order = self.weights.multinomial(len(order), True, generator=generator)
        elif self.shuffle:
            order = seeded_order(self.num_samples, seed)
        # a view would keep the order of all ranks in memory
        order = order[self.rank :: self.num_ranks][: self.num_on_rank].clone()
        num_at_once = self.batches_at_once * self.batch_size
        for i in range(first_batch, len(self), self.batches_at_once):
            indices = Indices(order[i * self.batch_size :][:num_at_once].tolist())
            sequence = np.random.SeedSequence((self.seed, epoch, self.rank, i))
            indices.seed = int(sequence.generate_state(1, "uint64")[0]) % 2**63
            yield indices


@dataclass(eq=False)
class TensorBatches(Dataset[Batch]):
    """Samples as tensors, in memory or memory-mapped from files. A batch is a copy of
    their rows. `convert_types` converts the copy, so files need not be converted.

    Args:
        all_values: A tensor (N, ...), or tuples, lists or dicts of such tensors.
        index: The positions of the samples that belong to this object, int64 (M,). The
            tensors are shared, not copied. By default all samples belong to it.
        keeps_float64: See `convert_types`.
    """

    all_values: Any
    index: Tensor | None = None
    keeps_float64: bool = False

    def __post_init__(self) -> None:
        tensors = tensors_in(self.all_values)
        self.device = tensors[0].device
        self.num_values = len(tensors[0])
        num_bytes = sum(tensor.nbytes for tensor in tensors)
        self.sample_bytes = num_bytes / max(1, self.num_values)

    @property
    def values(self) -> Batch:
        """All samples as one batch. With an index this is a copy."""
        return convert_types(rows_of(self.all_values, self.index), self.keeps_float64)

    @property
    def targets(self) -> Any:
        """The targets of all samples, or None, see `targets_of`. No inputs are
        copied."""
        targets = rows_of(targets_of(self.all_values), self.index)
        # convert_types converts the targets of a pair
        return targets_of(convert_types((None, targets)))

    def __len__(self) -> int:
        if self.index is None:
            return self.num_values
        return len(self.index)

    def __getitems__(self, indices: list[int]) -> Batch:
        """Return the batch of these samples, (len(indices), ...)."""
        chosen = torch.from_numpy(np.array(indices, dtype=np.int64))
        if self.device.type != "cpu":
            # a copy from pinned memory does not wait for the GPU
            chosen = chosen.pin_memory().to(self.device, non_blocking=True)
        if self.index is not None:
            chosen = self.index[chosen]
        return convert_types(rows_of(self.all_values, chosen), self.keeps_float64)

    def __getitem__(self, index: int) -> Any:
        return map_tensors(itemgetter(0), self.__getitems__([index]))

    def select(self, index: Tensor) -> "TensorBatches":
        """Return the samples at these positions, int64 (M,), without a copy."""
        if self.index is not None:
            index = self.index[index]
        return replace(self, index=index)

    def batches_at_once(self, batch_size: int) -> int:
        """Return how many batches one call of __getitems__ should read. Each call has a
        fixed cost, so several small batches are read together: at most
        MAX_BATCHES_AT_ONCE, and not more than MAX_BYTES_AT_ONCE, which fit into the
        cache of the CPU. docs/performance.md has the measurements."""
        num_fitting = int(MAX_BYTES_AT_ONCE / (batch_size * self.sample_bytes))
        return max(1, min(MAX_BATCHES_AT_ONCE, num_fitting))

    def to(self, device: torch.device) -> "TensorBatches":
        """Return a copy of the samples on this device."""
        values = map_tensors(lambda x: x.to(device), self.values)
        return TensorBatches(values, keeps_float64=self.keeps_float64)


@dataclass(eq=False)
class DatasetSamples(Dataset[Any]):
    """Samples of a map-style Dataset, read batch by batch. Random transforms do not
    depend on the number of workers, and they repeat after a resume.

    For this the global generators of torch (on the CPU), Python and numpy get the seed
    of the batch before it is read. After the batch they get their old state back.

    Args:
        dataset: The Dataset.
        collate: Makes a batch of a list of samples. Without it a batch is the list.
    """

    dataset: Any
    collate: Callable[[list], Any] | None = None

    @property
    def targets(self) -> Any:
        """The attribute `targets` of the Dataset, which most sets of torchvision have,
        or None. No sample is read."""
        return getattr(self.dataset, "targets", None)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, indices: list[int]) -> Any:
        """Return the batch of these samples. Without an Indices object, which has a
        seed, the first index is the seed."""
        seed = indices.seed if isinstance(indices, Indices) else indices[0]
        with isolate_rng(include_cuda=False):
            # torch.manual_seed would seed the GPUs, too
            torch.default_generator.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed % 2**32)
            if isinstance(self.dataset, TensorBatches):
                samples = [self.dataset[index] for index in indices]
            else:
                # a Subset reads all at once if the Dataset has __getitems__
                everything = Subset(self.dataset, range(len(self.dataset)))
                samples = everything.__getitems__(indices)
            if self.collate is None:
                return samples
            return convert_types(self.collate(samples))

    def __getitem__(self, index: int) -> Any:
        """Return one sample of the Dataset. Random transforms draw new numbers."""
        return self.dataset[index]

    def select(self, index: Tensor) -> "DatasetSamples":
        """Return the samples at these positions, int64 (M,), without reading them."""
        if isinstance(self.dataset, TensorBatches):
            part: Any = self.dataset.select(index)
        else:
            part = Subset(self.dataset, index.tolist())
        return DatasetSamples(part, self.collate)


Samples = TensorBatches | DatasetSamples


def at_least_float32(outputs: Tensor) -> Tensor:
    """Return the outputs of a network as float32 for the loss, if they are float16 or
    bfloat16. In 16 bits a loss would be inexact. float32 and float64 stay."""
    return outputs.to(torch.promote_types(outputs.dtype, torch.float32))


def for_network(inputs: Tensor, net: nn.Module) -> Tensor:
    """Return the inputs as float64 if a weight of the network is float64, as with
    precision 64-true. Otherwise they stay as they are; so do integers."""
    dtypes = {weight.dtype for weight in net.parameters()}
    if inputs.is_floating_point() and torch.float64 in dtypes:
        return inputs.double()
    return inputs


class ResumableLoader(DataLoader[Any]):
    """A DataLoader that can resume within an epoch. Lightning saves the result of
    `state_dict` in each checkpoint, and gives it back to `load_state_dict`.

    The loader has its own random generator: a pass does not change the global one.

    Args:
        dataset: TensorBatches, DatasetSamples, or any map-style Dataset.
        batch_sampler: Chooses the samples of each batch.
        options: Other arguments of DataLoader, such as num_workers.
    """

    dataset: Samples
    batch_sampler: EpochBatchSampler
    num_batches = 0  # yielded in this epoch, also before a resume
    facts: dict[str, Any] | None = None  # of the Dataset in the first pass
    has_said = False  # that they have changed since

    def __init__(
        self, dataset: Any, batch_sampler: EpochBatchSampler, **options: Any
    ) -> None:
        if not isinstance(dataset, Samples):
            dataset = DatasetSamples(dataset)
        super().__init__(
            dataset,
            batch_sampler=batch_sampler,
            generator=torch.Generator(),
            worker_init_fn=end_by_parent_only,
            **options,
        )
        # Lightning looks at the type of `sampler`, which DataLoader does not let us set
        self.__dict__["sampler"] = batch_sampler

    # torch's annotation names its iterator class
    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]
        """Yield the batches of an epoch, or the rest of it after a resume. Print a line
        if the Dataset has changed in a way that this loader does not see."""
        facts = self.facts_of_dataset()
        self.facts = self.facts or facts
        changed = dict(facts.items() - self.facts.items())
        if changed and not self.has_said:
            say(
                f"Data: {', '.join(sorted(changed))} of the Dataset has changed, and "
                "its loader does not see it: "
                "--trainer.reload_dataloaders_every_n_epochs 1 makes a new one each "
                "epoch; a set that was divided keeps its length"
            )
            self.has_said = True
        self.num_batches = self.batch_sampler.first_batch
        for fetched in super().__iter__():
            if self.batch_sampler.batches_at_once == 1:
                self.num_batches += 1
                yield fetched
                continue
            # one call of __getitems__ has read several batches
            size = self.batch_sampler.batch_size
            for i in range(0, len(tensors_in(fetched)[0]), size):
                self.num_batches += 1
                yield map_tensors(itemgetter(slice(i, i + size)), fetched)

    def facts_of_dataset(self) -> dict[str, Any]:
        """Return what this loader reads only once of the Dataset: its length, and if
        workers keep copies of the Dataset, also its attributes that are numbers or
        texts."""
        dataset: Any = self.dataset
        while isinstance(dataset, DatasetSamples | Subset):
            dataset = dataset.dataset
        facts: dict[str, Any] = {"the length": len(dataset)}
        if self.persistent_workers:
            for name, value in getattr(dataset, "__dict__", {}).items():
                if isinstance(value, int | float | str):
                    facts[name] = value
        return facts

    def state_dict(self) -> dict[str, int]:
        """Return the epoch, and the number of its batches that have been yielded."""
        return {"epoch": self.batch_sampler.epoch, "num_batches": self.num_batches}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Let the next pass continue where `state_dict` was called."""
        epoch, first_batch = state["epoch"], state["num_batches"]
        if first_batch == len(self):  # the epoch is over
            epoch, first_batch = epoch + 1, 0
        # The data module may have set a later epoch already. Then the saved epoch is
        # over, although batches are left: `limit_train_batches` has ended it.
        if epoch >= self.batch_sampler.epoch:
            self.batch_sampler.set_epoch(epoch)
            self.batch_sampler.first_batch = first_batch


def share_from_worker(batch: Any) -> Any:
    """Return the batch unchanged. This is the `collate_fn` of loaders, because the
    samples already are a batch.

    In a worker process this function moves the tensors of the batch to shared memory.
    If that memory is full, it raises an error here. Otherwise torch would move them
    later, in a thread: it would lose the batch, and the training would wait for ever.
    """
    if torch.utils.data.get_worker_info():
        sys.excepthook = print_worker_error
        map_tensors(Tensor.share_memory_, batch)
    return batch


def print_worker_error(kind: type[BaseException], error: Any, traceback: Any) -> None:
    """Print an error of the thread that hands over the tensors of a worker process.

    Nothing is printed if the connection is lost: then the training was killed, and
    torch ends its workers after some seconds.
    """
    if not issubclass(kind, ConnectionError | EOFError):
        sys.__excepthook__(kind, error, traceback)


def end_by_parent_only(_: int) -> None:
    """In a worker process, let SIGTERM have an effect only if the training process has
    sent it. This is the `worker_init_fn` of loaders.

    `timeout` and systemd send SIGTERM to all processes of a command. The training
    process then trains until it can save its state, and needs its workers until then.
    """
    if sys.platform != "linux":  # the others cannot tell who has sent a signal
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])

    def watch() -> None:
        while signal.sigwaitinfo([signal.SIGTERM]).si_pid != os.getppid():
            pass
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()
