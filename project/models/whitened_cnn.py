"""A small convolutional network that learns fast: its first layer is computed from the
data, not trained."""

from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from lightning import Callback
from torch import Tensor, nn
from torch.nn import functional

PATCH = 2  # height and width of what the first layer sees
NUM_IMAGES = 1000  # from which the first layer is computed
EPSILON = 5e-4
"""A share of the mean variance. It limits the scale of directions without variance."""


class Whiten(nn.Module):
    """A convolution whose outputs are uncorrelated and have variance 1; each comes with
    both signs.

    `fit` computes the weights from images. The weights are not trained, the bias is.
    Before `fit` the outputs are the pixels of the patches.

    Input (N, in_channels, H, W), output (N, 2 x in_channels x 4, H - 1, W - 1).
    """

    weight: Tensor
    offset: Tensor

    def __init__(self, in_channels: int) -> None:
        super().__init__()
        num_inputs = in_channels * PATCH**2
        directions = torch.eye(num_inputs).view(-1, in_channels, PATCH, PATCH)
        self.register_buffer("weight", torch.cat([directions, -directions]))
        zeros = torch.zeros(2 * num_inputs)
        self.register_buffer("offset", zeros)  # takes the mean off
        self.bias = nn.Parameter(zeros.clone())

    def forward(self, x: Tensor) -> Tensor:
        return functional.conv2d(x, self.weight, self.bias + self.offset)

    @torch.no_grad()
    def fit(self, images: Tensor) -> None:
        """Compute the weights from images (N, in_channels, H, W), as the network gets
        them."""
        patches = functional.unfold(images, PATCH).transpose(1, 2)
        patches = patches.flatten(0, 1)  # (num_patches, num_inputs)
        mean = patches.mean(0)
        patches = patches - mean
        covariance = patches.T @ patches / len(patches)
        variances, directions = torch.linalg.eigh(covariance.double())
        variances = variances + EPSILON * variances.mean()
        scale = variances.clamp_min(1e-12).rsqrt()
        weight = (directions * scale).T.flip(0).to(images)  # the largest variance first
        weight = torch.cat([weight, -weight])
        self.weight.copy_(weight.view_as(self.weight))
        self.offset.copy_(-weight @ mean)


def conv(in_channels: int, out_channels: int) -> nn.Conv2d:
    """Return a 3x3 convolution whose first in_channels outputs start as copies of its
    inputs."""
    layer = nn.Conv2d(in_channels, out_channels, 3, padding="same", bias=False)
    nn.init.dirac_(layer.weight.data[:in_channels])
    return layer


def norm(channels: int) -> nn.BatchNorm2d:
    """Return a batch norm whose scale is 1 and not trained."""
    layer = nn.BatchNorm2d(channels, momentum=0.4)
    layer.weight.requires_grad = False
    return layer


def block(in_channels: int, out_channels: int) -> nn.Sequential:
    """Return two 3x3 convolutions, each with batch norm and GELU. Max pooling after the
    first one halves height and width.

    Input (N, in_channels, H, W), output (N, out_channels, H // 2, W // 2).
    """
    return nn.Sequential(
        OrderedDict(
            conv1=conv(in_channels, out_channels),
            pool=nn.MaxPool2d(2),
            norm1=norm(out_channels),
            gelu1=nn.GELU(),
            conv2=conv(out_channels, out_channels),
            norm2=norm(out_channels),
            gelu2=nn.GELU(),
        )
    )


class WhitenedCNN(nn.Module):
    """Whitening, three blocks, a linear layer: 1,972,504 parameters for CIFAR-10.

    The network of K. Jordan, "94% on CIFAR-10 in 3.29 seconds on a single GPU", 2024,
    arXiv 2404.00498. There the bias of the whitening is trained in the first three
    epochs only.

    Input (N, in_channels, H, W), at least 25 x 25; output (N, num_classes) logits.

    Args:
        widths: Channels of the blocks.
        scale: Factor of the logits; a small one keeps the network from being sure too
            early.
        mirror: Outside training, average the logits of the images and of the images
            mirrored left to right. The default is true for three channels, as of
            photographs, and false for others, such as digits.
    """

    def __init__(
        self,
        num_classes: int,
        in_channels: int = 3,
        widths: Sequence[int] = (64, 256, 256),
        scale: float = 1 / 9,
        mirror: bool | None = None,
    ) -> None:
        super().__init__()
        self.whiten = Whiten(in_channels)
        channels = [len(self.whiten.weight), *widths]
        self.blocks = nn.Sequential(*(block(*pair) for pair in pairwise(channels)))
        self.head = nn.Linear(channels[-1], num_classes, bias=False)
        self.scale = scale
        if mirror is None:
            mirror = in_channels == 3
        self.mirror = mirror

    def forward(self, x: Tensor) -> Tensor:
        if self.training or not self.mirror:
            return self.logits(x)
        return torch.stack([self.logits(x), self.logits(x.flip(-1))]).mean(0)

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits of the images as they are."""
        x = self.blocks(functional.gelu(self.whiten(x)))
        return self.head(x.amax((2, 3))) * self.scale


class WhitenFirstLayer(Callback):
    """Computes the first layer of a WhitenedCNN from training images, as the network
    gets them, at the start of a new training. A resume keeps its weights, and so does
    `--model.weights`."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage != "fit" or trainer.ckpt_path or pl_module.weights_file:
            return
        data = trainer.datamodule
        samples = data.splits["train"]
        num = min(len(samples), NUM_IMAGES)
        images, _ = samples.__getitems__([i * len(samples) // num for i in range(num)])
        layer = pl_module.net.whiten
        layer.fit(data.normalize(images).to(layer.weight))  # in its precision
