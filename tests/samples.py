"""Generated data that trains in a second. A config names it as `samples.Points`."""

from typing import Literal

import torch
from torch import Tensor

from lightbase import BaseDataModule


class Points(BaseDataModule):
    """Vectors of 10 numbers in two clusters, each a class."""

    classes = ["left", "right"]

    def load(self, split: Literal["train", "test"]) -> tuple[Tensor, Tensor]:
        """Return float32 (N, 10), and labels int64 (N,)."""
        generator = torch.Generator().manual_seed(len(split))
        num = {"train": 1000, "test": 200}[split]
        targets = torch.randint(2, (num,), generator=generator)
        noise = torch.randn(num, 10, generator=generator)
        return noise + 2 * targets[:, None], targets


class Numbers(BaseDataModule):
    """Vectors of 10 numbers. The target is a weighted sum of them."""

    def load(self, split: Literal["train", "test"]) -> tuple[Tensor, Tensor]:
        """Return float32 (N, 10), and targets float32 (N,)."""
        generator = torch.Generator().manual_seed(len(split))
        inputs = torch.randn({"train": 300, "test": 60}[split], 10, generator=generator)
        return inputs, inputs @ torch.linspace(-1, 1, 10)
