from typing import Any

import pytest
import torch
from attached import attach, inputs_of
from given import Given
from paths import argv, fails
from torch.utils.data import Dataset

from lightbase.config.errors import UserError
from lightbase.data.loader import ResumableLoader
from lightbase.data.module import BaseDataModule
from lightbase.data.sampler import EpochBatchSampler


def labelled(num: int, batch_size: int = 10, **options: Any) -> Any:
    """Data whose inputs are their own indices, those of the test set from 1000."""
    zeros = torch.zeros(num, dtype=torch.int64)
    train, test = torch.arange(num), torch.arange(1000, 1000 + num)
    options = {"batch_size": batch_size, "val_fraction": 0.1, **options}
    return attach(Given((train, zeros), (test, zeros), ("a", "b"), **options))


def test_training_and_validation_share_the_training_set_and_the_split_is_seeded():
    splits = labelled(200).splits
    train, val = splits["train"], splits["val"]
    assert len(val) == 20
    both = torch.cat([train.values[0], val.values[0]])
    assert sorted(both.tolist()) == list(range(200))
    assert torch.equal(labelled(200).splits["val"].values[0], val.values[0])
    other = labelled(200, split_seed=1).splits["val"]
    assert not torch.equal(other.values[0], val.values[0])


def test_each_epoch_has_another_order_and_drops_the_partial_batch() -> None:
    loader = labelled(115, val_fraction=0).train_dataloader()
    first, second = as_lists(loader), as_lists(loader, epoch=1)
    assert first != second
    assert len({x for inputs, _ in second for x in inputs}) == 110
    kept = labelled(115, val_fraction=0, drop_last=False).train_dataloader()
    assert sorted(inputs_of(kept)) == list(range(115))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_evaluation_is_in_order_and_whole_also_with_workers(num_workers: int) -> None:
    data = labelled(37, num_workers=num_workers, val_fraction=0, eval_batch_size=15)
    loader = data.test_dataloader()
    for each in (loader, data.val_dataloader(), data.predict_dataloader()):
        assert [len(inputs) for inputs, _ in each] == [15, 15, 7]
        assert inputs_of(each) == list(range(1000, 1037))
    assert loader.num_workers == num_workers
    assert loader.persistent_workers == (num_workers > 0)


# 20 batches are fetched at once
@pytest.mark.parametrize(("done", "num_workers"), [(1, 0), (20, 0), (21, 1)])
def test_a_loader_goes_on_in_the_middle_of_an_epoch(
    done: int, num_workers: int
) -> None:
    options = {"num_workers": num_workers, "persistent_workers": False}
    data = labelled(100, 3, val_fraction=0, **options)
    loader, resumed = data.train_dataloader(), data.train_dataloader()
    whole = as_lists(loader)
    assert len(loader) == len(whole) == 33
    iterator = iter(loader)
    for _ in range(done):
        next(iterator)
    assert loader.state_dict()["num_batches"] == done
    resumed.load_state_dict(loader.state_dict())
    assert as_lists(resumed) == whole[done:]
    assert as_lists(resumed) == whole  # the next pass is whole
    loader.load_state_dict({"epoch": 0, "num_batches": 33})
    assert loader.state_dict()["epoch"] == 1


def test_a_dataset_of_another_length_gets_one_line(capsys):
    samples = [torch.tensor(i) for i in range(10)]
    loader = ResumableLoader(samples, EpochBatchSampler(len(samples), 5))
    samples.append(torch.tensor(10))
    for _ in range(2):
        assert len([*loader]) == 2
    assert capsys.readouterr().out.count("the Dataset has 11 samples now") == 1


def as_lists(loader: Any, epoch: int = 0) -> list[Any]:
    loader.batch_sampler.set_epoch(epoch)
    return [(inputs.tolist(), targets.tolist()) for inputs, targets in loader]


class Endless(Dataset[Any]):
    def __getitem__(self, index: int) -> Any:
        return torch.zeros(3), 0


x, y = torch.zeros(50, 3), torch.arange(50) % 2
WRONG = [
    ((x, y), {"classes": ["a"]}, "targets from 0 to 1, not int64 from 0 to 0"),
    ((x, y.double()), {"classes": ["a", "b"]}, "torch.float32 targets"),
    ((x, y), {"image_shape": (1, 28, 28)}, r"\(3,\) for image_shape \(1, 28, 28\)"),
    (Endless(), {}, "Endless:\nload returns .* write a LightningDataModule"),
    ({"x": x[:5], "y": [1, 2, 3]}, {}, "arrays of .5, 3. samples"),
]


@pytest.mark.parametrize(("loaded", "options", "message"), WRONG)
def test_data_that_does_not_fit_is_refused(loaded, options, message):
    data = Given(loaded)
    vars(data).update(options)
    with pytest.raises(UserError, match=f"the train set of Given .*{message}"):
        data.setup("fit")


class TrainOnly(BaseDataModule):
    classes = ["a", "b"]
    own_splits = ["train"]

    def load(self, split: str) -> Any:  # type: ignore[override]
        assert split == "train"
        return x, y


def test_data_without_a_test_set_is_trained_and_not_tested(train) -> None:
    result = train("--data test_data.TrainOnly --model.net.sizes [3,2]")
    assert not [name for name in result if name.startswith("test/")]
    with pytest.raises(UserError, match="validates on the test set: there is none"):
        attach(TrainOnly(val_fraction=0))


class WrongTest(BaseDataModule):
    """Its test set has a target that is no class."""

    classes = ["a", "b"]

    def load(self, split: str) -> Any:  # type: ignore[override]
        return x, y + (split == "test")


def test_a_wrong_test_set_is_found_before_the_training(train, capsys, tmp_path):
    flags = argv("--data test_data.WrongTest --model.net.sizes [3,2]")
    error = fails(capsys, 1, lambda: train(*flags))
    assert "WrongTest has torch.int64 targets from 1 to 2, not int64 from 0 to" in error
    assert not list(tmp_path.rglob("version_*"))
