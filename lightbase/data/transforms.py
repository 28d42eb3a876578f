"""Transforms of batches of images (N, C, H, W), on any device.

They take random numbers from the default generator of the device of the images. Its
state is in every checkpoint, so the transforms repeat after a resume.
"""

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional


def to_float(images: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor:
    """Return uint8 images in [0, 255] as float32. They are scaled to [0, 1], and then
    standardised: (x - mean) / std.

    Args:
        mean: The mean of all pixels and channels, on the scale from 0 to 1.
        std: The standard deviation of all pixels and channels, on the same scale.
    """
    # faster than images.float() / 255, and just as exact: it reads the bytes only once
    x = images / 255
    if mean:
        x.sub_(mean)
    if std != 1:
        x.div_(std)
    return x


def random_flip(images: Tensor) -> Tensor:
    """Return images (N, C, H, W) of any dtype, each mirrored left to right with
    probability 1/2."""
    return flip_where(torch.rand(len(images), device=images.device) < 0.5, images)


def alternating_flip(images: Tensor, epoch: int) -> Tensor:
    """Return the images, half of them mirrored left to right: those with an even sum of
    pixels in odd epochs, the others in even epochs. So two epochs show each image both
    ways, which random flips do for only half of the images. After K. Jordan, 2024,
    arXiv 2404.00498. A sum of floats is neither even nor odd.

    Args:
        images: uint8 (N, C, H, W), before other random transforms.
        epoch: The number of the epoch.
    """
    if images.dtype != torch.uint8:
        raise ValueError(f"alternating_flip takes uint8 images, not {images.dtype}")
    return flip_where((images.sum((1, 2, 3)) + epoch) % 2 == 1, images)


def flip_where(mask: Tensor, images: Tensor) -> Tensor:
    """Return the images (N, C, H, W), mirrored left to right where the mask (N,) is
    true."""
    # index_select copies whole images. torch.where chooses pixel by pixel, which is
    # slower.
    both = torch.cat([images, images.flip(-1)])
    index = torch.arange(len(images), device=images.device) + len(images) * mask
    return both.index_select(0, index)


def random_crop(
    images: Tensor, padding: int, mode: Literal["constant", "reflect"] = "constant"
) -> Tensor:
    """Return the images, each shifted at random by up to `padding` pixels vertically
    and horizontally. The size stays.

    Args:
        images: (N, C, H, W) of any dtype.
        padding: The largest shift in pixels, at least 1. With "reflect" it must be less
            than the height and the width.
        mode: How the empty edge is filled: "constant" with zeros, "reflect" with a
            mirror image.
    """
    padded = functional.pad(images, [padding] * 4, mode)
    image_stride, *strides = padded.stride()
    top, left = torch.randint(2 * padding + 1, (2, len(images)), device=images.device)
    # The position of the first pixel of each crop in the memory of `padded`. From there
    # to its last pixel the crop is one piece of memory, with pixels between its rows
    # that do not belong to it. To copy a whole piece is faster than pixel by pixel.
    first = image_stride * torch.arange(len(images), device=images.device)
    first = first + strides[1] * top + strides[2] * left
    sizes = zip(images.shape[1:], strides, strict=True)
    length = 1 + sum((size - 1) * stride for size, stride in sizes)
    # row i is the piece that begins at position i: a view, nothing is copied
    all_pieces = padded.as_strided((padded.numel() - length + 1, length), (1, 1))
    pieces = all_pieces.index_select(0, first)
    return pieces.as_strided(images.shape, (length, *strides)).contiguous()


def crop_and_flip(
    images: Tensor,
    padding: int,
    flip: bool,
    mode: Literal["constant", "reflect"] = "constant",
) -> Tensor:
    """Return the images after `random_crop`, unless `padding` is 0, and then
    `random_flip`, if `flip` is true. See there for images, padding and mode."""
    if padding:
        images = random_crop(images, padding, mode)
    if flip:
        images = random_flip(images)
    return images
