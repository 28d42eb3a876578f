"""A batch is what the data gives: pairs, dicts, single tensors, lists of tensors of
different sizes. Each is trained, and everything that holds for pairs holds for it."""

import random
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from attached import attach
from given import Given
from paths import script
from torch import Tensor, nn
from torch.utils.data import Dataset
from written import checkpoint_file, equal, weights

from lightbase import BaseDataModule, BaseModule
from lightbase.data.tensors import map_tensors, tensors_in


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
    shift = np.random.rand() + random.random() + torch.rand(()).item()
    return {"x": row.numpy() + shift, "name": f"row {index}"}


def as_image(row: Tensor, index: int) -> Any:
    """An image of 2 x 2 to 2 x 4 pixels, and its boxes."""
    image = row.float().view(2, 2).repeat(1, 1 + index % 2)
    return image, {"boxes": row[None].repeat(index % 3, 1)}


def as_lists(samples: list[Any]) -> Any:
    images, boxes = zip(*samples, strict=True)
    return list(images), list(boxes)


# what `load` makes of rows (N, 4), float64; the collate function; rows (N, 4) of a
# batch
KINDS: dict[str, Any] = {
    "dict": (
        lambda rows: {"x": rows.numpy(), "y": (np.arange(len(rows)), rows[:, 0])},
        None,
        lambda batch: batch["x"] * batch["y"][1][:, None],
    ),
    "tensor": (lambda rows: rows, None, lambda batch: batch),
    "Dataset of dicts": (
        lambda rows: Rows(rows, as_dict),
        None,
        lambda batch: batch["x"],
    ),
    "images of different sizes": (
        lambda rows: Rows(rows, as_image),
        as_lists,
        lambda batch: torch.stack([image[:, :2].flatten() for image in batch[0]]),
    ),
}


def shaken(values: Tensor) -> Tensor:
    if values.is_floating_point():
        return values + torch.rand_like(values)
    return values


class Kinds(BaseDataModule):
    def __init__(self, kind: str, **kwargs: Any) -> None:
        super().__init__(**{"batch_size": 8, **kwargs})
        self.kind = kind
        if KINDS[kind][1]:
            self.collate = KINDS[kind][1]

    def load(self, split: str) -> Any:  # type: ignore[override]
        generator = torch.Generator().manual_seed(len(split))
        num = {"train": 100, "test": 21}[split]
        return KINDS[self.kind][0](torch.rand(num, 4, generator=generator).double())

    def transform_batch(self, batch: Any, training: bool) -> Any:
        """As the base class: the first part alone changes, which is meant here."""
        return super().transform_batch(batch, training)

    def augment(self, inputs: Any) -> Any:
        return map_tensors(shaken, inputs)


class Encoder(BaseModule):
    """Learns to give back the rows of the batches of a kind."""

    def __init__(self, kind: str, **kwargs: Any) -> None:
        super().__init__(criterion=nn.MSELoss(), **kwargs)
        self.rows_of = KINDS[kind][2]

    def _step(self, stage: Any, batch: Any) -> Tensor:
        rows = self.rows_of(batch)
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


@pytest.mark.parametrize(
    "kind",
    ["dict", *(pytest.param(k, marks=pytest.mark.slow) for k in KINDS if k != "dict")],
)
def test_a_training_on_batches_of_any_structure_goes_on_exactly(train, tmp_path, kind):
    flags = ["--model test_structures.Encoder --model.kind", kind]
    flags += ["--data test_structures.Kinds --data.kind", kind]
    flags += ["--model.net.sizes [4,4] --figures_every_n_epochs 1"]
    result = train(*flags, "--name through")
    assert result["steps"] == 22
    assert result["test/num_samples"] == 21
    train(*flags, "--trainer.max_steps 14")  # ends within the second epoch
    resumed = train("--ckpt_path last --trainer.max_steps -1")
    folders = [tmp_path / name / "version_0" for name in ("through", "tiny")]
    assert equal(*map(weights, folders))
    assert resumed["test/loss"] == result["test/loss"]
    best = str(checkpoint_file(folders[0]))
    again = script("evaluate").main(["--ckpt_path", best])
    assert again.items() <= result.items()


def flat(batch: Any) -> list[Any]:
    return [tensor.tolist() for tensor in tensors_in(batch)]


def random_state() -> str:
    state = torch.random.get_rng_state().tolist(), random.getstate()
    return f"{state} {np.random.get_state()}"


@pytest.mark.parametrize("kind", KINDS)
def test_the_batches_do_not_depend_on_workers_or_on_where_the_samples_are(kind):
    """Nor do random transforms; they leave the numbers of the training."""
    found = []
    for num_workers in (2, 0):
        torch.manual_seed(0)
        data = attach(Kinds(kind, num_workers=num_workers))
        before = random_state()
        loader = data.train_dataloader()
        found.append([*map(flat, loader)])
        assert random_state() == before
    of_workers, batches = found
    assert len(batches) == 11
    assert of_workers == batches
    val = data.val_dataloader()
    assert [*map(flat, val)] == [*map(flat, val)]
    loader.batch_sampler.set_epoch(1)
    second = [*map(flat, loader)]
    assert not any(batch in batches for batch in second)
    loader.load_state_dict({"epoch": 1, "num_batches": 4})
    assert [*map(flat, loader)] == second[4:]


def first_batch(data: BaseDataModule) -> Any:
    return next(iter(attach(data).train_dataloader()))


def test_the_types_of_a_batch() -> None:
    """float64 becomes float32 everywhere; only the targets of a pair change from
    uint8."""
    batch = first_batch(Kinds("dict"))
    assert batch["x"].dtype == batch["y"][1].dtype == torch.float32
    assert batch["y"][0].dtype == torch.int64
    batch = first_batch(Given(Named(torch.rand(50, 3), [True] * 50)))
    assert isinstance(batch, Named)
    assert batch.y.dtype == torch.int64
    _, targets = first_batch(Given(([[1, 2]] * 50, np.arange(50.0))))
    assert targets.dtype == torch.float32
