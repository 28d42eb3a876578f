"""Which samples make which batch, on which rank, in which order."""

from collections.abc import Iterable, Iterator

import torch
from numpy.random import SeedSequence
from torch.utils.data import Sampler


class Indices(list[int]):
    """Indices of the samples of a batch.

    seed: For what is drawn at random when they are read, in [0, 2**63).
    """

    def __init__(self, indices: Iterable[int], seed: int) -> None:
        super().__init__(indices)
        self.seed = seed


class EpochBatchSampler(Sampler[Indices]):
    """Batches of sample indices. Their order and their own seeds depend on nothing but (seed, epoch), and not on the
    epoch either without `shuffle`: an evaluation is the same every time.

    With several ranks, batch i of all of them together holds the samples of batch i of one process with
    `num_ranks` times the batch size. In an evaluation the ranks' shares differ by one sample at most, and every
    sample comes once, without padding. In training every rank must make equally many steps, so the end of the
    epoch's order is left out.

    Lightning sets the epoch through `.sampler.set_epoch`, so `.sampler` is this object itself.

    Args:
        num_samples: Samples of the data set, at least `num_ranks`.
        batch_size: Samples a batch, on each rank.
        shuffle: A new order every epoch, or the data set's own.
        even: Equal shares: leave out the last `num_samples % num_ranks` samples of the order.
        drop_last: Full batches only: leave out what is less than a batch on each rank. Goes with `even`.
        seed: Of the order, and of the batches' seeds.
        rank: This process, in [0, num_ranks).
        num_ranks: Processes that share the samples.
        batches_at_once: Yield the indices of so many batches together, fewer at the end of an epoch. `len()` and
            `first_batch` count batches all the same.
    """

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        *,
        shuffle: bool = False,
        even: bool = False,
        drop_last: bool = False,
        seed: int = 0,
        rank: int = 0,
        num_ranks: int = 1,
        batches_at_once: int = 1,
    ) -> None:
        self.num_samples = num_samples
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.seed = seed
        self.rank = rank
        self.num_ranks = num_ranks
        even = even or drop_last
        self.share = num_samples // num_ranks if even else len(range(rank, num_samples, num_ranks))
        """Samples of this rank in an epoch, before `drop_last`."""
        self.num_batches = self.share // batch_size if drop_last else -(-self.share // batch_size)
        self.batches_at_once = batches_at_once
        self.epoch = 0
        self.first_batch = 0
        """Where the next pass starts; set when a run resumes in the middle of an epoch, 0 again after that pass."""

    @property
    def sampler(self) -> "EpochBatchSampler":
        return self

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.num_batches

    def __iter__(self) -> Iterator[Indices]:
        first_batch, self.first_batch = self.first_batch, 0
        order = self._order()[self.rank :: self.num_ranks][: self.share]
        order = order[: self.num_batches * self.batch_size]
        epoch = self.epoch if self.shuffle else 0
        for i in range(first_batch, self.num_batches, self.batches_at_once):
            chosen = order[i * self.batch_size : (i + self.batches_at_once) * self.batch_size]
            seed = SeedSequence((self.seed, epoch, self.rank, i)).generate_state(1, "uint64")[0]
            yield Indices(chosen.tolist(), int(seed) % 2**63)

    def _order(self) -> torch.Tensor:
        """All sample indices in this epoch's order, (num_samples,)."""
        if not self.shuffle:
            return torch.arange(self.num_samples)
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + self.epoch) % 2**63)
        return torch.randperm(self.num_samples, generator=generator)
