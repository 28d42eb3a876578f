"""The samples of a split, and the DataLoader that reads them batch by batch.

`TensorBatches` holds tensors and `DatasetSamples` a map-style Dataset. Each returns the
batch of a list of indices. `ResumableLoader` gets the indices from an
`EpochBatchSampler`, and can resume within an epoch. The functions at the end of the
file run in worker processes.
"""

import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, islice
from operator import itemgetter
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    TensorDataset,
    default_collate,
    get_worker_info,
)

from lightbase.compat import batches_in_flight
from lightbase.config.errors import UserError, say
from lightbase.data.sampler import EpochBatchSampler, Indices, PermutedPart
from lightbase.data.tensors import (
    Batch,
    as_tensors,
    convert_types,
    map_tensors,
    rows_of,
    targets_of,
    tensors_in,
)

MAX_BATCHES_AT_ONCE = 20  # more are hardly faster

MAX_BYTES_AT_ONCE = 8 * 2**20  # 8 MiB


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
    times: ClassVar[Any] = None  # `Windows` have times

    def __post_init__(self) -> None:
        self.on_gpu: TensorBatches | None = None
        tensors = tensors_in(self.all_values)
        self.device = tensors[0].device
        self.num_values = len(tensors[0])
        num_bytes = sum(tensor.nbytes for tensor in tensors)
        self.sample_bytes = num_bytes / max(1, self.num_values)
        self.num_bytes = len(self) * self.sample_bytes  # of a copy on a GPU

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

    def resident(self, device: torch.device, wanted: bool | None) -> "TensorBatches":
        """Return a copy of the samples on a GPU, the same one in each call, or the
        samples themselves if they are not to be kept there.

        Args:
            wanted: See the argument `resident` of `BaseDataModule`.
        """
        if self.on_gpu is None:
            if wanted is None:
                free_bytes, _ = torch.cuda.mem_get_info(device)
                wanted = 4 * self.num_bytes <= free_bytes
            if not wanted:
                return self
            self.on_gpu = self.to(device)
        return self.on_gpu

    def to(self, device: torch.device) -> "TensorBatches":
        values = map_tensors(lambda x: x.to(device), self.values)
        return TensorBatches(values, keeps_float64=self.keeps_float64)


GENERATORS = (
    torch.Generator,
    np.random.Generator,
    np.random.RandomState,
    random.Random,
)

MAX_LOOKED_AT = 1000
"""Objects in which the generators of a Dataset are looked for, and the longest list."""


@contextmanager
def seeded(seed: int, generators: Sequence[Any] = ()) -> Iterator[None]:
    """Within this context, let the global generators of torch (on the CPU), Python and
    numpy, and others, begin at this seed, in [0, 2**63). Afterwards they get their old
    state back, except in a worker process, where nothing else draws numbers.

    generators: The result of `generators_in`. Each begins at another number.
    """
    is_worker = get_worker_info() is not None
    states = [] if is_worker else [state_of(generator) for generator in generators]
    with nullcontext() if is_worker else isolate_rng(include_cuda=False):
        # torch.manual_seed would seed the GPUs, too
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        for i, generator in enumerate(generators):
            begin_at(generator, seed + 1 + i)
        yield
    for generator, state in zip(generators, states, strict=False):
        set_state(generator, state)


def generators_in(value: Any) -> list[Any]:
    """Return the random generators that a Dataset keeps in its attributes, and in those
    of its transforms and of other objects in them. A worker process has a copy of each:
    without a seed, all workers would draw the same numbers in all epochs."""
    found, waiting = [], [value]
    seen: set[int] = set()
    while waiting and len(seen) < MAX_LOOKED_AT:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, GENERATORS):
            if type(value) is not random.SystemRandom:
                found.append(value)
        elif isinstance(value, list | tuple | dict):
            if len(value) <= MAX_LOOKED_AT:
                waiting += value.values() if isinstance(value, dict) else value
        elif not isinstance(value, type | ModuleType | Tensor):
            waiting += getattr(value, "__dict__", {}).values()
    return found


def begin_at(generator: Any, seed: int) -> None:
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
        bits.state = type(bits)(seed).state
    elif isinstance(generator, np.random.RandomState):
        generator.seed(seed % 2**32)
    else:
        generator.seed(seed)


