import random
from typing import Any

import numpy as np
import pytest
import torch
from attached import attach, inputs_of
from example.classifier import Classifier
from given import Given, OwnSplits
from lightning import Trainer
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from lightbase.core.batches import EpochBatchSampler, ResumableLoader, TensorBatches
from lightbase.core.compat import quiet_lightning
from lightbase.core.data import BaseDataModule
from lightbase.core.errors import UserError


def a_trainer(**options: Any) -> Trainer:
    options |= {"enable_progress_bar": False, "enable_model_summary": False}
    return Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, **options
    )


def labelled(num: int, batch_size: int = 10, **options: Any) -> Any:
    """Data whose inputs are their own indices, those of the test set from 1000."""

    class Labelled(BaseDataModule):
        classes = ["a", "b"]

        def load(self, split: str) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            start = 0 if split == "train" else 1000
            return torch.arange(start, start + num), torch.zeros(num, dtype=torch.int64)

    return attach(Labelled(batch_size=batch_size, **options))


class Jittered(Dataset[tuple[Tensor, float]]):
    """Its inputs are (index, a number of torch, of Python, of numpy)."""

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> tuple[Tensor, float]:
        return torch.tensor(
            [index, torch.rand(()).item(), random.random(), np.random.rand()]
        ), float(index)


def gpu_of(data: Any, monkeypatch: pytest.MonkeyPatch, kind: str = "cuda") -> None:
    """A stand-in for a GPU, whose memory is on the device meta."""
    monkeypatch.setattr(data.trainer.strategy, "_root_device", torch.device(kind, 0))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**30, 2**30))
    on_meta = lambda self, _: TensorBatches((self.inputs.to("meta"), self.targets))  # noqa: E731
    monkeypatch.setattr(TensorBatches, "to", on_meta)


def test_training_and_validation_share_the_training_set_and_the_split_is_seeded() -> (
    None
):
    data = labelled(200)
    train, val = (
        data.splits["train"].inputs.tolist(),
        data.splits["val"].inputs.tolist(),
    )
    assert len(val) == 20
    assert sorted(train + val) == list(range(200))
    assert labelled(200).splits["val"].inputs.tolist() == val
    assert labelled(200, split_seed=1).splits["val"].inputs.tolist() != val


def test_the_split_copies_no_data() -> None:
    data = labelled(200)
    train, val = data.splits["train"], data.splits["val"]
    assert train.all_values[0].data_ptr() == val.all_values[0].data_ptr()
    few = train.select(torch.tensor([5, 7]))
    assert torch.equal(few.inputs, train.inputs[[5, 7]])
    moved = few.to(torch.device("cpu"))  # a GPU gets nothing but its samples
    assert len(moved.all_values[0]) == 2


def test_without_validation_all_trains_and_the_curve_is_of_the_test_set(
    monkeypatch,
) -> None:
    data = labelled(50, val_fraction=0)
    assert len(data.splits["train"]) == 50
    assert inputs_of(data.val_dataloader()) == list(range(1000, 1050))
    data = labelled(50, val_fraction=0)
    gpu_of(data, monkeypatch)
    assert (
        data.val_dataloader().dataset is data.test_dataloader().dataset
    )  # one copy on the GPU
    assert data.train_dataloader().dataset is not data.test_dataloader().dataset


def test_each_epoch_has_another_order_and_drops_the_partial_batch() -> None:
    loader = labelled(115, val_fraction=0).train_dataloader()
    first = inputs_of(loader)
    assert len({*first}) == 110
    loader.batch_sampler.set_epoch(1)
    assert inputs_of(loader) != first
    kept = labelled(115, val_fraction=0, drop_last=False).train_dataloader()
    assert sorted(inputs_of(kept)) == list(range(115))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_evaluation_is_in_order_and_whole_also_with_workers(num_workers: int) -> None:
    data = labelled(37, num_workers=num_workers, val_fraction=0, eval_batch_size=15)
    data.setup("predict")
    for loader in (data.val_dataloader(), data.predict_dataloader()):
        assert [len(inputs) for inputs, _ in loader] == [15, 15, 7]
    assert len(next(iter(data.train_dataloader()))[0]) == 10
    loader = data.test_dataloader()
    assert inputs_of(loader) == list(range(1000, 1037))
    assert loader.num_workers == num_workers
    assert loader.persistent_workers == (num_workers > 0)


