"""A batch is what the data gives: pairs, dicts, single tensors, lists of tensors of
different sizes. Each is trained, and everything that holds for pairs holds for it."""

import pickle
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from attached import attach
from given import Given
from paths import argv, script
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset, TensorDataset
from written import equal, weights

from lightbase import BaseDataModule, BaseModule, UserError
from lightbase.core.batches import (
    DatasetSamples,
    TensorBatches,
    map_tensors,
    tensors_in,
)


class Named(NamedTuple):
    x: Any
    y: Any


class Rows(Dataset[Any]):
    """A sample is made of a row of 4 numbers by `make`."""

    def __init__(self, rows: Tensor, make: Any) -> None:
        self.rows, self.make = rows, make

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.make(self.rows[index], index)


def as_dict(row: Tensor, index: int) -> Any:
    return {"x": row.numpy() + np.random.rand(), "name": f"row {index}"}


def as_sequence(row: Tensor, index: int) -> Any:
    return row.repeat(1 + index % 3), index % 2


def as_image(row: Tensor, index: int) -> Any:
    """An image of 2 x 2 to 2 x 4 pixels, and its boxes."""
    image = row.view(2, 2).repeat(1, 1 + index % 2)
    return image, {
        "boxes": row[None].repeat(index % 3, 1),
        "labels": torch.arange(index % 3),
    }


def pad(samples: list[Any]) -> Any:
    rows, labels = zip(*samples, strict=True)
    lengths = torch.tensor([len(row) for row in rows])
    return {
        "rows": pad_sequence(rows, batch_first=True),
        "lengths": lengths,
        "labels": labels,
    }


def as_lists(samples: list[Any]) -> Any:
    images, boxes = zip(*samples, strict=True)
    return list(images), list(boxes)


# what `load` makes of rows (N, 4), float64; the collate function; rows (N, 4) of a
# batch
KINDS: dict[str, Any] = {
    "dict": (
        lambda rows: {
            "a": {"x": rows.numpy()},
            "pair": (np.arange(len(rows)), rows[:, 0]),
        },
        None,
        lambda batch: batch["a"]["x"] * batch["pair"][1][:, None],
    ),
    "tensor": (lambda rows: rows, None, lambda batch: batch),
    "three": (
        lambda rows: TensorDataset(rows, rows[:, 0], torch.arange(len(rows))),
        None,
        lambda batch: batch[0] * batch[1][:, None] + batch[2][:, None],
    ),
    "named": (
        lambda rows: Named(rows, rows > 0),
        None,
        lambda batch: batch.x * batch.y,
    ),
    "Dataset of dicts": (
        lambda rows: Rows(rows, as_dict),
        None,
        lambda batch: batch["x"],
    ),
    "sequences": (
        lambda rows: Rows(rows.float(), as_sequence),
        pad,
        lambda batch: batch["rows"][:, :4] / batch["lengths"][:, None],
    ),
    "images of different sizes": (
        lambda rows: Rows(rows.float(), as_image),
        as_lists,
        lambda batch: torch.stack([image[:, :2].flatten() for image in batch[0]]),
    ),
    "arrays and a collate function": (
        lambda rows: (rows, torch.arange(len(rows))),
        as_lists,
        lambda batch: torch.stack(batch[0]),
    ),
}


class Kinds(BaseDataModule):
    def __init__(self, kind: str, num: int = 100, **kwargs: Any) -> None:
        super().__init__(**{"batch_size": 8, **kwargs})
        self.kind, self.num = kind, num
        self.classes = None  # type: ignore[assignment]  # as a user may write

    def load(self, split: str) -> Any:  # type: ignore[override]
        generator = torch.Generator().manual_seed(len(split))
        num = self.num if split == "train" else 21
        return KINDS[self.kind][0](torch.rand(num, 4, generator=generator).double())

    def collate(self, samples: list[Any]) -> Any:
        return (KINDS[self.kind][1] or super().collate)(samples)

    def transform_batch(self, batch: Any, training: bool) -> Any:
        """As the base class: the first part alone changes, which is meant here."""
        return super().transform_batch(batch, training)

    def augment(self, inputs: Any) -> Any:
        def shaken(values: Tensor) -> Tensor:
            return (
                values + torch.rand_like(values)
                if values.is_floating_point()
                else values
            )

        return map_tensors(shaken, inputs)


class Encoder(BaseModule):
    """Learns to give back the rows of the batches of a kind."""

    def __init__(self, kind: str, **kwargs: Any) -> None:
        super().__init__(criterion=nn.MSELoss(), **kwargs)
        self.kind = kind

    def _step(self, stage: Any, batch: Any) -> Tensor:
        rows = KINDS[self.kind][2](batch)
        assert rows.dtype == torch.float32
        outputs = self.net(rows)
        loss = self.criterion(outputs, rows)
        self.track(stage, loss, outputs, rows)
        return loss

    def training_step(self, batch: Any) -> Tensor:
        return self._step("train", batch)

    def validation_step(self, batch: Any) -> None:
        self._step("val", batch)

    def test_step(self, batch: Any) -> None:
        self._step("test", batch)


