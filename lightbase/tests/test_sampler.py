import pickle
from itertools import chain
from typing import Any

import pytest

from lightbase.core.batches import EpochBatchSampler


def epoch(sampler: EpochBatchSampler, number: int = 0) -> list[list[int]]:
    sampler.set_epoch(number)
    return list(sampler)


@pytest.mark.parametrize(("num_samples", "batch_size"), [(103, 10), (7, 10), (1, 1)])
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_evaluation_sees_every_sample_once_whatever_the_ranks(
    num_samples, batch_size, num_ranks
):
    samplers = [
        EpochBatchSampler(num_samples, batch_size, rank=r, num_ranks=num_ranks)
        for r in range(num_ranks)
    ]
    batches = [epoch(sampler) for sampler in samplers]
    assert sorted(chain(*chain(*batches))) == list(range(num_samples))
    assert [len(b) for b in batches] == [len(sampler) for sampler in samplers]


@pytest.mark.parametrize(("num_samples", "batch_size"), [(103, 8), (7, 3)])
@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("drop_last", [False, True])
def test_training_gives_all_ranks_batches_of_the_same_sizes_and_no_sample_twice(
    num_samples, batch_size, num_ranks, drop_last
):
    options: Any = {
        "shuffle": True,
        "even": True,
        "drop_last": drop_last,
        "num_ranks": num_ranks,
    }
    samplers = [
        EpochBatchSampler(num_samples, batch_size, rank=rank, **options)
        for rank in range(num_ranks)
    ]
    batches = [epoch(sampler, 1) for sampler in samplers]
    sizes = [[len(batch) for batch in of_rank] for of_rank in batches]
    assert all(of_rank == sizes[0] for of_rank in sizes)
    seen = list(chain(*chain(*batches)))
    assert len(seen) == len(set(seen))
    if drop_last:
        assert sizes[0] == [batch_size] * (num_samples // (batch_size * num_ranks))
    else:
        assert len(seen) == num_samples // num_ranks * num_ranks


def test_the_ranks_together_make_the_batches_of_one_process() -> None:
    one = epoch(EpochBatchSampler(100, 20, shuffle=True, drop_last=True, seed=1))
    two = [
        epoch(
            EpochBatchSampler(
                100, 10, shuffle=True, drop_last=True, seed=1, rank=r, num_ranks=2
            )
        )
        for r in range(2)
    ]
    assert [sorted(batch) for batch in one] == [
        sorted(a + b) for a, b in zip(*two, strict=True)
    ]


def test_the_order_depends_on_seed_and_epoch_alone() -> None:
    def order(seed: int, number: int) -> list[list[int]]:
        return epoch(EpochBatchSampler(50, 5, shuffle=True, seed=seed), number)

    assert order(1, 0) == order(1, 0)
    assert (
        len({str(order(seed, number)) for seed in (0, 1, 2) for number in (0, 1, 2)})
        == 9
    )


def test_several_batches_at_once_are_the_same_batches() -> None:
    single = epoch(EpochBatchSampler(53, 5, shuffle=True, seed=1))
    sampler = EpochBatchSampler(53, 5, shuffle=True, seed=1, batches_at_once=4)
    assert [len(chunk) for chunk in epoch(sampler)] == [20, 20, 13]
    assert list(chain(*epoch(sampler))) == list(chain(*single))
    assert len(sampler) == 11
    sampler.first_batch = 6
    assert list(chain(*epoch(sampler))) == list(chain(*single[6:]))


def test_each_batch_has_its_own_seed_whatever_was_read_before() -> None:
    def seeds(number: int = 0, first_batch: int = 0, **options: Any) -> list[int]:
        sampler = EpochBatchSampler(50, 5, **{"shuffle": True, **options})
        sampler.set_epoch(number)
        sampler.first_batch = first_batch
        return [pickle.loads(pickle.dumps(indices)).seed for indices in sampler]

    epoch_0 = seeds()
    assert seeds(first_batch=4) == epoch_0[4:]
    others = [*seeds(number=1), *seeds(seed=1), *seeds(num_ranks=2, rank=1)]
    assert len({*epoch_0, *others}) == 10 + 10 + 10 + 5
    assert seeds(shuffle=False) == seeds(shuffle=False, number=1)
