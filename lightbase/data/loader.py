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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset

from lightbase.config.errors import say
from lightbase.data.sampler import EpochBatchSampler, Indices
from lightbase.data.tensors import (
    Batch,
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
