import tracemalloc
from itertools import chain

import numpy as np
import pytest
import torch
from attached import attach, inputs_of
from given import Given
from torch.utils.data import Dataset

from lightbase.config.errors import UserError
from lightbase.data import module as module_file
from lightbase.data import sampler as sampler_file
from lightbase.data.loader import ResumableLoader
from lightbase.data.sampler import EpochBatchSampler, permuted


def batches(num, size, epoch=0, num_ranks=1, **options):
    """The batches of an epoch, for each rank."""
    of_ranks = []
    for rank in range(num_ranks):
        sampler = EpochBatchSampler(
            num, size, rank=rank, num_ranks=num_ranks, **options
        )
        sampler.set_epoch(epoch)
        of_ranks.append(list(sampler))
        assert len(sampler) == len(of_ranks[rank])
    return of_ranks


@pytest.mark.parametrize(
    ("num", "size", "num_ranks"), [(103, 10, 3), (7, 10, 1), (1, 1, 3)]
)
def test_evaluation_sees_every_sample_once_whatever_the_ranks(num, size, num_ranks):
    of_ranks = batches(num, size, num_ranks=num_ranks)
    assert sorted(chain(*chain(*of_ranks))) == list(range(num))


@pytest.mark.parametrize(
    ("drop_last", "sizes"), [(True, [8] * 4), (False, [8] * 4 + [2])]
)
def test_training_gives_all_ranks_batches_of_the_same_sizes_and_no_sample_twice(
    drop_last, sizes
):
    of_ranks = batches(103, 8, 1, 3, shuffle=True, even=True, drop_last=drop_last)
    for of_rank in of_ranks:
        assert [len(batch) for batch in of_rank] == sizes
    assert len(set(chain(*chain(*of_ranks)))) == 3 * sum(sizes)


def test_the_ranks_together_make_the_batches_of_one_process():
    options = {"shuffle": True, "drop_last": True, "seed": 1}
    (one,) = batches(100, 20, **options)
    first, second = batches(100, 10, num_ranks=2, **options)
    together = [sorted(a + b) for a, b in zip(first, second, strict=True)]
    assert together == [sorted(batch) for batch in one]


def test_each_batch_has_its_own_seed_whatever_was_read_before():
    def seeds(epoch=0, **options):
        of_ranks = batches(50, 5, epoch, **options)
        return [indices.seed for indices in chain(*of_ranks)]

    sampler = EpochBatchSampler(50, 5, shuffle=True)
    sampler.first_batch = 4
    first = seeds(shuffle=True)
    assert [indices.seed for indices in sampler] == first[4:]
    others = seeds(1, shuffle=True) + seeds(seed=1) + seeds(num_ranks=2, seed=2)
    assert len({*first, *others}) == 40
    assert seeds() == seeds(1)


@pytest.mark.parametrize("num", [1, 2, 3, 100, 1000, 4097])
def test_a_permutation_that_is_computed_has_each_number_once(num):
    assert sorted(permuted(np.arange(num), num, seed=num)) == [*range(num)]


def test_its_numbers_are_uniform_over_seeds():
    num, num_seeds = 50, 2000
    counts = np.zeros((num, num))
    for seed in range(num_seeds):
        counts[np.arange(num), permuted(np.arange(num), num, seed)] += 1
    mean = num_seeds / num
    chi_square = ((counts - mean) ** 2 / mean).sum()
    freedom = (num - 1) ** 2
    assert abs(chi_square - freedom) < 4 * (2 * freedom) ** 0.5


def test_a_large_set_is_divided_among_ranks_and_resumes_within_an_epoch(monkeypatch):
    in_memory = batches(103, 8, shuffle=True)
    monkeypatch.setattr(sampler_file, "LARGE", 100)
    monkeypatch.setattr(sampler_file, "CHUNK", 17)
    of_ranks = batches(103, 8, 1, 3, shuffle=True)
    assert sorted(chain(*chain(*of_ranks))) == list(range(103))
    assert of_ranks != batches(103, 8, 2, 3, shuffle=True)
    assert batches(103, 8, shuffle=True) != in_memory

    def loader():
        sampler = EpochBatchSampler(103, 8, shuffle=True)
        return ResumableLoader(range(103), sampler, collate_fn=list)

    whole = [*loader()]
    started, again, old = loader(), loader(), loader()
    passed = iter(started)
    assert [next(passed) for _ in range(5)] == whole[:5]
    state = started.state_dict()
    again.load_state_dict(state)
    assert [*again] == whole[5:]
    # version 0.4.0 had the orders of large sets in memory
    del state["is_large"]
    old.load_state_dict(state)
    assert [*old] == in_memory[0][5:]


def test_a_billion_samples_take_no_memory():
    sampler = EpochBatchSampler(10**9, 256, shuffle=True, num_ranks=2)
    first = next(iter(sampler))
    assert len({*first}) == 256
    assert max(first) > 5e8


class Numbers(Dataset):
    """The numbers from 0 to num - 1, also as targets."""

    def __init__(self, num):
        self.num = num

    def __len__(self):
        return self.num

    def __getitem__(self, index):
        return torch.tensor([index]), index


def test_the_validation_part_of_a_billion_samples_takes_no_memory():
    tracemalloc.start()
    data = attach(Given(Numbers(10**9), Numbers(10), val_fraction=0.001))
    inputs, _ = next(iter(data.train_dataloader()))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 20e6
    assert [len(data.splits[name]) for name in ("train", "val")] == [999e6, 1e6]
    assert len({*inputs.flatten().tolist()}) == 8


def test_parts_that_are_computed_share_no_sample(monkeypatch):
    def parts(seed, data=None):
        if data is None:
            data = Given(Numbers(1000), Numbers(10), split_seed=seed)
        attach(data)
        loaders = data.val_dataloader(), data.train_dataloader()
        return [chain(*inputs_of(loader)) for loader in loaders]

    def numbers(seed, data=None):
        return [{*part} for part in parts(seed, data)]

    listed = numbers(1)
    state = attach(Given(Numbers(1000), Numbers(10), split_seed=1)).state_dict()
    monkeypatch.setattr(module_file, "LARGE", 1000)
    val, train = numbers(1)
    assert (len(val), len(train)) == (200, 800)
    assert val | train == {*range(1000)}
    assert numbers(1) == [val, train]
    assert val not in (numbers(2)[0], listed[0])
    # version 0.4 had lists
    del state["lists_parts"]
    old = Given(Numbers(1000), Numbers(10), split_seed=1)
    old.load_state_dict(state)
    assert numbers(1, old) == listed
    assert old.state_dict()["lists_parts"]


def test_a_computed_part_ends_and_takes_sample_weights(monkeypatch):
    monkeypatch.setattr(module_file, "LARGE", 100)
    data = Given(Numbers(100), Numbers(10))
    data.sample_weights = lambda split: torch.arange(100.0)
    attach(data)
    seen = [int(inputs) for inputs, _ in data.splits["val"]]
    assert len({*seen}) == len(seen) == 20
    train = [int(inputs) for inputs, _ in data.splits["train"]]
    assert data.train_weights.tolist() == train
    with pytest.raises(IndexError):
        data.splits["val"][-1]


def test_a_resume_with_another_seed_of_the_computed_part_is_refused(monkeypatch):
    monkeypatch.setattr(module_file, "LARGE", 1000)
    state = attach(Given(Numbers(1000), Numbers(10), split_seed=1)).state_dict()
    other = Given(Numbers(1000), Numbers(10), split_seed=2)
    other.load_state_dict(state)
    with pytest.raises(UserError, match="other chosen val samples"):
        attach(other)
