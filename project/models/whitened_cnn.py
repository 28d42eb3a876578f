"""A small convolutional network that learns fast: its first layer is computed from the
data, not trained."""

from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from jsonargparse.typing import PositiveInt
from lightning import Callback
from torch import Tensor, nn
from torch.nn import functional

from lightbase import UserError

PATCH = 2  # height and width of what the first layer sees
EPSILON = 5e-4
"""A share of the mean variance. It limits the scale of directions without variance."""


class Whiten(nn.Module):
    """A convolution whose outputs are uncorrelated and have variance 1; each comes with
    both signs.

    `fit` computes the weights from images. The weights are not trained, the bias is.
    Before `fit` the outputs are the pixels of the patches.

    is_computed: Whether the weights are from `fit`, here or in the run of a file.

    Input (N, in_channels, H, W), output (N, 2 x in_channels x 4, H - 1, W - 1).
    """

    weight: Tensor
    offset: Tensor
    is_computed = False

    def __init__(self, in_channels: int) -> None:
        super().__init__()
        num_inputs = in_channels * PATCH**2
        directions = torch.eye(num_inputs).view(-1, in_channels, PATCH, PATCH)
        self.register_buffer("weight", torch.cat([directions, -directions]))
        zeros = torch.zeros(2 * num_inputs)
        self.register_buffer("offset", zeros)  # takes the mean off
        self.bias = nn.Parameter(zeros.clone())
        self.register_load_state_dict_post_hook(note_loaded)

    def forward(self, x: Tensor) -> Tensor:
        return functional.conv2d(x, self.weight, self.bias + self.offset)

    @torch.no_grad()
    def fit(self, images: Tensor) -> None:
        """Compute the weights from images (N, in_channels, H, W), as the network gets
        them, in the precision of the weights."""
        patches = (
            functional.unfold(images.to(self.weight), PATCH)
            .transpose(1, 2)
            .flatten(0, 1)  # (num_patches, num_inputs)
        )
        mean = patches.mean(0)
        patches -= mean
        covariance = patches.T @ patches / len(patches)
        variances, directions = torch.linalg.eigh(covariance.double())
        variances += EPSILON * variances.mean()
        scale = variances.clamp_min(1e-12).rsqrt()
        weight = (directions * scale).T.flip(0).to(mean)  # the largest variance first
        weight = torch.cat([weight, -weight])
        self.weight.copy_(weight.view_as(self.weight))
        self.offset.copy_(-weight @ mean)
        self.is_computed = True


def note_loaded(layer: Any, incompatible_keys: Any) -> None:
    """Note whether a Whiten has got weights from a file of a run that has computed
    them: then the mean is not 0."""
    layer.is_computed = bool(layer.offset.any())


def conv(in_channels: int, out_channels: int) -> nn.Conv2d:
    """Return a 3x3 convolution whose first in_channels outputs start as copies of its
    inputs."""
    layer = nn.Conv2d(in_channels, out_channels, 3, padding="same", bias=False)
    nn.init.dirac_(layer.weight.data[:in_channels])
    return layer


def norm(channels: int, eps: float) -> nn.BatchNorm2d:
    """Return a batch norm whose scale is 1 and not trained."""
    layer = nn.BatchNorm2d(channels, eps, momentum=0.4)
    layer.weight.requires_grad = False
    return layer


def block(in_channels: int, out_channels: int, norm_eps: float) -> nn.Sequential:
    """Return two 3x3 convolutions, each with batch norm and GELU. Max pooling after the
    first one halves height and width.

    Input (N, in_channels, H, W), output (N, out_channels, H // 2, W // 2).
    """
    return nn.Sequential(
        OrderedDict(
            conv1=conv(in_channels, out_channels),
            pool=nn.MaxPool2d(2),
            norm1=norm(out_channels, norm_eps),
            gelu1=nn.GELU(),
            conv2=conv(out_channels, out_channels),
            norm2=norm(out_channels, norm_eps),
            gelu2=nn.GELU(),
        )
    )


