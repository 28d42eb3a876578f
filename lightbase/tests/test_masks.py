"""Targets of the images' height and width, such as masks: `augment`, which gets inputs
alone, is refused."""

from typing import Any

import torch
from paths import argv, fails, script
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor

from lightbase import random_flip, to_float
from lightbase.data.module import BaseDataModule

SHORT = argv(
    "--model.net torch.nn.Conv2d --model.net.in_channels 3 --model.net.out_channels 2",
    "--model.net.kernel_size 1 --trainer.max_epochs 1",
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


def test_augment_is_refused_where_the_masks_would_stay_as_they_are(
    train, tmp_path, capsys
):
    error = fails(capsys, 2, lambda: train("--data test_masks.Masks", *SHORT))
    assert "Masks: normalize and augment get the first part" in error
    assert "transform_batch(batch, training)" in error
    assert not list(tmp_path.glob("*/version_*"))


def test_the_classes_of_pixels_train_are_drawn_and_predicted(train, tmp_path, capsys):
    """By the Classifier, whose task is multiclass."""
    more = "--figures_every_n_epochs 1"
    result = train("--data", "test_masks.Plain", *SHORT, more)
    assert 0 < result["test/acc"] < 1
    folder = tmp_path / "tiny" / "version_0"
    events = EventAccumulator(str(folder), size_guidance={"images": 0}).Reload()
    shown = {f"view/predictions/{split}" for split in ("val", "test")}
    assert {*events.Tags()["images"]} == shown | {"view/inputs/train"}
    predict = script("predict").main
    ckpt = ["--ckpt_path", str(folder / "checkpoints" / "best.ckpt")]
    assert "give --output FOLDER" in fails(capsys, 2, lambda: predict(ckpt))
    predict([*ckpt, "--output", str(tmp_path / "masks")])
    with Image.open(tmp_path / "masks" / "0.png") as image:
        assert (image.mode, image.size) == ("P", (8, 8))
