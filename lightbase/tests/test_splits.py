"""Validation sets, folds and test parts by classes and by groups."""

from typing import Any

import numpy as np
import pytest
import torch
from attached import attach
from given import Given
from torch import Tensor
from torch.utils.data import Dataset, Subset

from lightbase.config.errors import UserError
from lightbase.data.module import BaseDataModule
from lightbase.data.splits import Fold, fold_indices, part_indices

SIZES = [3, 40, 7, 1, 12, 25, 9, 9, 30, 2, 5, 17, 11, 20, 6, 3, 14, 8, 4, 24]
PATIENTS = np.repeat(np.arange(20), SIZES)  # 250 samples
LABELS = torch.arange(250) % 3


class Grouped(Given):
    """Data whose inputs are their own positions."""

    def __init__(self, **options: Any) -> None:
        loaded = torch.arange(250), LABELS
        test = torch.arange(1000, 1020), LABELS[:20]
        options = {"val_split": "grouped", "classes": ("a", "b", "c"), **options}
        super().__init__(loaded, test, **options)

    def groups(self, split: str) -> Any:
        assert split == "train"
        return [f"patient {i}" for i in PATIENTS]


class OneFile(BaseDataModule):
    """Data without a test set, whose `load` knows the patients."""

    def load(self, split: str) -> Any:  # type: ignore[override]
        part = self.seeded_part(250, split, groups=torch.from_numpy(PATIENTS))
        return torch.arange(250)[part], LABELS[part]


def patients(data: Any) -> dict[str, set[int]]:
    """The patients in each split that is a part of the 250 samples."""
    indices = {name: x.values[0].tolist() for name, x in data.splits.items()}
    return {name: {*PATIENTS[x]} for name, x in indices.items() if max(x) < 250}


def check_apart(splits: dict[str, set[int]]) -> None:
    """Check that no patient is in two splits."""
    assert sum(map(len, splits.values())) == len(set.union(*splits.values())) == 20


def test_no_group_is_on_two_sides() -> None:
    check_apart(patients(attach(Grouped())))
    folds = [patients(attach(Grouped(num_folds=4, fold=i))) for i in range(4)]
    for fold in folds:
        check_apart(fold)
    check_apart({str(i): fold["test"] for i, fold in enumerate(folds)})
    data = attach(OneFile(val_split="grouped"))
    data.setup("test")
    check_apart(patients(data))
    assert abs(len(data.splits["test"]) - 50) <= 3
    data = attach(OneFile(val_split="grouped", num_folds=4, fold=1))
    check_apart(patients(data))
    assert abs(len(data.splits["val"]) - 19) <= 3


@pytest.mark.parametrize("seed", range(4))
def test_parts_are_whole_groups_and_near_their_share(seed: int) -> None:
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 60, rng.integers(6, 40))
    groups = rng.permutation(np.repeat(np.arange(len(sizes)), sizes))
    classes = torch.arange(len(groups)) % 2
    for share in (0.1, 0.35):
        part = part_indices("grouped", share, seed, classes, groups)
        assert {*groups[part]}.isdisjoint(np.delete(groups, part))
        assert abs(len(part) - share * len(groups)) <= max(sizes)
    folds = [
        fold_indices("grouped", Fold(i, 5, seed), classes, groups) for i in range(5)
    ]
    assert sorted(torch.cat(folds).tolist()) == list(range(len(groups)))
    assert sum(len({*groups[fold]}) for fold in folds) == len(sizes)


def test_each_class_has_its_share_within_one_sample() -> None:
    share = 0.25
    labels = torch.tensor([0] * 901 + [5] * 73 + [2] * 40 + [3] * 2)
    options = {"val_fraction": share, "val_split": "stratified"}
    val = attach(Given((torch.arange(1016), labels), **options)).splits["val"]
    for label in (0, 2, 3, 5):
        exact = share * int((labels == label).sum())
        assert abs(int((val.targets == label).sum()) - exact) <= 1


def test_a_split_follows_from_its_seed() -> None:
    for kind in ("stratified", "grouped"):
        first, same, other = [
            attach(Grouped(val_split=kind, split_seed=seed)).splits["val"].values[0]
            for seed in (0, 0, 1)
        ]
        assert torch.equal(first, same)
        assert not torch.equal(first, other)