@pytest.mark.parametrize("kind", KINDS)
def test_a_training_on_batches_of_any_structure_goes_on_exactly(train, tmp_path, kind):
    flags = argv(
        "--model test_structures.Encoder --data test_structures.Kinds --model.kind",
        kind,
    )
    flags += [
        "--data.kind",
        kind,
        "--trainer.max_epochs",
        "2",
        "--figures_every_n_epochs",
        "1",
    ]
    flags += ["--model.net.sizes", "[4,4]"]
    result = train(*flags, "--name", "through")
    assert result["steps"] == 22
    assert result["test/num_samples"] == 21
    train(*flags, "--trainer.max_steps", 14)  # ends within the second epoch
    resumed = train("--ckpt_path", "last", "--trainer.max_steps", -1)
    folders = [tmp_path / name / "version_0" for name in ("through", "tiny")]
    assert equal(*map(weights, folders))
    assert resumed["test/loss"] == result["test/loss"]
    again = script("evaluate").main(
        ["--ckpt_path", str(folders[0] / "checkpoints" / "best.ckpt")]
    )
    assert again == {
        key: value for key, value in result.items() if key.startswith("test/")
    }


def flat(loader: Any) -> list[list[Any]]:
    return [[tensor.tolist() for tensor in tensors_in(batch)] for batch in loader]


@pytest.mark.parametrize("kind", KINDS)
def test_the_batches_do_not_depend_on_workers_or_on_where_the_samples_are(kind):
    def attached(**options: Any) -> Any:
        torch.manual_seed(0)
        return attach(Kinds(kind, **options))

    data = attached()
    batches = flat(data.train_dataloader())
    assert len(batches) == 11
    assert flat(attached(num_workers=1).train_dataloader()) == batches
    loader = data.train_dataloader()
    loader.load_state_dict({"epoch": 0, "num_batches": 4})
    assert flat(loader) == batches[4:]
    # as a worker gets them on macOS and Windows, where nothing is forked
    samples, _ = pickle.loads(ForkingPickler.dumps((loader.dataset, loader.collate_fn)))
    first = [tensor.tolist() for tensor in tensors_in(samples.__getitems__([5, 7]))]
    assert first == [
        tensor.tolist() for tensor in tensors_in(loader.dataset.__getitems__([5, 7]))
    ]
    if isinstance(samples, TensorBatches):
        moved = samples.to(torch.device("cpu"))
        assert len(moved) == len(tensors_in(moved.values)[0]) == 90


@pytest.mark.parametrize("kind", ["dict", "Dataset of dicts"])
def test_folds_of_any_structure(kind: str) -> None:
    modules = [
        attach(Kinds(kind, num_folds=3, fold=fold), "test") for fold in (0, 1, 2)
    ]
    assert [len(data.splits["test"]) for data in modules] == [34, 33, 33]


def test_the_types_of_a_batch() -> None:
    """float64 becomes float32 everywhere; only the targets of a pair change from
    uint8."""
    batch = next(iter(attach(Kinds("dict")).train_dataloader()))
    assert batch["a"]["x"].dtype == batch["pair"][1].dtype == torch.float32
    assert batch["pair"][0].dtype == torch.int64
    batch = next(iter(attach(Kinds("named")).train_dataloader()))
    assert isinstance(batch, Named)
    assert batch.y.dtype == torch.int64
    _, targets = attach(Given(([[1, 2]] * 50, np.arange(50.0)))).splits["train"].values
    assert targets.dtype == torch.float32
    masks = torch.zeros(50, 2, dtype=torch.uint8)

    class Boxes(Kinds):
        def load(self, split: str) -> Any:
            return torch.rand(50, 3), {"masks": masks}

    batch = next(iter(attach(Boxes("dict")).train_dataloader()))
    assert batch[1]["masks"].dtype == torch.uint8


class Both(Kinds):
    """Adds to both parts in training, and scales the second one always."""

    def transform_batch(self, batch: Any, training: bool) -> Any:
        x, y = batch
        return (x + 1, y + 1) if training else (x, y / 2)


class Inputs(Kinds):
    """Adds to the inputs in training, and halves them always."""

    def augment(self, inputs: Any) -> Any:
        return inputs + 1

    def normalize(self, inputs: Any) -> Any:
        return inputs / 2


@pytest.mark.parametrize(
    ("cls", "training", "evaluation"),
    [(Both, [1, 3], [0, 1]), (Inputs, [0.5, 2], [0, 2])],
)
def test_the_hooks_of_a_batch_on_its_device(cls, training, evaluation):
    data = attach(cls("tensor"), precision="bf16-true")
    for data.trainer.training, expected in ((True, training), (False, evaluation)):
        batch = data.on_after_batch_transfer(
            (torch.zeros(8, 4), torch.full((8,), 2.0)), 0
        )
        assert [part.unique().item() for part in batch] == expected
        assert {part.dtype for part in batch} == {torch.bfloat16}


def test_a_function_of_the_user_may_be_an_attribute() -> None:
    data = Kinds("tensor")
    data.collate = lambda samples: torch.stack(samples)  # type: ignore[assignment,method-assign]
    attach(data)
    assert isinstance(data.splits["train"], DatasetSamples)
    assert torch.equal(
        data.splits["train"].__getitems__([0])[0], data.splits["train"].dataset[0]
    )


UNEQUAL = [
    ({"x": torch.zeros(5, 2), "y": [1, 2, 3]}, "arrays of .5, 3. samples"),
    (
        (torch.zeros(5), (torch.zeros(5), torch.tensor(1.0))),
        "arrays of .5, 5, 1. samples",
    ),
    ((), "arrays of .. samples"),
    ("text", "is a str:\nload returns arrays, or a Dataset"),
]


@pytest.mark.parametrize(("loaded", "message"), UNEQUAL)
def test_what_is_no_data_is_refused_with_its_sizes(monkeypatch, loaded, message):
    monkeypatch.setitem(KINDS, "wrong", (lambda rows: loaded, None, None))
    with pytest.raises(UserError, match=message):
        attach(Kinds("wrong"))
