"""Generated images."""

import math
from typing import Literal

import torch
from jsonargparse.typing import NonNegativeFloat, NonNegativeInt, PositiveInt
from torch import Tensor

from lightbase import BaseDataModule, Batch
from lightbase.extras.transforms import to_float


class SyntheticImages(BaseDataModule):
    """Striped patches on noise. The class is the direction and the width of the
    stripes.

    Args:
        image_shape: Channels, height, width.
        num_classes: Kinds of stripes.
        num_train: Training images, those for validation included.
        num_test: Test images.
        noise: Standard deviation of the noise, where white is 1.
        data_seed: Another seed makes other images.
    """

    def __init__(
        self,
        image_shape: tuple[PositiveInt, PositiveInt, PositiveInt] = (3, 32, 32),
        num_classes: PositiveInt = 10,
        num_train: PositiveInt = 20_000,
        num_test: PositiveInt = 4_000,
        noise: NonNegativeFloat = 0.2,
        data_seed: NonNegativeInt = 0,
        **kwargs,
    ) -> None:
        super().__init__(**kwargs)
        self.image_shape: tuple[int, int, int] = image_shape
        self.classes = [f"stripes_{i}" for i in range(num_classes)]
        self.num_samples = {"train": num_train, "test": num_test}
        self.noise, self.data_seed = noise, data_seed

    def load(self, split: Literal["train", "test"]) -> Batch:
        num, (channels, height, width) = self.num_samples[split], self.image_shape
        generator = torch.Generator().manual_seed(
            2 * self.data_seed + (split == "test")
        )

        def uniform(low: float, high: float, *shape: int) -> Tensor:
            return torch.empty(num, *shape).uniform_(low, high, generator=generator)

        num_classes = len(self.classes)
        targets = torch.randint(num_classes, (num,), generator=generator)
        num_angles = (
            num_classes + 1
        ) // 2  # the first half of the classes has wide stripes
        angle = (targets % num_angles) * (math.pi / num_angles)
        frequency = (
            2 * math.pi / torch.where(targets < num_angles, 10.0, 5.0)
        )  # radians a pixel
        x, y = torch.arange(width).float(), torch.arange(height).float()
        wave_x = x * (frequency * angle.cos())[:, None]  # (N, W)
        wave_y = y * (frequency * angle.sin())[:, None]  # (N, H)
        radius = min(height, width) / 4
        window_x = torch.exp(
            -((x - uniform(0.3, 0.7, 1) * width) ** 2) / (2 * radius**2)
        )
        window_y = torch.exp(
            -((y - uniform(0.3, 0.7, 1) * height) ** 2) / (2 * radius**2)
        )
        wave = wave_x[:, None, :] + wave_y[:, :, None]  # (N, H, W)
        stripes = torch.sin(wave + uniform(0, 1.4 * math.pi, 1, 1))
        stripes = stripes * window_x[:, None, :] * window_y[:, :, None]
        colour = uniform(0.05, 0.3, 1, 1, 1) * uniform(0.5, 1, channels, 1, 1)
        images = torch.randn(num, channels, height, width, generator=generator).mul_(
            self.noise
        )
        images.addcmul_(stripes[:, None], colour).add_(0.5).clamp_(0, 1)
        return images.mul_(255).to(torch.uint8), targets

    def normalize(self, inputs: Tensor) -> Tensor:
        return to_float(inputs, mean=0.5, std=0.25)
