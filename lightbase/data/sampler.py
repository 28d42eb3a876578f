"""The order of the samples: `EpochBatchSampler` chooses the indices of each batch."""

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DistributedSampler, SequentialSampler

LARGE = 10**7
"""From this number of samples on, the order is computed while it is used. In memory, it
would take 8 bytes a sample in each process, and seconds at the start of an epoch."""

CHUNK = 2**16  # positions that are computed together, at least one batch


def seeded_order(num: int, seed: int) -> Tensor:
    """Return the numbers from 0 to num - 1, int64, in an order that depends only on the
    seed. The CPU makes it, so it is the same with and without a GPU."""
    return torch.randperm(num, generator=torch.Generator().manual_seed(seed))


def permuted(positions: np.ndarray, num: int, seed: int) -> np.ndarray:
    """Return where a random permutation of the numbers from 0 to num - 1 has these
    positions, int64 (M,). It takes no memory for the permutation.

    The permutation is a Feistel network of 6 rounds (Luby and Rackoff, 1988) on pairs
    of digits to the base of the square root (Black and Rogaway, 2002). A result that is
    not below `num` goes through it again. With 3 rounds, a chi-square test finds
    patterns in small sets.
    """
    base = np.uint64(math.isqrt(num - 1) + 1)
    values = positions.astype("uint64")
    todo = np.arange(len(values))
    while len(todo):
        left, right = np.divmod(values[todo], base)
        for key in round_keys(seed):
            left, right = right, (left + mixed(right + key)) % base
        values[todo] = left * base + right
        todo = todo[values[todo] >= num]
    return values.astype("int64")


@functools.lru_cache
def round_keys(seed: int) -> np.ndarray:
    return np.random.SeedSequence(seed).generate_state(6, "uint64")


@dataclass(frozen=True)
class PermutedPart:
    """A random part of the numbers from 0 to num - 1, without a list of them. It is
    used as a list is: with the positions int64 (M,) in brackets, it gives the numbers.

    Args:
        num: The number of all samples.
        seed: The seed of a permutation, see `permuted`.
        first, last: The part of the permutation, without `last`.
    """

    num: int
    seed: int
    first: int
    last: int

    def __len__(self) -> int:
        return self.last - self.first

    def __getitem__(self, positions: Tensor) -> Tensor:
        if len(positions) and not 0 <= positions.min() <= positions.max() < len(self):
            raise IndexError(f"a part of {len(self)} samples has no such position")
        numbers = permuted(positions.numpy() + self.first, self.num, self.seed)
        return torch.from_numpy(numbers)


def mixed(values: np.ndarray) -> np.ndarray:
    """Return a hash of each number, below 2**63: multiplications and shifts in the
    manner of SplitMix64 (Steele, Lea and Flood, 2014)."""
    values = values * np.uint64(0x9E3779B97F4A7C15)
    values ^= values >> np.uint64(32)
    values *= np.uint64(0xD6E8FEB86659FD93)
    return (values ^ (values >> np.uint64(32))) >> np.uint64(1)


def seed_of(key: tuple[int, ...]) -> int:
    """Return a seed in [0, 2**63) that depends on all numbers of the key."""
    sequence = np.random.SeedSequence(key)
    return int(sequence.generate_state(1, "uint64")[0]) % 2**63


class Indices(list[int]):
    """The indices of the samples in a batch.

    key: The seed of the run, the epoch, the rank and the number of the batch.
    """

    key: tuple[int, ...]

    @property
    def seed(self) -> int:
        """The seed of the random transforms of this batch, in [0, 2**63)."""
        return seed_of(self.key)


@dataclass(eq=False)
class EpochBatchSampler(DistributedSampler[Any], SequentialSampler):
    """Yields the indices of each batch of this process.

    With `shuffle` the order of the samples depends only on `seed` and the epoch.
    Without it the order and the seeds of the batches are the same in every epoch.

    Rank r gets the samples r, r + num_ranks, r + 2 num_ranks, ... of the order. So
    batch i of all ranks together has the same samples as batch i of one process with
    `num_ranks` times the batch size. No sample comes twice in an epoch, unlike with
    torch's DistributedSampler, which repeats some to make the ranks equal.

    Lightning looks at the base classes: it would otherwise replace this sampler, by a
    DistributedSampler, or for `overfit_batches` by a SequentialSampler. The Trainer's
    flag `use_distributed_sampler` would also concern other loaders of the data.

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
        weights: Draw the order with replacement, by these weights, float64
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
        self.is_large = self.num_samples >= LARGE

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass, as Lightning does before each epoch."""
        if epoch != self.epoch:
            # `first_batch` is for an epoch that Lightning does not continue, for
            # example because `limit_train_batches` had ended it
            self.first_batch = 0
        self.epoch = epoch

    def __len__(self) -> int:
        return -(-self.num_on_rank // self.batch_size)  # rounded up

    def __iter__(self) -> Iterator[Indices]:  # type: ignore[override]
        """Yield the indices of the batches of an epoch, from `first_batch` on. The pass
        after it begins at batch 0 again."""
        first_batch = self.first_batch
        self.first_batch = 0
        epoch = 0  # without shuffle, all epochs have the same seeds
        if self.shuffle:
            epoch = self.epoch
        order = self._order((self.seed * 1_000_003 + epoch) % 2**63)
        num_at_once = max(1, CHUNK // self.batch_size)
        for first in range(first_batch, len(self), num_at_once):
            end = min((first + num_at_once) * self.batch_size, self.num_on_rank)
            positions = np.arange(first * self.batch_size, end)
            chosen = order(positions * self.num_ranks + self.rank).tolist()
            for i in range(-(-len(chosen) // self.batch_size)):
                part = slice(i * self.batch_size, (i + 1) * self.batch_size)
                indices = Indices(chosen[part])
                indices.key = (self.seed, epoch, self.rank, first + i)
                yield indices

    def _order(self, seed: int) -> Callable[[np.ndarray], np.ndarray]:
        """Return a function that returns the samples at these positions of the order of
        all ranks, int64 (M,)."""
        if self.weights is not None:
            generator = torch.Generator().manual_seed(seed)
            num = self.num_samples
            order = self.weights.multinomial(num, True, generator=generator)
        elif not self.shuffle:
            return np.copy
        elif self.is_large:
            return functools.partial(permuted, num=self.num_samples, seed=seed)
        else:
            order = seeded_order(self.num_samples, seed)
        return order.numpy().__getitem__
