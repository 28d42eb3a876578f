"""Splits in order of time, windows of series, and targets that are standardised."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from attached import attach
from example.models.mlp import MLP
from example.regressor import Regressor
from given import Given
from lightning import seed_everything
from sklearn.model_selection import TimeSeriesSplit
from torch import nn

import lightbase
from lightbase import BaseDataModule, UserError, windows
from lightbase.commands.python import evaluated
from lightbase.data.loader import make_loader
from lightbase.data.module import in_units
from lightbase.data.sampler import EpochBatchSampler
from lightbase.watch.dry_run import load_data

NUMBERS = torch.arange(100)
DATES = np.datetime64("2026-01-01T00") + np.arange(100).astype("timedelta64[h]")
SHUFFLED = torch.randperm(100, generator=torch.Generator().manual_seed(0))


class Timed(Given):
    """Samples that are their own positions, with a time each."""

    def __init__(self, when: Any = None, **options: Any) -> None:
        options = {"val_split": "ordered", **options}
        super().__init__((NUMBERS, NUMBERS), (NUMBERS[:5], NUMBERS[:5]), **options)
        self.when = when

    def times(self, split: str) -> Any:
        assert split == "train"
        return self.when


def parts(data: Any) -> dict[str, list[int]]:
    return {name: x.values[0].tolist() for name, x in data.splits.items()}


def test_validation_is_the_last_part_in_the_order_of_load_or_of_times() -> None:
    by_order = parts(attach(Timed()))
    assert by_order == {"train": [*range(80)], "val": [*range(80, 100)]}
    for when in (
        SHUFFLED,
        SHUFFLED - 0.5,
        DATES[SHUFFLED],
        DATES[SHUFFLED].astype(str),
    ):
        found = parts(attach(Timed(when)))
        assert found["val"] == [i for i in range(100) if SHUFFLED[i] >= 80]
        assert found["train"] == [i for i in range(100) if SHUFFLED[i] < 80]
    texts = [str(date).replace("T", " ") for date in DATES]
    assert parts(attach(Timed(texts))) == by_order


def test_a_gap_is_left_out_and_equal_times_stay_together(capsys) -> None:
    assert parts(attach(Timed(gap=24)))["train"] == [*range(56)]
    assert parts(attach(Timed(10 * NUMBERS, gap=24)))["train"] == [*range(78)]
    data = attach(Timed(DATES, gap=24))
    assert parts(data)["train"] == [*range(56)]
    assert data.num_left_out == {"val": 24}
    days = DATES.astype("datetime64[D]")  # 4 whole days and 4 hours
    assert parts(attach(Timed(days)))["val"] == [*range(72, 100)]
    assert parts(attach(Timed(days, gap=24)))["train"] == [*range(48)]
    with pytest.raises(UserError, match="gap 3 needs"):
        Timed(gap=3, val_split="random")
    for wrong in (
        NUMBERS[1:],
        ["31.01.2026"] * 100,
        [*DATES[1:], np.datetime64("NaT")],
    ):
        with pytest.raises(UserError, match="the times of 100 samples of Timed"):
            attach(Timed(wrong))
    with pytest.raises(UserError, match="leaves no training samples"):
        attach(Timed(NUMBERS // 100))


@pytest.mark.parametrize("gap", [0, 3])
@pytest.mark.parametrize("when", [None, SHUFFLED])
def test_folds_walk_forward_as_those_of_scikit_learn(when: Any, gap: int) -> None:
    order = NUMBERS if when is None else when.argsort()
    splitter = TimeSeriesSplit(4, gap=gap).split(order)
    for fold, (train, test) in enumerate(splitter):
        found = parts(
            attach(Timed(when, gap=gap, num_folds=4, fold=fold, val_fraction=0))
        )
        assert found["test"] == sorted(order[test].tolist())
        assert found["train"] == sorted(order[train].tolist())
        with_val = parts(attach(Timed(when, gap=gap, num_folds=4, fold=fold)))
        val = order[train[-round(0.2 * len(train)) :]].tolist()
        older = train[: -round(0.2 * len(train)) - gap or None]
        assert with_val["val"] == sorted(val)
        assert with_val["train"] == sorted(order[older].tolist())


class Newest(BaseDataModule):
    """Data without a test set, with a time for each sample."""

    def load(self, split: str) -> Any:  # type: ignore[override]
        part = self.seeded_part(100, split, times=DATES[SHUFFLED])
        return NUMBERS[part], NUMBERS[part]


def test_the_newest_fifth_is_the_test_set() -> None:
    data = attach(Newest(val_split="ordered", gap=2))
    data.setup("test")
    times = {name: SHUFFLED[part].sort().values for name, part in parts(data).items()}
    assert times["test"].tolist() == [*range(80, 100)]
    assert times["val"].tolist() == [*range(70, 78)]
    assert times["train"].tolist() == [*range(68)]
    assert data.num_left_out == {"test": 2, "val": 2}
    random = attach(Newest())
    random.setup("test")
    assert len(random.splits["test"]) == 20 != parts(random)["test"] != times["test"]
    fold = attach(Newest(val_split="ordered", num_folds=4, fold=3))
    assert sorted(SHUFFLED[parts(fold)["test"]].tolist()) == [*range(80, 100)]


LENGTHS = (140, 7, 190, 30, 161)


class Sensors(BaseDataModule):
    """Windows of one or several series. The value of a step is its number."""

    def __init__(
        self,
        lengths: Any = (200,),
        stride: int = 1,
        has_times: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(**{"val_split": "ordered", "batch_size": 4, **options})
        self.lengths, self.stride, self.has_times = lengths, stride, has_times

    def load(self, split: str) -> Any:  # type: ignore[override]
        steps = torch.arange(sum(self.lengths), dtype=torch.float64)
        series: Any = [*steps[:, None].split(self.lengths)]
        times = None
        if len(series) == 1:
            (series,) = series
        elif self.has_times:  # all series end at one time
            times = np.concatenate([np.arange(-n, 0) for n in self.lengths])
        w = windows(series, 6, 3, self.stride, times=times)
        return w.select(self.seeded_part(len(w), split, times=w.times))


def steps_in(samples: Any) -> set[float]:
    inputs, targets = samples.values
    assert inputs.dtype == torch.float32
    assert (*inputs.shape[1:], *targets.shape[1:]) == (6, 1, 3, 1)
    spans = torch.cat([inputs, targets], 1)
    assert (spans.diff(dim=1) == 1).all(), "a window has steps of two series"
    return {*spans.flatten().tolist()}


@pytest.mark.parametrize("stride", [1, 2, 5])
@pytest.mark.parametrize("gap", [0, 4])
@pytest.mark.parametrize("lengths", [(200,), LENGTHS])
@pytest.mark.parametrize("fold", [None, 0, 2])
@pytest.mark.parametrize("has_times", [True, False])
def test_no_step_of_a_part_is_in_another(lengths, gap, stride, fold, has_times) -> None:
    options: Any = {"lengths": lengths, "gap": gap, "stride": stride}
    options |= {"has_times": has_times}
    if fold is not None:
        options |= {"num_folds": 3, "fold": fold}
    data = attach(Sensors(**options))
    data.setup("test")
    steps = {name: steps_in(samples) for name, samples in data.splits.items()}
    for one, other in (("train", "val"), ("train", "test"), ("val", "test")):
        assert not steps[one] & steps[other]
        starts = np.cumsum((0, *lengths))
        for start, end in pairwise(starts):  # of each series
            before = [x for x in steps[one] if start <= x < end]
            after = [x for x in steps[other] if start <= x < end]
            if before and after:
                assert min(after) - max(before) > gap
    # two ranks read each sample of the training once
    seen: list[Any] = []
    for rank in (0, 1):
        num = len(data.splits["train"])
        sampler = EpochBatchSampler(num, 4, shuffle=True, rank=rank, num_ranks=2)
        loader = make_loader(data.splits["train"], sampler, torch.device("cpu"))
        seen += [x[0, 0].item() for inputs, _ in loader for x in inputs[:, None]]
    expected = data.splits["train"].values[0][:, 0, 0].tolist()
    assert sorted(seen) == sorted(expected)


def test_what_is_left_out_is_counted(capsys) -> None:
    load_data(Sensors(), with_test=True)
    # 192 windows of 9 steps: 38 for the test, 8 across each border
    line = "Sensors, 123 training, 15 validation, 38 test, 16 left-out samples"
    assert line in capsys.readouterr().out


def test_windows_are_views_of_the_series() -> None:
    series = torch.arange(20.0).reshape(10, 2)
    w = windows(series, 3, 2)
    inputs, targets = w.all_values
    pointers = {x.untyped_storage().data_ptr() for x in (series, inputs, targets)}
    assert len(pointers) == 1
    for i in range(6):
        x, y = w[i]
        assert torch.equal(x, series[i : i + 3])
        assert torch.equal(y, series[i + 3 : i + 5])
    assert len(w) == 6
    x, y = windows(series[:, 0], 3, 2, stride=2)[1]
    assert (x.tolist(), y.tolist()) == ([4, 6, 8], [10, 12])
    moved = w.select(torch.tensor([4])).to(torch.device("cpu"))
    assert torch.equal(moved[0][0], series[4:7])
    with pytest.raises(RuntimeError, match="size is 12"):
        windows(series, 10, 2)
    with pytest.raises(UserError, match="is empty"):
        attach(Given(windows([series[:7], series[:5]], 6, 2)))


def test_a_column_names_the_series() -> None:
    lengths = [5, 9, 4]
    series = [torch.rand(n, 2) for n in lengths]
    expected = windows(series, 2, 2)
    names = np.repeat(["a", "b", "c"], lengths)
    times = np.concatenate([np.arange(n) + 7 for n in lengths])
    order = torch.randperm(18)
    found = windows(
        torch.cat(series)[order], 2, 2, names=names[order], times=times[order]
    )
    for one, other in zip(found.values, expected.values, strict=True):
        assert torch.equal(one, other)
    assert found.times[0].tolist() == [7, 10]
    assert expected.times[-1].tolist() == [14, 17]


class Unsaid(Sensors):
    """Its author has not given the times of the windows to `seeded_part`."""

    def load(self, split: str) -> Any:  # type: ignore[override]
        w = windows(torch.rand(200, 1), 6, 3)
        return w.select(self.seeded_part(len(w), split))


def test_a_split_that_does_not_know_the_windows_is_refused() -> None:
    with pytest.raises(UserError, match="not those of its windows"):
        attach(Unsaid())


class Walk(BaseDataModule):
    """Windows of a random walk of 5,000 steps."""

    def load(self, split: str) -> Any:  # type: ignore[override]
        steps = torch.randn(5000, generator=torch.Generator().manual_seed(0))
        w = windows(steps.cumsum(0), 50, 1)
        return w.select(self.seeded_part(len(w), split, times=w.times))


def plain_walk(kind: str, net: nn.Module, seed: int) -> tuple[float, float]:
    """The MAE of a network that plain PyTorch trains, and of the last value."""
    steps = torch.randn(5000, generator=torch.Generator().manual_seed(0)).cumsum(0)
    x = torch.stack([steps[i : i + 50] for i in range(4950)])
    y = steps[50:, None]
    if kind == "ordered":
        test, train = torch.arange(3960, 4950), torch.arange(3469)
    else:
        order = torch.randperm(4950, generator=torch.Generator().manual_seed(0))
        test, left = order[:990], order[990:]
        draw = torch.randperm(3960, generator=torch.Generator().manual_seed(0))
        train = left[draw[396:].sort().values]
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-5)
    for epoch in range(2):
        generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
        order = torch.randperm(len(train), generator=generator)
        for batch in order.split(64):
            if len(batch) == 64:
                rows = train[batch]
                optimizer.zero_grad()
                nn.functional.mse_loss(net(x[rows]), y[rows]).backward()
                optimizer.step()
    with torch.no_grad():
        mae = (net(x[test]) - y[test]).abs().mean().item()
    return mae, (x[test, -1:] - y[test]).abs().mean().item()


QUIET: Any = {"device_monitor": False, "step_timer": False, "accelerator": "cpu"}


@pytest.mark.parametrize("kind", ["random", "ordered"])
def test_a_forecast_equals_that_of_a_plain_program(kind, tmp_path) -> None:
    seed_everything(3, verbose=False)
    net = nn.Linear(50, 1)
    plain = nn.Linear(50, 1)
    plain.load_state_dict(net.state_dict())
    module = Regressor(net, lr=1e-5)
    data = Walk(val_split=kind)
    flags = {"max_epochs": 2, "monitor": None, "default_root_dir": str(tmp_path)}
    result = lightbase.train(module, data, seed_everything=3, **flags, **QUIET)
    mae, naive = plain_walk(kind, plain, data.shuffle_seed or 0)
    assert result["test/mae"] == pytest.approx(mae, rel=1e-4)
    assert 0.7 < naive < 0.9  # sqrt(2 / pi) is 0.798
    x, y = data.splits["test"].values  # type: ignore[union-attr]
    assert (x[:, -1:] - y).abs().mean() == pytest.approx(naive, rel=1e-5)


X = torch.randn(300, 4, generator=torch.Generator().manual_seed(0))
NOISE = torch.randn(300, generator=torch.Generator().manual_seed(1))
SUMS = X @ torch.tensor([1.0, -2.0, 0.5, 3.0]) + 0.1 * NOISE


@pytest.mark.parametrize("unit", [1e5, 1e-5])
@pytest.mark.parametrize("num", [1, 2])
def test_the_loss_is_of_standardised_numbers_and_all_else_in_units(
    unit, num, tmp_path
) -> None:
    y = unit * (7 + SUMS)
    if num == 2:
        y = torch.stack([y, 100 * unit * X[:, 0] - unit], 1)
    flags: Any = {"max_epochs": 15, "default_root_dir": str(tmp_path), "batch_size": 16}
    flags |= {"test": (X[:50], y[:50])}
    module = Regressor(MLP([4, num]), optimizer="Adam", lr=0.03)
    result = lightbase.train(
        module, (X, y), scale_targets=True, name="scaled", **flags, **QUIET
    )
    predicted = lightbase.predict(result, X[:50]).view_as(y[:50])
    mae = (predicted - y[:50]).abs().mean().item()
    assert result["test/mae"] == pytest.approx(mae, rel=1e-4)
    assert mae < 0.2 * y.std(0).mean()
    assert result["test/loss"] < 0.05
    true, shown = evaluated(result, "test").columns  # of the picture
    torch.testing.assert_close(true, y[:50], rtol=1e-4, atol=1e-4 * unit)
    torch.testing.assert_close(shown, predicted, rtol=1e-4, atol=1e-4 * unit)
    folder = tmp_path / "scaled/version_0/checkpoints/best.ckpt"
    other, data = lightbase.load(folder, Regressor(MLP([4, num])))
    assert torch.equal(
        lightbase.predict((other, data), X[:50]).view_as(y[:50]), predicted
    )


def test_equal_targets_have_a_deviation_of_1() -> None:
    data = attach(Given((X, torch.full((300,), 3.0)), scale_targets=True))
    assert [x.item() for x in data.target_scale] == [3, 1]
    inputs, targets = data.on_after_batch_transfer((X, SUMS), 0)
    assert torch.equal(inputs, X)
    assert torch.equal(targets, SUMS - 3)
    torch.testing.assert_close(in_units(data, targets), SUMS)
    assert in_units(attach(Given((X, SUMS))), SUMS) is SUMS


def test_targets_of_windows_have_the_units_of_each_channel() -> None:
    series = torch.stack([1e5 + 1e4 * torch.randn(300), 1e-5 * torch.randn(300)], 1)
    data = attach(Given(windows(series, 5, 2), scale_targets=True, val_split="ordered"))
    mean, std = data.target_scale
    last = data.splits["train"].index + 6
    torch.testing.assert_close(mean, series[last].mean(0))
    torch.testing.assert_close(std, series[last].std(0, correction=0))
    batch = data.splits["train"].__getitems__([0, 1])
    assert data.on_after_batch_transfer(batch, 0)[1].abs().max() < 6


class Collated(Sensors):
    def collate(self, samples: list) -> Any:
        inputs, targets = zip(*samples, strict=True)
        return torch.stack(inputs), torch.stack(targets)


def test_windows_keep_their_times_with_an_own_collate() -> None:
    found, expected = (attach(kind()).splits for kind in (Collated, Sensors))
    for name in ("train", "val"):
        assert len(found[name]) == len(expected[name])
