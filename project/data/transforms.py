"""Transforms of whole batches of images, (N, C, H, W), on any device.

Random choices come from the generator of the images' device: the state of that generator is in every checkpoint.
"""

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional


def to_float(images: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor:
    """uint8 images in [0, 255] to float32: scaled to [0, 1], then (x - mean) / std."""
    x = images / 255  # one pass, as exact as a float divided
    if mean:
        x = x.sub_(mean)
    return x.div_(std) if std != 1 else x


def random_flip(images: Tensor) -> Tensor:
    """Mirror each image left to right with probability 1/2. Any dtype."""
    flip = torch.rand(len(images), 1, 1, 1, device=images.device) < 0.5
    return torch.where(flip, images.flip(-1), images)


def alternating_flip(images: Tensor, epoch: int) -> Tensor:
    """Mirror half of the images in even epochs and the other half in odd ones: two epochs show each image both ways.

    Which half an image is in follows from its pixels, uint8. K. Jordan, arXiv 2404.00498, section 3.6.
    """
    flip = (images.sum((1, 2, 3)) + epoch) % 2 == 1
    return torch.where(flip[:, None, None, None], images.flip(-1), images)


def random_crop(images: Tensor, padding: int, mode: Literal["constant", "reflect"] = "constant") -> Tensor:
    """Shift each image by up to `padding` pixels each way, zeros or its mirror image moving in. Any dtype."""
    num, _, height, width = images.shape
    padded = functional.pad(images, [padding] * 4, mode)
    crops = padded.unfold(2, height, 1).unfold(3, width, 1)  # (N, C, 2p+1, 2p+1, H, W), a view
    top, left = torch.randint(2 * padding + 1, (2, num), device=images.device)
    return crops[torch.arange(num, device=images.device), :, top, left]


def crop_and_flip(
    images: Tensor, padding: int, flip: bool, mode: Literal["constant", "reflect"] = "constant"
) -> Tensor:
    """`random_crop`, unless `padding` is 0, then `random_flip`, if asked for."""
    images = random_crop(images, padding, mode) if padding else images
    return random_flip(images) if flip else images


def mirrored(images: Tensor) -> list[Tensor]:
    """For `model.test_views`: each image as it is, and left to right."""
    return [images, images.flip(-1)]
