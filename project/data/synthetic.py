"""Generated images, to train without a download, for tests, and to measure speed."""

import math
from typing import Literal

import torch
from jsonargparse.typing import NonNegativeFloat, NonNegativeInt, PositiveInt
from torch import Tensor

from lightbase import BaseDataModule, Batch, to_float


class SyntheticImages(BaseDataModule):
    """Striped patches on noise. The class is the direction and the width of the
    stripes; place, contrast, colour and phase are random. A linear model gets about
    half of the images right, a small convolutional network nearly all of them but the
    faintest.

    Args:
        image_shape: Channels, height, width: [3, 32, 32] as CIFAR-10, [1, 28, 28] as
            MNIST.
        num_classes: Kinds of stripes.
        num_train: Training images, those for validation included.
        num_test: Test images.
        noise: Standard deviation of the noise, where white is 1; the amplitude of the
            stripes is 0.3 at most.
        data_seed: Another seed makes other images of the same kind.
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
        self.noise = noise
        self.data_seed = data_seed

    def load(self, split: Literal["train", "test"]) -> Batch:
        """Return images uint8 (N, *image_shape) and their classes int64 (N,)."""
        num = self.num_samples[split]
        num_classes = len(self.classes)
        channels, height, width = self.image_shape
        seed = 2 * self.data_seed
        if split == "test":
            seed += 1
        generator = torch.Generator().manual_seed(seed)

        def uniform(low: float, high: float, *shape: int) -> Tensor:
            return torch.empty(num, *shape).uniform_(low, high, generator=generator)

        targets = torch.randint(num_classes, (num,), generator=generator)
        kinds = targets[:, None, None]  # (N, 1, 1)
        num_angles = (num_classes + 1) // 2
        angle = (kinds % num_angles) * (math.pi / num_angles)
        # the first half of the classes has wide stripes
        pixels = torch.where(kinds < num_angles, 10.0, 5.0)
        frequency = 2 * math.pi / pixels  # in radians a pixel
        x = torch.arange(width).float()
        y = torch.arange(height).float()[:, None]
        wave_x = x * (frequency * angle.cos())  # (N, 1, W)
        wave_y = y * (frequency * angle.sin())  # (N, H, 1)
        radius = min(height, width) / 4
        x_distance = x - uniform(0.3, 0.7, 1, 1) * width  # from the patch's middle
        y_distance = y - uniform(0.3, 0.7, 1, 1) * height
        window_x = torch.exp(-(x_distance**2) / (2 * radius**2))
        window_y = torch.exp(-(y_distance**2) / (2 * radius**2))
        phase = uniform(0, 1.4 * math.pi, 1, 1)
        stripes = torch.sin(wave_x + wave_y + phase)  # (N, H, W)
        stripes = stripes * window_x * window_y
        contrast = uniform(0.05, 0.3, 1, 1, 1)
        colour = contrast * uniform(0.5, 1, channels, 1, 1)
        images = torch.randn(num, channels, height, width, generator=generator)
        images.mul_(self.noise).addcmul_(stripes[:, None], colour)
        images.add_(0.5).clamp_(0, 1)
        return images.mul_(255).to(torch.uint8), targets

    def normalize(self, inputs: Tensor) -> Tensor:
        return to_float(inputs, mean=0.5, std=0.25)
