"""Cross-validation: a fold of the training set is the test set."""

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from attached import attach
from given import Given, OwnSplits
from paths import TINY, script
from PIL import Image
from torch.utils.data import Dataset

import lightbase
from lightbase.commands.train import parse
from lightbase.core.errors import UserError

EVALUATE = script("evaluate")


def table(num: int = 53) -> Any:
    """Samples whose input is their index, of three classes of uneven sizes."""
    targets = torch.zeros(num, dtype=torch.int64)
    targets[:17], targets[17:20] = 1, 2
    return torch.arange(num)[:, None], targets


class WithTargets(Dataset[Any]):
    """The same as a Dataset, with or without `targets`, whose samples must not be
    read."""

    def __init__(self, targets: Any) -> None:
        self.targets = targets

    def __len__(self) -> int:
        return 53

    def __getitem__(self, index: int) -> Any:
        assert index == 0, "read to find its class"
        return torch.tensor([index]), 0


def splits(num_folds: int = 5, loaded: Any = None, **options: Any) -> list[Any]:
    """The data modules of all folds, set up."""
    loaded = table() if loaded is None else loaded
    options = {"classes": ("a", "b", "c"), "num_folds": num_folds, **options}
    return [
        attach(Given(loaded, test=(), fold=fold, **options))
        for fold in range(num_folds)
    ]


def test_each_sample_is_in_one_fold_and_the_folds_are_stratified() -> None:
    modules = splits()
    tested = [data.splits["test"] for data in modules]
    assert sorted(
        index for samples in tested for index in samples.inputs.flatten().tolist()
    ) == list(range(53))
    assert {len(samples) for samples in tested} == {10, 11}
    for label in range(3):
        counts = [int((samples.targets == label).sum()) for samples in tested]
        assert max(counts) - min(counts) <= 1
    for data in modules:
        used = [
            data.splits[name].inputs.flatten().tolist()
            for name in ("train", "val", "test")
        ]
        assert sorted(itertools.chain(*used)) == list(range(53))
        assert len(used[1]) == round(0.2 * (53 - len(used[2])))


def test_the_folds_follow_from_split_seed_alone() -> None:
    torch.manual_seed(5)
    first = splits()[2].splits["test"].inputs.flatten().tolist()
    assert first == splits()[2].splits["test"].inputs.flatten().tolist()
    assert first != splits(split_seed=1)[2].splits["test"].inputs.flatten().tolist()
    six = splits(2, (torch.arange(6)[:, None], torch.zeros(6)), classes=())
    assert six[0].splits["test"].inputs.flatten().tolist() == [
        1,
        2,
        3,
    ]  # of any machine


def test_more_folds_than_samples_are_refused() -> None:
    with pytest.raises(UserError, match="num_folds 54: there are only 53 samples"):
        attach(Given(table(), num_folds=54, fold=0))


def test_without_validation_samples_val_is_the_fold() -> None:
    data = splits(val_fraction=0)[1]
    assert len(data.splits["train"]) + len(data.splits["test"]) == 53
    assert data.splits["val"] is data.splits["test"]


def test_an_own_validation_set_stays_and_no_test_set_is_needed() -> None:
    data = attach(OwnSplits(("train", "val"), num_folds=4, fold=0))
    sizes = {name: len(split) for name, split in data.splits.items()}
    assert sizes == {"train": 75, "val": 7, "test": 25}


def test_a_dataset_with_targets_is_stratified_without_reading_it() -> None:
    targets = table()[1]
    data: Any = WithTargets(targets.tolist())
    tested = [module.splits["test"].dataset.indices for module in splits(3, data)]
    assert sorted(itertools.chain(*tested)) == list(range(len(data)))
    for label in range(3):
        counts = [int((targets[indices] == label).sum()) for indices in tested]
        assert max(counts) - min(counts) <= 1
    tested = [
        module.splits["test"].dataset.indices for module in splits(3, WithTargets(None))
    ]
    assert sorted(itertools.chain(*tested)) == list(range(53))


@pytest.mark.parametrize("layout", ["test beside it", "classes alone"])
def test_folders_of_images(tmp_path: Path, layout: str) -> None:
    root = tmp_path if layout == "classes alone" else tmp_path / "train"
    for name, num in (("cat", 11), ("dog", 6)):
        (root / name).mkdir(parents=True)
        for i in range(num):
            Image.new("RGB", (8, 8), (i, i, i)).save(root / name / f"{i}.png")
    if layout == "test beside it":
        (tmp_path / "test" / "cow").mkdir(parents=True)
        (tmp_path / "test" / "cow" / "broken.png").write_text("never read")
    options: Any = {"image_shape": (3, 8, 8), "num_workers": 0, "num_folds": 3}
    modules = [
        attach(lightbase.ImageFolder(str(tmp_path), fold=fold, **options))
        for fold in range(3)
    ]
    counts = [
        Counter(target for _, target in data.splits["test"].dataset) for data in modules
    ]
    assert sum(counts, Counter()) == {0: 11, 1: 6}
    assert all(count[0] in (3, 4) and count[1] == 2 for count in counts)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--data.fold", "2"], "data.fold 2 of data.num_folds None: no such fold"),
        (["--data.num_folds", "5"], "data.fold None of data.num_folds 5: no such"),
        (
            ["--data.num_folds", "5", "--data.fold", "5"],
            "data.fold 5 of data.num_folds 5",
        ),
    ],
)
def test_wrong_folds_are_refused(flags: list[str], message: str) -> None:
    with pytest.raises(UserError) as caught:
        parse(["--config", TINY, *flags])
    assert message in str(caught.value)
    assert caught.value.status == 2
    assert len(str(caught.value).splitlines()) <= 2


@pytest.mark.slow
def test_a_run_of_a_fold(train: Any, tmp_path: Path, capsys: Any) -> None:
    """It is tested on its fold, evaluated to the same numbers, or on the official test
    set if that is asked for; it resumes with its fold only."""
    folds = ("--data.num_folds", 5, "--data.fold", 2)
    result = train(*folds, "--trainer.max_epochs", 1)
    assert result["test/num_samples"] == 70
    assert "fold 2 of 5 is the test set" in capsys.readouterr().out
    run = tmp_path / "tiny" / "version_0"
    assert "data.num_folds: 5" in (run / "hparams.yaml").read_text()
    path = str(run / "checkpoints" / "best.ckpt")
    again = EVALUATE.main(["--ckpt_path", path])
    assert again == {
        key: value for key, value in result.items() if key.startswith("test/")
    }
    official = EVALUATE.main(["--ckpt_path", path, "--data.num_folds", "null"])
    assert official["test/num_samples"] == 75
    for other in (["--data.fold", "3"], ["--data.split_seed", "7"]):
        with pytest.raises(SystemExit):
            EVALUATE.main(["--ckpt_path", path, *other])
        assert f"{' '.join(other)}: the training of" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        train("--ckpt_path", "last", "--trainer.max_epochs", 2, "--data.fold", 4)
    assert "--data.fold 4: a resume goes on with" in capsys.readouterr().err
    assert (
        train("--ckpt_path", "last", "--trainer.max_epochs", 2)["test/num_samples"]
        == 70
    )
