"""Cross-validation: a fold of the training set is the test set."""

from itertools import chain
from typing import Any

import pytest
import torch
from attached import attach
from given import Given, OwnSplits
from paths import TINY, argv
from torch.utils.data import Dataset

from lightbase.commands.train import parse
from lightbase.config.errors import UserError

TARGETS = torch.tensor([1] * 17 + [2] * 3 + [0] * 33)
TABLE = torch.arange(53), TARGETS  # the input of a sample is its index


class Unread(Dataset[Any]):
    """The same as a Dataset. Only its fingerprint, without targets, reads samples."""

    def __init__(self, targets: Any) -> None:
        self.targets = targets

    def __len__(self) -> int:
        return 53

    def __getitem__(self, index: int) -> Any:
        assert index == 0 or self.targets is None, "read to find its class"
        return torch.tensor(index), 0


def folds(num_folds: int = 5, loaded: Any = TABLE, **options: Any) -> list[Any]:
    """The splits of all folds."""
    options |= {"classes": ("a", "b", "c"), "num_folds": num_folds}
    modules = [Given(loaded, test=(), fold=i, **options) for i in range(num_folds)]
    return [attach(data).splits for data in modules]


def check_folds(tested: list[list[int]]) -> None:
    """Check that each sample is in one fold, and that the folds are stratified."""
    assert sorted(chain(*tested)) == list(range(53))
    for label in range(3):
        counts = [int((TARGETS[indices] == label).sum()) for indices in tested]
        assert max(counts) - min(counts) <= 1


def test_each_sample_is_in_one_fold_and_the_folds_are_stratified() -> None:
    tested = []
    for splits in folds():
        parts = [splits[name].values[0].tolist() for name in ("test", "val", "train")]
        assert sorted(chain(*parts)) == list(range(53))
        test, val, _ = parts
        assert len(val) == round(0.2 * (53 - len(test)))
        tested.append(test)
    check_folds(tested)
    parts = [splits["test"].index.tolist() for splits in folds(3, Unread(TARGETS))]
    check_folds(parts)
    unknown = folds(3, Unread(None))
    assert sum(len(splits["test"]) for splits in unknown) == 53
    without = folds(val_fraction=0)[1]
    assert without["val"] is without["test"]


def test_the_folds_follow_from_split_seed_alone() -> None:
    few = torch.arange(6), torch.zeros(6, dtype=torch.int64)  # on any machine
    assert folds(2, few)[0]["test"].values[0].tolist() == [1, 2, 3]
    assert folds(2, few, split_seed=2)[0]["test"].values[0].tolist() != [1, 2, 3]


def test_an_own_validation_set_stays_and_no_test_set_is_needed() -> None:
    data = attach(OwnSplits(("train", "val"), num_folds=4, fold=0))
    assert [len(data.splits[name]) for name in ("train", "val", "test")] == [75, 7, 25]


@pytest.mark.parametrize("flags", ["--data.fold 2", "--data.num_folds 5 --data.fold 5"])
def test_wrong_folds_are_refused(flags: str) -> None:
    with pytest.raises(UserError, match=r"data.fold .* of .*: no such fold") as caught:
        parse(argv("--config", TINY, flags))
    assert caught.value.status == 2
