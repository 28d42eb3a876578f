"""Regression: generated images of a disc, and the disc's radius."""

from typing import Literal

import torch
from jsonargparse.typing import NonNegativeFloat, NonNegativeInt, PositiveInt
from torch import Tensor

from lightbase import BaseDataModule, Batch, to_float


class Discs(BaseDataModule):
    """Grey images (N, 1, 32, 32) of one disc each, of random place and brightness, on
    noise. The target is its radius, 3 to 12 pixels. Always predicting 7.5 gives a mean
    error of 2.25 pixels.

    Args:
        num_train: Training images, those for validation included.
        num_test: Test images.
        noise: Standard deviation of the noise, where white is 1. Discs are brighter
            than the background by 0.3 to 1.
        data_seed: Another seed makes other images of the same kind.
    """

    image_shape = (1, 32, 32)

    def __init__(
        self,
        num_train: PositiveInt = 20_000,
        num_test: PositiveInt = 4_000,
        noise: NonNegativeFloat = 0.1,
        data_seed: NonNegativeInt = 0,
        **kwargs,
    ) -> None:
        super().__init__(**kwargs)
        self.num_samples = {"train": num_train, "test": num_test}
        self.noise = noise
        self.data_seed = data_seed

    def load(self, split: Literal["train", "test"]) -> Batch:
        """Return images uint8 (N, 1, 32, 32), and radii in pixels float32 (N,)."""
        num = self.num_samples[split]
        seed = 2 * self.data_seed
        if split == "test":
            seed += 1
        generator = torch.Generator().manual_seed(seed)
        radius, x, y, brightness = torch.rand(4, num, 1, 1, generator=generator)
        radius = 3 + 9 * radius
        x = radius + (31 - 2 * radius) * x  # the disc does not leave the image
        y = radius + (31 - 2 * radius) * y
        grid = torch.arange(32.0)
        square = (grid - x).square() + (grid[:, None] - y).square()  # (N, 32, 32)
        # with a soft edge of one pixel
        disc = (radius + 0.5 - square.sqrt_()).clamp_(0, 1)
        images = torch.randn(num, 32, 32, generator=generator).mul_(self.noise)
        images.addcmul_(disc, 0.3 + 0.7 * brightness)
        return images.clamp_(0, 1).mul_(255).to(torch.uint8)[:, None], radius.flatten()

    def normalize(self, inputs: Tensor) -> Tensor:
        return to_float(inputs, mean=0.15, std=0.25)
