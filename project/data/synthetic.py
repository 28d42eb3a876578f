"""Images that the template makes itself: to try a network without a network connection, to test, to measure speed."""

import math
from typing import Literal

import torch
from jsonargparse.typing import NonNegativeFloat, NonNegativeInt, PositiveInt
from torch import Tensor

from project.base.datamodule import TensorDataModule
from project.base.samples import Batch
from project.data.transforms import to_float


class SyntheticImages(TensorDataModule):
    """Striped patches on noise, told apart by the direction and the width of their stripes.

    Each image has its own place, size of contrast, colour and phase of the stripes. The phases take up most of a
    circle, so that a class has hardly a mean image: a linear model gets about half of the images right, a small
    convolutional network nearly all of them but the faintest.

    Args:
        image_shape: Channels, height, width: [3, 32, 32] as CIFAR-10, [1, 28, 28] as MNIST.
        num_classes: Kinds of stripes.
        num_train: Training images, those for validation included.
        num_test: Test images.
        noise: Standard deviation of the noise, where white is 1 and the stripes' amplitude 0.3 at most.
        data_seed: Another seed makes other images of the same kind.
    """

    image_shape: tuple[int, int, int]

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
        self.image_shape = image_shape
        self.classes = [f"stripes_{i}" for i in range(num_classes)]
        self.num_samples = {"train": num_train, "test": num_test}
        self.noise = noise
        self.data_seed = data_seed

    def load(self, split: Literal["train", "test"]) -> Batch:
        num = self.num_samples[split]
        generator = torch.Generator().manual_seed(2 * self.data_seed + (split == "test"))
        targets = torch.randint(len(self.classes), (num,), generator=generator)
        return make_stripes(targets, len(self.classes), self.image_shape, self.noise, generator), targets

    def normalize(self, inputs: Tensor) -> Tensor:
        return to_float(inputs, mean=0.5, std=0.25)


def make_stripes(
    targets: Tensor, num_classes: int, image_shape: tuple[int, int, int], noise: float, generator: torch.Generator
) -> Tensor:
    """A uint8 image (N, *image_shape) for each target (N,): the first half of the classes has wide stripes."""
    channels, height, width = image_shape
    num = len(targets)

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return torch.empty(num, *shape).uniform_(low, high, generator=generator)

    directions = (num_classes + 1) // 2
    angle = (targets % directions) * (math.pi / directions)
    frequency = 2 * math.pi / torch.where(targets < directions, 10.0, 5.0)  # radians a pixel
    x = torch.arange(width).float().expand(num, -1)
    y = torch.arange(height).float().expand(num, -1)
    wave = (x * (frequency * angle.cos())[:, None])[:, None, :] + (y * (frequency * angle.sin())[:, None])[:, :, None]
    radius = min(height, width) / 4
    window_x = torch.exp(-((x - uniform(0.3, 0.7, 1) * width) ** 2) / (2 * radius**2))  # (N, W)
    window_y = torch.exp(-((y - uniform(0.3, 0.7, 1) * height) ** 2) / (2 * radius**2))  # (N, H)
    stripes = torch.sin(wave + uniform(0, 1.4 * math.pi, 1, 1)) * window_x[:, None, :] * window_y[:, :, None]
    colour = uniform(0.05, 0.3, 1, 1, 1) * uniform(0.5, 1, channels, 1, 1)
    images = torch.randn(num, channels, height, width, generator=generator).mul_(noise)
    images.addcmul_(stripes[:, None], colour).add_(0.5).clamp_(0, 1)
    return images.mul_(255).to(torch.uint8)
