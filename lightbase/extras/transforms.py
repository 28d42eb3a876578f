"""Transforms of whole batches of images, (N, C, H, W), on any device.

Random choices come from the generator of the images' device. Its state is in every
checkpoint.
"""

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional


def to_float(images: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor:
    """uint8 images in [0, 255] to float32: scaled to [0, 1], then (x - mean) / std."""
    x = images / 255  # in one pass, and as exact as images.float() / 255
    if mean:
        x = x.sub_(mean)
    return x.div_(std) if std != 1 else x


def random_flip(images: Tensor) -> Tensor:
    """Mirror each image left to right with probability 1/2. Any dtype."""
    return flip_where(torch.rand(len(images), device=images.device) < 0.5, images)


def alternating_flip(images: Tensor, epoch: int) -> Tensor:
    """Mirror half of the images, uint8, in even epochs and the other half in odd
    epochs: two epochs show each image both ways.

    The pixels of an image decide which half it is in. After K. Jordan, 2024, arXiv
    2404.00498.
    """
    if images.dtype != torch.uint8:
        raise ValueError(
            f"alternating_flip takes uint8 images, and these are {images.dtype}"
        )
    return flip_where((images.sum((1, 2, 3)) + epoch) % 2 == 1, images)


def flip_where(mask: Tensor, images: Tensor) -> Tensor:
    """Mirror the images where the mask, bool (N,), is true."""
    # index_select copies image by image, which is faster than torch.where, pixel by
    # pixel.
    both = torch.cat([images, images.flip(-1)])
    index = torch.arange(len(images), device=images.device) + len(images) * mask
    return both.index_select(0, index)


def random_crop(
    images: Tensor, padding: int, mode: Literal["constant", "reflect"] = "constant"
) -> Tensor:
    """Shift each image by up to `padding` pixels each way. Zeros, or its mirror image,
    fill the edge. Any dtype."""
    padded = functional.pad(images, [padding] * 4, mode)
    image_stride, *strides = padded.stride()
    top, left = torch.randint(2 * padding + 1, (2, len(images)), device=images.device)
    first = image_stride * torch.arange(len(images), device=images.device)
    first = first + strides[1] * top + strides[2] * left
    # From its first pixel to its last, a crop is one piece of memory. Copying the piece
    # is faster than copying the pixels of the crop one by one.
    sizes = zip(images.shape[1:], strides, strict=True)
    length = 1 + sum((size - 1) * stride for size, stride in sizes)
    pieces = padded.as_strided(
        (padded.numel() - length + 1, length), (1, 1)
    ).index_select(0, first)
    return pieces.as_strided(images.shape, (length, *strides)).contiguous()


def crop_and_flip(
    images: Tensor,
    padding: int,
    flip: bool,
    mode: Literal["constant", "reflect"] = "constant",
) -> Tensor:
    """`random_crop`, unless `padding` is 0, then `random_flip`, if `flip`."""
    images = random_crop(images, padding, mode) if padding else images
    return random_flip(images) if flip else images
