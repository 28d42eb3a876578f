"""Small networks and data that several test files train: what a test needs of a user's
code, and no more."""

from typing import Any, Literal

import torch
from example.data.synthetic import SyntheticImages
from torch import Tensor, nn

from lightbase.data.module import BaseDataModule
from lightbase.data.tensors import Batch


class ConvNet(nn.Module):
    """A convolution and a linear layer; takes what the data knows."""

    def __init__(self, num_classes: int = 3, in_channels: int = 3) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, 4, kernel_size=3, stride=2, padding=1)
        self.head = nn.Linear(4, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.conv(x).relu().mean((2, 3)))


class Augmented(SyntheticImages):
    """Images that are mirrored at random in training."""

    def augment(self, inputs: Tensor) -> Tensor:
        return torch.where(
            torch.rand(len(inputs), 1, 1, 1, device=inputs.device) < 0.5,
            inputs.flip(3),
            inputs,
        )


class Points(BaseDataModule):
    """Vectors of 10 numbers, no images, in two clusters."""

    classes = ["left", "right"]

    def load(self, split: Literal["train", "test"]) -> Batch:
        generator = torch.Generator().manual_seed(len(split))
        num = {"train": 100, "test": 30}[split]
        targets = torch.randint(2, (num,), generator=generator)
        return torch.randn(num, 10, generator=generator) + targets[:, None], targets


class Numbers(BaseDataModule):
    """Regression: 10 numbers, the target is a weighted sum of them; as column (N, 1),
    or plain (N,)."""

    def __init__(self, column: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.column = column

    def load(self, split: Literal["train", "test"]) -> Batch:
        generator = torch.Generator().manual_seed(len(split))
        inputs = torch.randn({"train": 300, "test": 60}[split], 10, generator=generator)
        targets = inputs @ torch.linspace(-1, 1, 10)
        return inputs, targets[:, None] if self.column else targets
