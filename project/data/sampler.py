"""Which samples make which batch, on which rank, in which order."""

from collections.abc import Iterator

import torch
from torch.utils.data import Sampler


class EpochBatchSampler(Sampler[list[int]]):
    """Batches of sample indices whose order depends on nothing but (seed, epoch).

    With several ranks, batch i of all of them together holds the samples of batch i of one process with
    `num_ranks` times the batch size. In training (`drop_last`) every rank makes equally many full batches and the
    rest of the epoch's order is left out; otherwise the ranks' shares differ by one sample at most,
    and every sample comes once, without padding.

    Lightning sets the epoch through `.sampler.set_epoch`, so `.sampler` is this object itself.
    """

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        *,
        shuffle: bool = False,
        drop_last: bool = False,
        seed: int = 0,
        rank: int = 0,
        num_ranks: int = 1,
    ) -> None:
        self.num_samples = num_samples
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.seed = seed
        self.rank = rank
        self.num_ranks = num_ranks
        self.epoch = 0
        self.first_batch = 0
        """Where the next pass starts; set when a run resumes in the middle of an epoch, 0 again after that pass."""

    @property
    def sampler(self) -> "EpochBatchSampler":
        return self

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        if self.drop_last:
            return self.num_samples // (self.batch_size * self.num_ranks)
        share = len(range(self.rank, self.num_samples, self.num_ranks))
        return -(-share // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        first_batch, self.first_batch = self.first_batch, 0
        order = self._order()[self.rank :: self.num_ranks]
        for i in range(first_batch, len(self)):
            yield order[i * self.batch_size : (i + 1) * self.batch_size].tolist()

    def _order(self) -> torch.Tensor:
        """All sample indices in this epoch's order, (num_samples,)."""
        if not self.shuffle:
            return torch.arange(self.num_samples)
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + self.epoch) % 2**63)
        return torch.randperm(self.num_samples, generator=generator)
