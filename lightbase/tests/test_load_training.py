"""load(split, training): random transforms for training samples only. And
`sample_weights`: how often each training sample is drawn."""

import random
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attached import attach, inputs_of, read
from example.data.synthetic import SyntheticImages
from given import Given
from torch.utils.data import Dataset
from written import checkpoint, equal, weights

from lightbase import BaseDataModule, EpochBatchSampler, UserError

ME = "test_load_training"


class Numbers(Dataset[Any]):
    """A sample is (number, training). The numbers of the test set begin at 100."""

    def __init__(self, first: int, num: int, training: bool) -> None:
        self.first, self.num, self.training = first, num, training

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(self.first + index), torch.tensor(self.training)


class Asked(BaseDataModule):
    """60 training samples. `calls` has the arguments of `load`."""

    as_arrays = False
    num_missing = 0

    def load(self, split: str, training: bool) -> Any:  # type: ignore[override]
        self.calls = [*getattr(self, "calls", []), (split, training)]
        first, num = {"train": (0, 60), "val": (80, 9), "test": (100, 20)}[split]
        samples = Numbers(first, num - self.num_missing * training, training)
        if self.as_arrays:
            return torch.arange(first, first + num), torch.full((num,), training)
        return samples


def seen(loader: Any) -> tuple[list[int], set[int]]:
    """Return the numbers, sorted, and for what they were loaded: {1} is training."""
    numbers, training = zip(*loader, strict=True)
    return sorted(torch.cat(numbers).tolist()), set(torch.cat(training).tolist())


@pytest.mark.parametrize(
    ("as_arrays", "own_splits", "options", "sizes"),
    [
        (False, ("train", "test"), {}, [54, 6, 20]),
        (True, ("train", "val", "test"), {}, [60, 9, 20]),
        (True, ("train", "test"), {"val_fraction": 0.0}, [60, 20, 20]),
        (False, ("train",), {"num_folds": 3, "fold": 1}, [36, 4, 20]),
    ],
)
def test_only_the_training_has_the_transforms_of_training(
    as_arrays, own_splits, options, sizes
):
    data = Asked(batch_size=4, drop_last=False, **options)
    data.as_arrays, data.own_splits = as_arrays, own_splits
    attach(data)
    data.setup("test")
    train, is_training = seen(data.train_dataloader())
    assert is_training == {1}
    held_out = []
    for loader in (data.val_dataloader(), data.test_dataloader()):
        numbers, is_training = seen(loader)
        assert is_training == {0}
        held_out.append(numbers)
    assert [len(train), *map(len, held_out)] == sizes
    assert seen(data.predict_dataloader("train")) == (train, {0})
    assert not {*train} & {*chain(*held_out)}
    assert {*range(60)} <= {*train, *chain(*held_out)}
    assert data.calls.count(("train", True)) == data.calls.count(("train", False)) == 1


def test_the_samples_of_the_parts_do_not_depend_on_the_argument() -> None:
    options: Any = {"num_folds": 4, "fold": 2, "val_fraction": 0.2, "batch_size": 8}
    plain = attach(Given(Numbers(0, 60, False), **options))
    asked = attach(Asked(**options))
    for name in ("val", "test"):
        loaders = [getattr(data, f"{name}_dataloader")() for data in (plain, asked)]
        assert seen(loaders[0]) == seen(loaders[1])
    asked.train_dataloader().batch_sampler.set_epoch(3)
    orders = [[*data.train_dataloader().batch_sampler] for data in (plain, asked)]
    assert orders[0] == orders[1]


def test_an_evaluation_does_not_ask_for_training_samples() -> None:
    data = attach(Asked(), "test")
    assert data.calls == [("test", False)]


def test_two_loads_of_different_lengths_are_refused() -> None:
    data = Asked()
    data.num_missing = 7
    with pytest.raises(UserError, match="53 samples with training, and 60 without\n"):
        attach(data)


class Weighted(Given):
    """Samples that are their numbers. The weight of an odd one is 3, of an even one 1,
    and of each third one 0."""

    def __init__(self, **options: Any) -> None:
        super().__init__((torch.arange(60), torch.arange(60) % 2), **options)
        numbers, odd = self.loaded["train"]
        self.given: Any = (1 + 2 * odd) * (numbers % 3 > 0)

    def sample_weights(self, split: str) -> Any:
        assert split == "train"
        return self.given


@pytest.mark.parametrize("options", [{}, {"num_folds": 3, "fold": 0}])
def test_the_weights_are_of_the_samples_that_are_left_for_training(options):
    data = attach(Weighted(drop_last=False, **options))
    loader = data.train_dataloader()
    drawn: list[int] = []
    for epoch in range(20):
        loader.batch_sampler.set_epoch(epoch)
        drawn += inputs_of(loader)
    left = data.splits["train"].values[0].tolist()
    assert len(drawn) == 20 * len(left)
    assert {*drawn} == {number for number in left if number % 3}
    # an odd one is drawn three times as often
    weights = [1 + 2 * (number % 2) for number in left if number % 3]
    expected = 3 * weights.count(3) / sum(weights)
    odd = sum(number % 2 for number in drawn) / len(drawn)
    assert odd == pytest.approx(expected, abs=4 * (0.25 / len(drawn)) ** 0.5)
    numbers = inputs_of(data.val_dataloader())
    assert numbers == sorted({*numbers})
    assert any(number % 3 == 0 for number in numbers)