X = torch.zeros(50, 3)
RARE = torch.tensor([0] * 49 + [1])
WRONG: list[Any] = [
    ((X, X), {"val_split": "stratified"}, "classes of the samples are unknown"),
    ((X, RARE), {"val_split": "grouped"}, r"shape \(\)\nwrite Given.groups\(split\)"),
]


@pytest.mark.parametrize(("loaded", "options", "message"), WRONG)
def test_a_split_that_cannot_be_made_is_refused(loaded, options, message):
    with pytest.raises(UserError, match=message) as caught:
        attach(Given(loaded, **options))
    assert str(caught.value).count("\n") == 1


def test_groups_that_do_not_fit_are_refused(monkeypatch) -> None:
    with pytest.raises(ValueError, match="number of groups"):  # of scikit-learn
        attach(Grouped(num_folds=21, fold=0))
    monkeypatch.setattr(Grouped, "groups", lambda *_: PATIENTS[:-1])
    with pytest.raises(UserError, match="shape"):
        attach(Grouped())


class Attributes(Dataset[Any]):
    """A Dataset with attributes as torchvision's sets have them. Reading a sample gives
    what `values` has, or noise that no generator repeats."""

    def __init__(self, values: Tensor, **attributes: Any) -> None:
        self.values = values
        vars(self).update(attributes)

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> Any:
        if hasattr(self, "generator"):
            return torch.rand(1, generator=self.generator), 0
        return self.values[index], 0


ROWS = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
LABELLED = torch.arange(60) % 2


def files(root: str, order: Tensor) -> list[Any]:
    return [(f"{root}/{i % 2}/{i}.png", i % 2) for i in order.tolist()]


KINDS: dict[str, Any] = {
    "targets": lambda order, root: (ROWS, LABELLED[order]),
    "dict": lambda order, root: {"x": [ROWS[order]], "y": LABELLED},
    "files": lambda order, root: Attributes(ROWS, samples=files(root, order)),
    "read": lambda order, root: Attributes(ROWS[order]),
    "Subset": lambda order, root: Subset(
        Attributes(ROWS, targets=LABELLED), order.tolist()
    ),
}
REVERSED = torch.arange(59, -1, -1)
FOLDS: Any = {"num_folds": 3, "fold": 1}


@pytest.mark.parametrize("options", [{}, FOLDS], ids=["val", "folds"])
@pytest.mark.parametrize("kind", KINDS)
def test_other_samples_or_another_order_is_said(kind, options, capsys):
    def data(order: Tensor, root: str = "/a/b") -> Given:
        return Given(KINDS[kind](order, root), **options)

    first = data(torch.arange(60))
    state = attach(first).state_dict()
    for root in ("/a/b", "/a/b", "/c"):
        same = data(torch.arange(60), root)
        same.load_state_dict(state)
        same.setup("fit")
        same.setup("test")
    assert "Warning" not in capsys.readouterr().out
    changed = data(REVERSED)
    changed.load_state_dict(state)
    with pytest.raises(UserError, match="than in the training"):
        changed.setup("fit")
    changed.setup("test")
    assert "Warning: Given " in capsys.readouterr().out
    del state["fingerprints"]  # as in an earlier version
    older = data(REVERSED)
    older.load_state_dict(state)
    older.setup("fit")


def test_another_test_set_is_said_and_does_not_stop_a_resume(capsys) -> None:
    state = attach(Given((ROWS, LABELLED)), "test").state_dict()
    data = Given((ROWS, LABELLED), (ROWS[:9], LABELLED[:9]))
    data.load_state_dict(state)
    data.setup("fit")
    assert "other test samples" not in capsys.readouterr().out
    data.setup("test")
    assert "Given has other test samples than in the" in capsys.readouterr().out
    data.setup("fit")


def test_samples_that_are_random_are_not_compared() -> None:
    states = [
        attach(
            Given(Attributes(ROWS, generator=torch.Generator().manual_seed(seed)))
        ).state_dict()
        for seed in (1, 2)
    ]
    assert states[0]["fingerprints"] == states[1]["fingerprints"]
