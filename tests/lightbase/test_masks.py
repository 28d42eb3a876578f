"""Targets of the images' height and width, such as masks: `augment`, which gets inputs alone, is
refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from paths import argv
from torch import Tensor

from lightbase.data.batches import Batch
from lightbase.data.module import BaseDataModule
from lightbase.data.transforms import crop_and_flip, random_flip, to_float

Train = Callable[..., dict[str, Any]]
SHORT = argv(
    "--model.net torch.nn.Conv2d --model.net.in_channels 3 --model.net.out_channels 2",
    "--model.net.kernel_size 1 --trainer.max_steps 2",
)


class Plain(BaseDataModule):
    """Dark pixels and light ones."""

    classes = ["dark", "light"]
    image_shape = (3, 8, 8)

    def load(self, split: str) -> Any:
        images = torch.randint(256, (64, 3, 8, 8), dtype=torch.uint8)
        return images, (images.sum(1) > 380).long()

    def normalize(self, inputs: Tensor) -> Tensor:
        return to_float(inputs)


class Masks(Plain):
    def augment(self, inputs: Tensor) -> Tensor:
        return random_flip(inputs)


class Photos(Plain):
    """A data module with flags for its augmentation, as the shipped ones have."""

    def __init__(self, random_crop: int = 0, random_flip: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.random_crop, self.random_flip = random_crop, random_flip

    def augment(self, inputs: Tensor) -> Tensor:
        return crop_and_flip(inputs, self.random_crop, self.random_flip)


class Joint(Masks):
    """Flips both together; its hook does not call `augment`."""

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        if self.trainer.training:
            both = random_flip(torch.cat([batch[0], batch[1][:, None]], dim=1))
            batch = both[:, :-1], both[:, -1]
        return self.normalize(batch[0]), batch[1]


@pytest.mark.parametrize("flags", ["Masks", "Photos --data.random_crop 2"])
def test_augment_is_refused_where_the_masks_would_stay_as_they_are(train, tmp_path, capsys, flags):
    with pytest.raises(SystemExit) as caught:
        train(f"--data test_masks.{flags}", *SHORT)
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 2
    assert f"augment of {flags.split()[0]}" in error
    assert "8, 8)" in error
    assert "on_after_batch_transfer(batch, dataloader_idx)" in error
    assert not list(tmp_path.glob("*/version_*"))


@pytest.mark.parametrize("kind", ["Joint", pytest.param("Photos", marks=pytest.mark.slow)])
def test_masks_train_without_augment_and_with_a_transform_of_both(train: Train, kind: str) -> None:
    result = train("--data", f"test_masks.{kind}", *SHORT)
    assert result["steps"] == 2
    assert 0 < result["test/acc"] < 1
