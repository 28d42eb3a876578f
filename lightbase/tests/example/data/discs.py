"""Regression: images of a disc, and its radius."""

from typing import Literal

import torch
from torch import Tensor

from lightbase import BaseDataModule, Batch, to_float


class Discs(BaseDataModule):
    """Grey images (N, 1, 32, 32) of a white disc in the middle; its radius is the
    target."""

    image_shape = (1, 32, 32)

    def __init__(
        self, num_train: int = 20_000, num_test: int = 4_000, **kwargs
    ) -> None:
        super().__init__(**kwargs)
        self.num_samples = {"train": num_train, "test": num_test}

    def load(self, split: Literal["train", "test"]) -> Batch:
        generator = torch.Generator().manual_seed(len(split))
        radius = 3 + 9 * torch.rand(self.num_samples[split], generator=generator)
        grid = torch.arange(32.0) - 15.5
        distance = (grid.square() + grid[:, None].square()).sqrt()
        images = (radius[:, None, None] + 0.5 - distance).clamp(0, 1)  # (N, 32, 32)
        return images.mul(255).to(torch.uint8)[:, None], radius

    def normalize(self, inputs: Tensor) -> Tensor:
        return to_float(inputs, mean=0.15, std=0.25)