# 20 batches are fetched at once
@pytest.mark.parametrize(
    ("done", "num_workers"), [*((done, 0) for done in (0, 1, 20, 21, 33)), (21, 1)]
)
def test_a_loader_goes_on_in_the_middle_of_an_epoch(
    done: int, num_workers: int
) -> None:
    data = labelled(
        100, 3, val_fraction=0, num_workers=num_workers, persistent_workers=False
    )
    loader = data.train_dataloader()
    whole = [inputs.tolist() for inputs, _ in loader]
    assert len(loader) == len(whole) == loader.state_dict()["num_batches"] == 33
    iterator = iter(loader)
    for _ in range(done):
        next(iterator)
    state = loader.state_dict() if done else {"epoch": 0, "num_batches": 0}
    assert state["num_batches"] == done
    resumed = data.train_dataloader()
    resumed.load_state_dict(state)
    following = data.train_dataloader()
    following.batch_sampler.set_epoch(1)
    expected = whole[done:] or [inputs.tolist() for inputs, _ in following]
    assert [inputs.tolist() for inputs, _ in resumed] == expected
    assert len(list(resumed)) == len(whole)  # the next pass is whole


def test_one_call_fetches_several_batches_but_not_many_bytes(monkeypatch):
    fetched: list[int] = []
    fetch = TensorBatches.__getitems__

    def counted(self: TensorBatches, indices: list[int]) -> Any:
        fetched.append(len(indices))
        return fetch(self, indices)

    data = labelled(330, val_fraction=0, drop_last=False)
    monkeypatch.setattr(TensorBatches, "__getitems__", counted)
    sizes = [len(inputs) for inputs, _ in data.train_dataloader()]
    assert sizes == [10] * 33
    assert fetched == [200, 130]
    large = TensorBatches(torch.zeros(4, 2**20))  # 4 MiB a sample
    assert [large.batches_at_once(size) for size in (1, 2, 3)] == [2, 1, 1]


@pytest.mark.parametrize("pin_memory", [None, True, False])
def test_what_is_pinned_beside_a_stand_in_for_a_gpu(monkeypatch, pin_memory):
    for device, resident, pins in (
        ("cuda", None, False),
        ("cuda", False, True),
        ("mps", None, False),
    ):
        data = labelled(50, pin_memory=pin_memory, resident=resident)
        gpu_of(data, monkeypatch, device)
        loader = data.val_dataloader()
        is_resident = device == "cuda" and resident is None
        assert (loader.dataset.device.type == "meta") == is_resident
        # torch pins dense CPU tensors alone; for mps it would say that it does not
        assert loader.pin_memory == (
            (pin_memory or (pin_memory is None and pins)) and not is_resident
        )


def as_lists(loader: Any) -> list[Any]:
    return [(inputs.tolist(), targets.tolist()) for inputs, targets in loader]


def random_state() -> Any:
    return (
        torch.random.get_rng_state().tolist(),
        random.getstate(),
        str(np.random.get_state()),
    )


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_random_transforms_of_a_dataset_do_not_depend_on_workers_or_resumes(
    num_workers,
):
    def loaders(num_workers: int) -> Any:
        torch.manual_seed(0)
        return attach(Given(Jittered(), num_workers=num_workers))

    expected = loaders(0).train_dataloader()
    epochs = [as_lists(expected)]
    expected.batch_sampler.set_epoch(1)
    epochs.append(as_lists(expected))
    assert {row[1] for x, _ in epochs[0] for row in x}.isdisjoint(
        row[1] for x, _ in epochs[1] for row in x
    )
    data = loaders(num_workers)
    before = random_state()
    loader = data.train_dataloader()
    assert as_lists(loader) == epochs[0]
    loader.batch_sampler.set_epoch(1)
    assert as_lists(loader) == epochs[1]
    resumed = data.train_dataloader()
    resumed.load_state_dict({"epoch": 0, "num_batches": 3})
    assert as_lists(resumed) == epochs[0][3:]
    assert as_lists(data.val_dataloader()) == as_lists(data.val_dataloader())
    assert random_state() == before
    # any Dataset in a loader that the user makes
    sampler = EpochBatchSampler(
        50, 8, shuffle=True, drop_last=True, seed=data.shuffle_seed
    )
    loader = ResumableLoader(Jittered(), sampler, num_workers=num_workers)
    first = as_lists(loader)
    loader.load_state_dict({"epoch": 0, "num_batches": 2})
    assert as_lists(loader) == first[2:]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([(torch.zeros(3), 0)])


