"""Which samples make which batch, on which rank, in which order."""

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from numpy.random import SeedSequence
from torch.utils.data import DistributedSampler, SequentialSampler


class Indices(list[int]):
    """The samples of a batch, and in `seed`, in [0, 2**63), what seeds the random numbers drawn
    while they are read."""

    seed: int


@dataclass(eq=False)
class EpochBatchSampler(DistributedSampler[Any], SequentialSampler):
    """Batches of sample indices. Their order and their own seeds depend on nothing but (seed,
    epoch), and not on the epoch either without `shuffle`: an evaluation is the same every time.

    Batch i of all ranks together is batch i of one process with `num_ranks` times the batch size.
    Every sample comes once, without padding, unless `even`, as training needs it, or `drop_last`
    leave some out.

    By its base classes Lightning sees that it needs no DistributedSampler, nor another order for
    `overfit_batches`.
    """

    num_samples: int  # at least num_ranks
    batch_size: int  # on each rank
    _: KW_ONLY
    shuffle: bool = False  # a new order every epoch, or the data set's own
    even: bool = (
        False  # equal shares: leave out the last num_samples % num_ranks samples of the order
    )
    drop_last: bool = False  # full batches only, of equal shares
    seed: int = 0  # of the order, and of the batches' seeds
    rank: int = 0  # this process, in [0, num_ranks)
    num_ranks: int = 1
    batches_at_once: int = 1  # yielded as one; `len()` and `first_batch` count batches all the same

    def __post_init__(self) -> None:
        even = self.even or self.drop_last
        share = (
            self.num_samples // self.num_ranks
            if even
            else len(range(self.rank, self.num_samples, self.num_ranks))
        )
        self.share = share - share % self.batch_size if self.drop_last else share
        self.epoch = 0
        self.first_batch = 0  # of the next pass: set when a run resumes in the middle of an epoch

    def set_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            self.first_batch = 0  # the epoch that it was set for had no batch left
        self.epoch = epoch

    def __len__(self) -> int:
        return -(-self.share // self.batch_size)

    def __iter__(self) -> Iterator[Indices]:  # type: ignore[override]
        first_batch, self.first_batch = self.first_batch, 0
        epoch = self.epoch if self.shuffle else 0
        order = torch.arange(self.num_samples)
        if self.shuffle:
            generator = torch.Generator().manual_seed((self.seed * 1_000_003 + epoch) % 2**63)
            order = torch.randperm(self.num_samples, generator=generator)
        order = order[self.rank :: self.num_ranks][: self.share]
        for i in range(first_batch, len(self), self.batches_at_once):
            indices = Indices(
                order[i * self.batch_size : (i + self.batches_at_once) * self.batch_size].tolist()
            )
            seed = SeedSequence((self.seed, epoch, self.rank, i)).generate_state(1, "uint64")[0]
            indices.seed = int(seed) % 2**63
            yield indices
