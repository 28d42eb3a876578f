"""Targets of the images' height and width, such as masks: `augment`, which gets inputs
alone, is refused."""

from typing import Any

import pytest
import torch
from paths import argv
from torch import Tensor

from lightbase import (
    crop_and_flip,
    flip_where,
    random_flip,
    to_float,
)
from lightbase.core.data import BaseDataModule

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

    def __init__(
        self, random_crop: int = 0, random_flip: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.random_crop, self.random_flip = random_crop, random_flip

    def augment(self, inputs: Tensor) -> Tensor:
        return crop_and_flip(inputs, self.random_crop, self.random_flip)


class Joint(Masks):
    """Flips both together, and scales without `normalize`."""

    normalize: Any = None

    def transform_batch(self, batch: Any, training: bool) -> Any:
        images, masks = batch
        if training:
            is_flipped = torch.rand(len(images), device=images.device) < 0.5
            images, masks = (
                flip_where(is_flipped, images),
                flip_where(is_flipped, masks),
            )
        return to_float(images), masks


@pytest.mark.parametrize("flags", ["Masks", "Photos --data.random_crop 2"])
def test_augment_is_refused_where_the_masks_would_stay_as_they_are(
    train, tmp_path, capsys, flags
):
    with pytest.raises(SystemExit) as caught:
        train(f"--data test_masks.{flags}", *SHORT)
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 2
    assert f"of {flags.split()[0]} are images of the size of the inputs" in error
    assert "8, 8)" in error
    assert "transform_batch(batch, training)" in error
    assert not list(tmp_path.glob("*/version_*"))


@pytest.mark.parametrize(
    "kind", ["Joint", pytest.param("Photos", marks=pytest.mark.slow)]
)
def test_masks_train_without_augment_and_with_a_transform_of_both(
    train: Any, kind: str
) -> None:
    result = train("--data", f"test_masks.{kind}", *SHORT)
    assert result["steps"] == 2
    assert 0 < result["test/acc"] < 1


def test_both_are_flipped_together_in_training_alone() -> None:
    data = Joint()
    images, masks = data.load("train")
    for training in (True, False):
        inputs, targets = data.transform_batch((images, masks), training)
        assert torch.equal((inputs.sum(1) * 255 > 380.5).long(), targets)
        assert torch.equal(targets, masks) != training