class Endless(Dataset[Any]):
    def __getitem__(self, index: int) -> Any:
        return torch.zeros(3), 0


x, y = torch.zeros(50, 3), torch.arange(50) % 2
WRONG: list[tuple[Any, tuple[str, ...], tuple[int, int, int] | None, str]] = [
    ((x, y[:40]), (), None, "has arrays of .50, 40. samples"),
    ((x[:0], y[:0]), (), None, "is empty"),
    ((x, y), ("a",), None, "targets from 0 to 1, not int64 from 0 to 0"),
    ((x, y - 1), ("a", "b"), None, "targets from -1 to 0, not int64 from 0 to 1"),
    ((x, y.double()), ("a", "b"), None, "torch.float32 targets"),
    (TensorDataset(x, y.float()), ("a", "b"), None, "torch.float32 targets"),
    ((x, y), (), (1, 28, 28), r"\(3,\) for image_shape \(1, 28, 28\)"),
    (Jittered(), (), (1, 28, 28), r"\(4,\) for image_shape \(1, 28, 28\)"),
    (Stream(), (), None, "Stream:\nload returns .* write a LightningDataModule"),
    (Endless(), (), None, "Endless:\nload returns .* __len__"),
    (None, (), None, "NoneType:\nload returns"),
]


@pytest.mark.parametrize(("loaded", "classes", "image_shape", "message"), WRONG)
def test_data_that_does_not_fit_is_refused(loaded, classes, image_shape, message):
    data = Given(loaded, classes=classes)
    data.image_shape = image_shape
    with pytest.raises(UserError, match=message) as caught:
        data.setup("fit")
    assert str(caught.value).startswith("the train set of Given ")
    assert len(str(caught.value).splitlines()) <= 2


def test_splits_and_batches_that_are_larger_than_the_data_are_refused() -> None:
    for val_fraction in (0.001, 0.999):
        with pytest.raises(
            UserError, match=r"val_fraction .* of 50 samples is (0|50) samples"
        ):
            labelled(50, val_fraction=val_fraction)
    with pytest.raises(UserError, match="num_folds 51: there are only 50 samples"):
        labelled(50, num_folds=51, fold=0)
    with pytest.raises(UserError, match="only 45 training samples; try"):
        labelled(50, batch_size=64).train_dataloader()


def test_an_own_validation_set_leaves_the_training_set_whole() -> None:
    data = attach(OwnSplits(("train", "val", "test"), val_fraction=0.2), "fit")
    data.setup("test")
    sizes = {name: len(split) for name, split in data.splits.items()}
    assert sizes == {"train": 100, "val": 7, "test": 20}


def test_data_without_a_test_set_is_trained_and_not_tested() -> None:
    data, trainer = OwnSplits(("train",), classes=("a", "b")), a_trainer(max_epochs=1)
    model = Classifier(nn.Linear(3, 2), num_classes=2)
    quiet_lightning()
    trainer.fit(model, data)
    assert trainer.test(model, data, verbose=False) == []
    with pytest.raises(
        UserError, match="val_fraction 0 validates on the test set: there is none"
    ):
        attach(OwnSplits(("train",), val_fraction=0))


class WrongTest(OwnSplits):
    """Its test set has a target that is no class."""

    def __init__(self) -> None:
        super().__init__(("train", "test"), classes=("a", "b"))

    def load(self, split: str) -> Any:  # type: ignore[override]
        inputs, targets = super().load(split)
        return inputs, targets + (split == "test")


def test_a_wrong_test_set_is_found_before_the_training(train, capsys, tmp_path):
    with pytest.raises(SystemExit):
        train("--data", "test_data.WrongTest", "--model.net.sizes", "[3,2]")
    assert (
        "WrongTest has torch.int64 targets from 1 to 2, not int64 from 0 to 1"
        in capsys.readouterr().err
    )
    assert not list(tmp_path.rglob("version_*"))
