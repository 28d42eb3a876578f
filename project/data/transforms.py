"""Transforms of whole batches of images, (N, C, H, W), on any device.

Random choices come from the generator of the images' device: the state of that generator is in every checkpoint.
"""

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


def random_crop(images: Tensor, padding: int) -> Tensor:
    """Shift each image by up to `padding` pixels each way, zeros moving in: a crop of the padded image. Any dtype."""
    num, _, height, width = images.shape
    padded = functional.pad(images, [padding] * 4)
    crops = padded.unfold(2, height, 1).unfold(3, width, 1)  # (N, C, 2p+1, 2p+1, H, W), a view
    top, left = torch.randint(2 * padding + 1, (2, num), device=images.device)
    return crops[torch.arange(num, device=images.device), :, top, left]


def crop_and_flip(images: Tensor, padding: int, flip: bool) -> Tensor:
    """`random_crop`, unless `padding` is 0, then `random_flip`, if asked for."""
    images = random_crop(images, padding) if padding else images
    return random_flip(images) if flip else images