class Rare(SyntheticImages):
    def sample_weights(self, split: str) -> Any:
        _, labels = self.load("train")
        return 1 / (1 + labels)


def test_a_weighted_training_goes_on_exactly(train, tmp_path: Path, capsys) -> None:
    flags = f"--data {ME}.Rare --trainer.max_epochs 3 --seed_everything 5"
    result = train(flags, "--name through")
    plain = train("--trainer.max_epochs 3 --seed_everything 5 --name plain")
    assert result["steps"] == plain["steps"]
    train(flags, "--trainer.max_steps 25")  # ends within the second epoch
    resumed = train("--ckpt_path last --trainer.max_steps -1")
    through, again, other = (
        tmp_path / name / "version_0" for name in ("through", "tiny", "plain")
    )
    assert equal(weights(through), weights(again))
    assert not equal(weights(through), weights(other))
    assert resumed["test/loss"] == result["test/loss"]
    assert checkpoint(again)["global_step"] == result["steps"]


# the draws


def draws(size: int, epoch: int = 0, num_ranks: int = 1, **options: Any) -> list[Any]:
    """The batches of each rank. The weights of the 10,000 samples are 0 to 9."""
    of_ranks = []
    for rank in range(num_ranks):
        sampler = EpochBatchSampler(
            10_000,
            size,
            seed=3,
            rank=rank,
            num_ranks=num_ranks,
            weights=torch.arange(10_000, dtype=torch.float64) % 10,
            **options,
        )
        sampler.set_epoch(epoch)
        of_ranks.append([[*batch] for batch in sampler])
    return of_ranks


def test_ten_thousand_draws_agree_with_the_weights() -> None:
    for epoch in range(3):
        (batches,) = draws(100, epoch, shuffle=True)
        drawn = torch.tensor([*chain(*batches)])
        counts = (drawn % 10).bincount(minlength=10)
        assert counts[0] == 0
        expected = 10_000 * torch.arange(10) / 45
        chi_square = ((counts - expected)[1:] ** 2 / expected[1:]).sum()
        assert 0.5 < chi_square < 33  # 8 degrees of freedom: each side 1 in 10,000
        # among samples of one weight, each is as likely as another
        assert 500 < len({*drawn.tolist()}) < 9000


def test_the_ranks_share_one_draw_and_a_resume_repeats_it() -> None:
    options: Any = {"shuffle": True, "drop_last": True}
    (one,) = draws(96, 1, **options)
    first, second = draws(48, 1, 2, **options)
    together = [sorted(a + b) for a, b in zip(first, second, strict=True)]
    assert together == [sorted(batch) for batch in one]
    assert draws(96, 1, **options) == [one]
    assert draws(96, 2, **options) != [one]
    # overfit_batches repeats the draws of one epoch
    assert draws(96, 1) == draws(96, 2)


class Transform:
    """Draws from generators of its own, one of each kind."""

    def __init__(self) -> None:
        self.of_torch = torch.Generator().manual_seed(0)
        self.others = [np.random.default_rng(0), np.random.RandomState(0)]
        self.of_python = {"random": random.Random(0)}

    def __call__(self) -> Any:
        return torch.tensor(
            [
                torch.rand((), generator=self.of_torch).item(),
                *(x.random(1).item() for x in self.others),  # type: ignore[attr-defined]
                self.of_python["random"].random(),
            ],
            dtype=torch.float64,
        )


class Drawing(Dataset[Any]):
    def __init__(self) -> None:
        self.transforms = [Transform()]

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        return self.transforms[0](), index


@pytest.mark.linux
def test_generators_of_a_transform_draw_other_numbers_in_each_worker_and_epoch():
    """A worker has a copy of them: without seeds there were 24 draws of 48."""
    draws = {}
    for num_workers in (0, 2):
        samples = Drawing()
        options = {"num_workers": num_workers, "persistent_workers": False}
        data = Given(samples, val_fraction=0.0, batch_size=4, **options)
        loader = attach(data).train_dataloader()
        epochs = []
        for epoch in range(2):
            loader.batch_sampler.set_epoch(epoch)
            epochs.append(torch.cat([inputs for inputs, _ in read(loader)]))
        draws[num_workers] = torch.cat(epochs)
        # in this process they are the user's own again
        assert samples.transforms[0]().equal(Transform()())
    for column in draws[2].T.tolist():
        assert len({*column}) == 48
    assert draws[0].equal(draws[2])