def state_of(generator: Any) -> Any:
    """Return the state of a generator, in a form that safe loading accepts."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.RandomState):
        state: Any = generator.get_state(legacy=False)
    else:
        state = generator.bit_generator.state
    return apply_to_collection(state, np.ndarray, np.ndarray.tolist)


def set_state(generator: Any, state: Any) -> None:
    """Set a generator to the result of `state_of`."""
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, torch.Generator | np.random.RandomState):
        generator.set_state(state)
    else:
        generator.bit_generator.state = state


@dataclass(eq=False)
class DatasetSamples(Dataset[Any]):
    """Samples of a map-style Dataset, read batch by batch. Random transforms do not
    depend on the number of workers, and they repeat after a resume.

    For this the global generators, and those of the Dataset, are `seeded` with the seed
    of the batch while it is read.

    Args:
        dataset: The Dataset.
        collate: Makes a batch of a list of samples. Without it a batch is the list.
        index: The positions of the samples that belong to this object. By default all
            samples belong to it.
    """

    dataset: Any
    collate: Callable[[list], Any] | None = None
    index: Tensor | PermutedPart | None = None

    @cached_property
    def generators(self) -> list[Any]:
        return generators_in(self.dataset)

    @property
    def targets(self) -> Any:
        if self.index is not None:
            return None
        return getattr(self.dataset, "targets", None)

    @property
    def times(self) -> Any:
        return getattr(self.dataset, "times", None)

    def __len__(self) -> int:
        return len(self.dataset if self.index is None else self.index)

    def __getitems__(self, indices: list[int]) -> Any:
        """Return the batch of these samples. Without an Indices object, which has a
        seed, the first index is the seed."""
        seed = indices.seed if isinstance(indices, Indices) else indices[0]
        if self.index is not None:
            indices = self.index[torch.tensor(indices)].tolist()
        with seeded(seed, self.generators):
            is_tensors = isinstance(self.dataset, TensorBatches)
            if hasattr(self.dataset, "__getitems__") and not is_tensors:
                samples = self.dataset.__getitems__(indices)
            else:
                samples = [self.dataset[index] for index in indices]
            if self.collate is None:
                return samples
            return convert_types(self.collate(samples))

    def __getitem__(self, index: int) -> Any:
        if self.index is not None:
            index = int(self.index[torch.tensor([index])])
        return self.dataset[index]

    def select(self, index: Tensor | PermutedPart) -> "DatasetSamples":
        """Return the samples at these positions of all samples."""
        if isinstance(self.dataset, TensorBatches) and isinstance(index, Tensor):
            return DatasetSamples(self.dataset.select(index), self.collate)
        return replace(self, index=index)


Samples = TensorBatches | DatasetSamples


def as_samples(
    loaded: Any,
    name: str,
    collate: Callable[[list], Any] | None,
    keeps_float64: bool = False,
) -> Samples:
    """Convert the result of `load` to samples.

    Args:
        name: The text with which the message of the error begins.
        collate: The `collate` of the user's class. None selects torch's function.
    """
    if type(loaded) is TensorDataset:
        loaded = loaded.tensors
    if isinstance(loaded, Tensor | np.ndarray | tuple | list | dict):
        values = as_tensors(loaded)
        parts = loaded if isinstance(loaded, tuple | list) else [loaded]
        # Arrays that stay in their files are converted batch by batch.
        if not any(isinstance(part, np.memmap) for part in parts):
            values = convert_types(values, keeps_float64)
        # the numbers of samples in the tensors; 1 for a single number
        sizes = [x.shape[:1].numel() for x in tensors_in(values)]
        if len(set(sizes)) != 1:
            raise UserError(
                f"{name} has arrays of {str(sizes)[:40]} samples: they must be equally "
                "long",
                "return as many of each, or put a list of samples into a Dataset",
            )
        loaded = TensorBatches(values, keeps_float64=keeps_float64)
    if isinstance(loaded, TensorBatches) and not collate:
        return loaded
    is_map = isinstance(loaded, Sized) and hasattr(loaded, "__getitem__")
    if is_map and not isinstance(loaded, str | bytes | IterableDataset):
        return DatasetSamples(loaded, collate or default_collate)
    raise UserError(
        f"{name} is a {type(loaded).__name__}:",
        "load returns arrays, a Dataset with __len__ and __getitem__, or an "
        "IterableDataset; else write a LightningDataModule",
    )


def check_targets(samples: Samples, num_classes: int, name: str) -> None:
    """Raise UserError if targets (N,) are not class numbers. Of a Dataset only the
    first sample is read. name: The text with which the message begins."""
    targets = targets_of(samples.__getitems__([0]))
    if not isinstance(targets, Tensor) or targets.dim() != 1:
        return
    if isinstance(samples, TensorBatches):
        targets = samples.targets
    first, last = targets.aminmax()
    if targets.is_floating_point() or first < 0 or last >= num_classes:
        raise UserError(
            f"{name} has {targets.dtype} targets from {first} to {last}, not int64 "
            f"from 0 to {num_classes - 1}",
            "target i stands for classes[i]: return such numbers from load, or leave "
            "`classes` empty if the targets are not classes",
        )


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
    has_said = False  # that the dataset has another length now
    trainer: Any = None  # of the training that saves the state
    batch_sampler: EpochBatchSampler
    num_batches = 0  # yielded in `begun_epoch`, also before a resume
    begun_epoch = 0

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
        """Yield the batches of an epoch, or the rest of it after a resume."""
        self.num_batches = self.batch_sampler.first_batch
        self.begun_epoch = self.batch_sampler.epoch
        num_samples = len(self.dataset)  # type: ignore[arg-type]
        if num_samples != self.batch_sampler.num_samples and not self.has_said:
            self.has_said = True
            say(
                f"Data: the Dataset has {num_samples:,} samples now; its loader "
                f"reads {self.batch_sampler.num_samples:,} of them unless "
                "--trainer.reload_dataloaders_every_n_epochs 1 makes a new one"
            )
        if isinstance(self.dataset, TensorBatches) and not self.num_workers:
            batches = self._read_tensors(self.dataset)
        else:
            batches = super().__iter__()
        for batch in batches:
            self.num_batches += 1
            yield batch

    @property
    def num_at_once(self) -> int:
        """How many batches are read together. Each read has a fixed cost, so it is at
        most MAX_BATCHES_AT_ONCE, and not more than MAX_BYTES_AT_ONCE, which fit into
        the cache of the CPU. docs/performance.md has the measurements. It is 1 for a
        Dataset, and with workers."""
        if self.num_workers or not isinstance(self.dataset, TensorBatches):
            return 1
        batch_bytes = self.batch_sampler.batch_size * self.dataset.sample_bytes
        return max(1, min(MAX_BATCHES_AT_ONCE, int(MAX_BYTES_AT_ONCE / batch_bytes)))

    def _read_tensors(self, samples: TensorBatches) -> Iterator[Batch]:
        """Yield the batches, which are parts of what is read together."""
        size = self.batch_sampler.batch_size
        waiting = iter(self.batch_sampler)
        while chunk := [*islice(waiting, self.num_at_once)]:
            rows = samples.__getitems__([*chain.from_iterable(chunk)])
            if self.pin_memory and torch.cuda.is_available():
                rows = map_tensors(Tensor.pin_memory, rows)
            for start in range(0, sum(map(len, chunk)), size):
                yield map_tensors(itemgetter(slice(start, start + size)), rows)

    def state_dict(self) -> dict[str, int]:
        sampler = self.batch_sampler
        num_trained = 0
        if self.begun_epoch == sampler.epoch:  # else only its hooks have run so far
            num_trained = self.num_batches
            if self.trainer:
                num_trained -= batches_in_flight(self.trainer)
        state = {"epoch": sampler.epoch, "num_batches": num_trained}
        return state | {"is_large": sampler.is_large}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Let the next pass continue where `state_dict` was called."""
        epoch, first_batch = state["epoch"], state["num_batches"]
        # until version 0.4 the order of large sets was made as that of others
        self.batch_sampler.is_large = bool(state.get("is_large"))
        if first_batch == len(self):  # the epoch is over
            epoch, first_batch = epoch + 1, 0
        # The data module may have set a later epoch already. Then the saved epoch is
        # over, although batches are left: `limit_train_batches` has ended it.
        if epoch >= self.batch_sampler.epoch:
            self.batch_sampler.set_epoch(epoch)
            self.batch_sampler.first_batch = first_batch