class WhitenedCNN(nn.Module):
    """Whitening, three blocks, a linear layer: 1,972,504 parameters for CIFAR-10.

    The network of K. Jordan, "94% on CIFAR-10 in 3.29 seconds on a single GPU", 2024,
    arXiv 2404.00498. `WhitenFirstLayer` computes the first layer.

    Input (N, in_channels, H, W), at least 25 x 25; output (N, num_classes) logits.

    Args:
        widths: Channels of the blocks.
        scale: Factor of the logits; a small one keeps the network from being sure too
            early.
        mirror: Outside training, average the logits of the images and of the images
            mirrored left to right. The default is true for three channels, as of
            photographs, and false for others, such as digits.
        translate: Outside training, also average over the images shifted by a pixel up
            and left, and down and right. Half of the weight stays with the images that
            are not shifted.
        norm_eps: What the batch norms add to the variance.

    In training mode `forward` raises UserError if the first layer is not computed.
    """

    def __init__(
        self,
        num_classes: int,
        in_channels: int = 3,
        widths: Sequence[int] = (64, 256, 256),
        scale: float = 1 / 9,
        mirror: bool | None = None,
        translate: bool = False,
        norm_eps: float = 1e-5,
    ) -> None:
        super().__init__()
        self.whiten = Whiten(in_channels)
        channels = [len(self.whiten.weight), *widths]
        self.blocks = nn.Sequential(
            *(block(*pair, norm_eps) for pair in pairwise(channels))
        )
        self.head = nn.Linear(channels[-1], num_classes, bias=False)
        self.scale = scale
        if mirror is None:
            mirror = in_channels == 3
        self.mirror = mirror
        self.translate = translate

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            if not self.whiten.is_computed:
                raise UserError(
                    "WhitenedCNN: its first layer is not computed from the data",
                    "add its callback: --trainer.callbacks+ "
                    "project.models.whitened_cnn.WhitenFirstLayer",
                )
            return self.logits(x)
        views = [x]
        if self.translate:
            padded = functional.pad(x, (1, 1, 1, 1), "reflect")
            views += [padded[..., :-2, :-2], padded[..., 2:, 2:]]
        if self.mirror:
            views += [view.flip(-1) for view in views]
        logits = [self.logits(view) for view in views]
        if self.translate:
            logits += logits[::3]  # half of the weight is of the images as they are
        return torch.stack(logits).mean(0)

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits of the images as they are."""
        x = self.blocks(functional.gelu(self.whiten(x)))
        return self.head(x.amax((2, 3))) * self.scale


class WhitenFirstLayer(Callback):
    """Computes the first layer of a WhitenedCNN from training images, as the network
    gets them, at the start of a new training. A resume keeps its weights, and so does
    `--model.weights`.

    Args:
        num_images: How many images the weights are computed from. They are spread
            over the training split.
        bias_epochs: The bias of the layer is trained in so many epochs, then it stays.
            The default is to train it in all epochs.
    """

    is_recordable = True  # in a CUDA graph, which is of one epoch

    def __init__(
        self, num_images: PositiveInt = 1000, bias_epochs: PositiveInt | None = None
    ) -> None:
        self.num_images = num_images
        self.bias_epochs = bias_epochs

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage != "fit" or trainer.ckpt_path or pl_module.weights_file:
            return
        data = trainer.datamodule
        samples = data.splits["train"]
        num = min(len(samples), self.num_images)
        images, _ = samples.__getitems__([i * len(samples) // num for i in range(num)])
        pl_module.net.whiten.fit(data.normalize(images))

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, _: Any) -> None:
        """Take the gradient of the bias away after `bias_epochs`. Optimizers skip a
        parameter without a gradient, so that its momentum does not move it either."""
        if self.bias_epochs and trainer.current_epoch >= self.bias_epochs:
            pl_module.net.whiten.bias.grad = None
