"""Targets of the images' height and width, such as masks: `augment`, which gets inputs
alone, is refused."""

from typing import Any

import pytest
import torch
from paths import argv, fails
from torch import Tensor

from lightbase import flip_where, random_flip, to_float
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


class Joint(Masks):
    """Flips both together."""

    def transform_batch(self, batch: Any, training: bool) -> Any:
        images, masks = batch
        if training:
            is_flipped = torch.rand(len(images), device=images.device) < 0.5
            images = flip_where(is_flipped, images)
            masks = flip_where(is_flipped, masks)
        return to_float(images), masks


def test_augment_is_refused_where_the_masks_would_stay_as_they_are(
    train, tmp_path, capsys
):
    error = fails(capsys, 2, lambda: train("--data test_masks.Masks", *SHORT))
    assert "Masks has targets (8, 8) for inputs (3, 8, 8)" in error
    assert "transform_batch(batch, training)" in error
    assert not list(tmp_path.glob("*/version_*"))


@pytest.mark.parametrize("name", ["Plain", "Joint"])
def test_masks_train_without_augment_and_with_a_transform_of_both(train, name):
    result = train("--data", f"test_masks.{name}", *SHORT)
    assert result["steps"] == 2
    assert 0 < result["test/acc"] < 1