def make_loader(
    samples: Samples,
    sampler: EpochBatchSampler,
    device: torch.device,
    num_workers: int = 0,
    resident: bool | None = None,
    pin_memory: bool | None = None,
    persistent_workers: bool = True,
) -> ResumableLoader:
    """Return the loader of a split.

    Args:
        device: The device of the training.
        num_workers, resident, pin_memory, persistent_workers: See `BaseDataModule`.
    """
    is_cuda = device.type == "cuda"
    if pin_memory is None:
        pin_memory = is_cuda
    if is_cuda and not num_workers and isinstance(samples, TensorBatches):
        samples = samples.resident(device, resident)
        # torch pins CPU memory only
        pin_memory = pin_memory and samples.device.type == "cpu"
    return ResumableLoader(
        samples,
        sampler,
        collate_fn=share_from_worker,
        num_workers=num_workers,
        pin_memory=pin_memory,
        persistent_workers=persistent_workers and num_workers > 0,
    )


def share_from_worker(batch: Any) -> Any:
    """Return the batch unchanged. This is the `collate_fn` of loaders, because the
    samples already are a batch.

    In a worker process this function moves the tensors of the batch to shared memory.
    If that memory is full, it raises an error here. Otherwise torch would move them
    later, in a thread: it would lose the batch, and the training would wait for ever.
    """
    if get_worker_info():
        map_tensors(Tensor.share_memory_, batch)
    return batch


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
