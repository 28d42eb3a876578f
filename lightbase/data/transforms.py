"""Transforms of whole batches of images, (N, C, H, W), on any device.

Random choices come from the generator of the images' device: the state of that generator is in
every checkpoint.
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
    return flip_some(images, torch.rand(len(images), device=images.device) < 0.5)


def alternating_flip(images: Tensor, epoch: int) -> Tensor:
    """Mirror half of the images in even epochs and the other half in odd ones: two epochs show each
    image both ways.

    Which half an image is in follows from its pixels, uint8. After K. Jordan, 2024, arXiv
    2404.00498.
    """
    if images.dtype != torch.uint8:
        raise ValueError(f"alternating_flip takes uint8 images, and these are {images.dtype}")
    return flip_some(images, (images.sum((1, 2, 3)) + epoch) % 2 == 1)


def flip_some(images: Tensor, chosen: Tensor) -> Tensor:
    """Mirror the images that are chosen, bool (N,), left to right."""
    both = torch.cat(
        [images, images.flip(-1)]
    )  # whole images are copied faster than torch.where chooses their pixels
    return both.index_select(
        0, torch.arange(len(images), device=images.device) + len(images) * chosen
    )


def random_crop(
    images: Tensor, padding: int, mode: Literal["constant", "reflect"] = "constant"
) -> Tensor:
    """Shift each image by up to `padding` pixels each way, zeros or its mirror image moving in. Any
    dtype."""
    padded = functional.pad(images, [padding] * 4, mode)
    of_image, *strides = padded.stride()
    top, left = torch.randint(2 * padding + 1, (2, len(images)), device=images.device)
    start = (
        of_image * torch.arange(len(images), device=images.device)
        + strides[1] * top
        + strides[2] * left
    )
    # from its first pixel to its last a crop is one piece of memory, copied faster as a whole than
    # by its pixels
    length = 1 + sum(
        (size - 1) * stride for size, stride in zip(images.shape[1:], strides, strict=True)
    )
    pieces = padded.as_strided((padded.numel() - length + 1, length), (1, 1)).index_select(0, start)
    return pieces.as_strided(images.shape, (length, *strides)).contiguous()


def crop_and_flip(
    images: Tensor, padding: int, flip: bool, mode: Literal["constant", "reflect"] = "constant"
) -> Tensor:
    """`random_crop`, unless `padding` is 0, then `random_flip`, if asked for."""
    images = random_crop(images, padding, mode) if padding else images
    return random_flip(images) if flip else images


def mirrored(images: Tensor) -> list[Tensor]:
    """For `model.test_views`: each image as it is, and left to right."""
    return [images, images.flip(-1)]
