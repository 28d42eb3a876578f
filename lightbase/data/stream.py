"""The samples of an IterableDataset, and the loader that resumes within an epoch.

`StreamSamples.__iter__` runs in each worker process. It yields whole batches, each with
the position behind it. `StreamLoader` keeps the positions of all workers, and a
checkpoint has those of all ranks.
"""

import copy
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count, islice
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from lightbase.compat import has_shuffle_buffer, no_worker
from lightbase.config.errors import UserError
from lightbase.config.files import Values
from lightbase.data.loader import end_by_parent_only, seeded, share_from_worker
from lightbase.data.sampler import seed_of
from lightbase.data.splits import bytes_of
from lightbase.data.tensors import Batch, convert_types

NUM_STATES = 4
"""States that a loader keeps: Lightning may ask for a batch before it has trained the
one before."""

BEGINNING = (0, 0, None)
"""Where a worker begins: the number of its block, the samples of it that are done, and
the state of the stream before the block."""


def state_of(stream: Any) -> Any:
    """Return a copy of the state of a stream, or None if it has none."""
    if not hasattr(stream, "state_dict"):
        return None
    return copy.deepcopy(stream.state_dict())


@dataclass(eq=False)
class StreamSamples(IterableDataset[Any]):
    """A stream as batches. Each worker of each rank has a share of the stream.

    If the stream has `shard(num_shards, index)`, and its `num_shards` is a multiple of
    the number of workers of all ranks, a worker gets as many shards as the others.
    Otherwise each worker reads the whole stream, and takes every n-th sample.

    Args:
        stream: An IterableDataset. With `state_dict` and `load_state_dict` it can
            continue; otherwise a resume reads the samples before once more.
        first_state: `state_of` the stream before its first sample.
        collate: Makes a batch of a list of samples.
        batch_size: Samples in a batch.
        shuffle: Whether every epoch has a new order and other random transforms.
        block_size: Samples that a worker reads together and shuffles, rounded up to
            whole batches. 1 keeps the order.
        drop_last: Leave out the last batch of a worker if it is smaller.
        seed: The seed of the order in the blocks, and of random transforms.
        rank, num_ranks: This process, and the number of processes.
    """

    stream: Any
    first_state: Any
    collate: Callable[[list], Any]
    batch_size: int = 1
    shuffle: bool = False
    block_size: int = 1
    drop_last: bool = False
    seed: int = 0
    rank: int = 0
    num_ranks: int = 1
    start: Values = field(default_factory=dict)  # where the next pass begins
    targets = None

    @property
    def epoch(self) -> int:
        return self.start.get("epoch", 0) if self.shuffle else 0

    @property
    def has_state(self) -> bool:
        return hasattr(self.stream, "state_dict")

    def __getitems__(self, indices: list[int]) -> Any:
        """Return the first samples of the stream as a batch, at most as many as there
        are indices."""
        with seeded(0):
            return convert_types(self.collate(self.read(len(indices))))

    def read(self, num: int) -> list:
        """Return the first samples. Raise UserError if there are none."""
        first = [*islice(self.open_share(0, 1, None)[1], num)]
        if not first:
            raise UserError("a stream has no samples", status=2)
        return first

    def open_share(
        self, share: int, num_shares: int, state: Any
    ) -> tuple[Any, Iterator[Any]]:
        """Return a stream and the iterator of a share of its samples.

        state: The state of the stream after a sample of the share, or None.
        """
        stream, step = self.stream, num_shares
        num_shards = getattr(stream, "num_shards", 0)
        if num_shards and num_shards % num_shares == 0:
            stream, share, step = stream.shard(num_shares, share), 0, 1
        elif self.has_state:
            # it may stand anywhere, after a pass that was cut short
            stream.load_state_dict(copy.deepcopy(self.first_state))
        if hasattr(stream, "set_epoch"):
            stream.set_epoch(self.epoch)
        if state is not None:
            stream.load_state_dict(copy.deepcopy(state))
            share = step - 1
        return stream, islice(iter(stream), share, None, step)

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        """Yield each batch of this worker, and the position after it. Then yield None
        and the last position without an end: so the other workers keep their turns."""
        info = get_worker_info()
        number, num_workers = (info.id, info.num_workers) if info else (0, 1)
        # torch asks its worker 0 first, whichever is next
        worker = (self.start["turn"] + number) % num_workers
        share, num_shares = worker * self.num_ranks + self.rank, num_workers
        num_shares *= self.num_ranks
        position = self.start["workers"][worker]
        first_block, num_done, state = position
        size = -(-self.block_size // self.batch_size) * self.batch_size
        key = (self.seed, self.epoch)
        with no_worker():
            stream, samples = self.open_share(share, num_shares, state)
        for block in count(first_block if self.has_state else 0):
            if block > first_block:
                state = state_of(stream)
            # a stream may draw its order when it begins: the same for all shares
            words = (*key, share, block) if block else key
            with seeded(seed_of(words)), no_worker():
                read = [*islice(samples, size)]
            if self.block_size > 1:
                random.Random(seed_of((*key, share, block, 0))).shuffle(read)
            first = num_done if block == first_block else 0
            if block < first_block:  # without a state the stream is read once more
                first = size
            for i in range(first, len(read), self.batch_size):
                end = i + self.batch_size
                if end <= len(read) or not self.drop_last:
                    with seeded(seed_of((*key, share, block, end))):
                        batch = convert_types(self.collate(read[i:end]))
                    position = (block, end, state)
                    yield batch, position
            if len(read) < size:
                break
        while True:
            yield None, position


class StreamLoader(DataLoader[Any]):
    """A loader of a stream that can resume within an epoch.

    Args:
        samples: The stream.
        position: Returns the number of the epoch, and of the batches that are trained
            in it. Lightning asks for batches before it trains them.
        even: End the pass on all ranks when one has no batch left.
        options: Other arguments of DataLoader, such as num_workers.
    """

    dataset: StreamSamples

    def __init__(
        self,
        samples: StreamSamples,
        position: Callable[[], tuple[int, int]],
        even: bool,
        **options: Any,
    ) -> None:
        super().__init__(
            samples,
            batch_size=None,
            collate_fn=share_from_worker,
            generator=torch.Generator(),
            worker_init_fn=end_by_parent_only,
            **options,
        )
        self.position = position
        self.even = even and samples.num_ranks > 1
        self.resumed: Values = {}
        self.states: dict[int, Values] = {}  # after the newest batches, by their number
        self.group: Any = None

    # torch's annotation names its iterator class
    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]
        """Yield the batches of an epoch, or the rest of it after a resume. The workers
        take turns."""
        num_workers = max(1, self.num_workers)
        epoch, _ = self.position()
        beginning: Values = {"epoch": epoch, "num_batches": 0, "turn": 0}
        state = self.resumed or beginning | {"workers": [BEGINNING] * num_workers}
        self.resumed = {}
        self.dataset.start = state
        self.states = {state["num_batches"]: state}
        results = super().__iter__()
        while True:
            turn, workers = state["turn"], [*state["workers"]]
            for _ in range(num_workers):  # those that have ended give None
                batch, workers[turn] = next(results)
                turn = (turn + 1) % num_workers
                if batch is not None:
                    break
            if not self.all_have(batch is not None):
                return
            number = state["num_batches"] + 1
            state = state | {"num_batches": number, "turn": turn, "workers": workers}
            self.states[number] = state
            self.states.pop(number - NUM_STATES, None)
            yield batch

    def all_have(self, has_batch: bool) -> bool:
        """Return whether this rank, or with `even` each rank, has a batch."""
        if not self.even:
            return has_batch
        if self.group is None:
            self.group = dist.new_group(backend="gloo")  # nothing waits for a GPU
        flag = torch.tensor(int(has_batch))
        dist.all_reduce(flag, dist.ReduceOp.MIN, group=self.group)
        return bool(flag)

    def state_dict(self) -> Values:
        """Return the states of all ranks. All ranks call this."""
        _, num_batches = self.position()
        states = [self.states.get(num_batches, {})]
        if self.even:
            states *= self.dataset.num_ranks
            dist.all_gather_object(states, states[0], group=self.group)
        return {"ranks": states}

    def load_state_dict(self, state: Values) -> None:
        """Let the next pass continue where `state_dict` was called, if its epoch is not
        over. Raise UserError if the shares are others now."""
        epoch, _ = self.position()
        ranks = state["ranks"]
        if ranks[0].get("epoch") != epoch:
            return
        workers = ranks[0]["workers"]
        num_ranks, num_workers = self.dataset.num_ranks, max(1, self.num_workers)
        if (len(ranks), len(workers)) != (num_ranks, num_workers):
            raise UserError(
                "data.num_workers: the checkpoint is within an epoch of a stream, read "
                f"by processes: {len(ranks)}, workers of each: {len(workers)}",
                "resume with as many, or from the end of an epoch",
                2,
            )
        self.resumed = ranks[self.dataset.rank]


def check_stream(samples: StreamSamples, name: str) -> None:
    """Raise UserError if a second pass over a stream begins with other samples, or if
    its state does not lead to the next sample: a resume would leave samples out.

    Two samples are read twice. name: The text with which the message begins.
    """

    def content(read: list) -> bytes:
        return b"".join(bytes_of(samples.collate([sample])) for sample in read)

    with seeded(0):
        first = content(samples.read(2))
    with seeded(0):
        stream, rest = samples.open_share(0, 1, None)
        again = [*islice(rest, 1)]
        if samples.has_state:
            _, rest = samples.open_share(0, 1, state_of(stream))
        again += islice(rest, 1)
        is_same = first == content(again)
    if has_shuffle_buffer(samples.stream) or not is_same:
        raise UserError(
            f"{name}: a second pass begins with other samples, or the state leads to "
            "another one: a shuffle without a seed, or a buffer that is not in the "
            "state?",
            "leave the shuffle of samples out: `shuffle_block` of the data module "
            "shuffles them",
            2,
        )
