"""Images: a file as a tensor, and transforms of whole batches, (N, C, H, W), on any
device.

Random choices come from the generator of the images' device. Its state is in every
checkpoint.
"""

from pathlib import Path
from typing import Literal

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor
from torch.nn import functional

from lightbase.core.errors import UserError, first_line

FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
"""A file of another format, whatever its name, is not opened: for EPS, Pillow would run
Ghostscript."""
MODES = {1: "L", 3: "RGB"}
"""Pillow's modes by the number of channels."""
IMAGE_ERRORS = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    Image.DecompressionBombError,
)
"""What Pillow raises for a file that is damaged, or that is not an image."""


def read_image(file: Path, shape: tuple[int, int, int]) -> Tensor:
    """Return the image as uint8 (C, H, W) of this shape, see `to_tensor`. Raise
    UserError with the reason if the file is damaged, or not an image."""
    try:
        with Image.open(file, formats=FORMATS) as image:
            return to_tensor(image, shape)
    except UnidentifiedImageError as error:
        raise UserError("not an image, or cut short") from error
    except IMAGE_ERRORS as error:
        raise UserError(first_line(error)) from error


def to_tensor(image: Image.Image, shape: tuple[int, int, int]) -> Tensor:
    """Return the image as uint8 (C, H, W) of this shape, where C is 1 (grey) or 3
    (RGB). It is turned upright, put on white where it is transparent, and resized."""
    channels, height, width = shape
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith(("I", "F")):
        # Pillow would clip at 255. White is 65535 for integers of 16 or 32 bits, and 1
        # for floats.
        white = 65535
        if image.mode == "F":
            white = 1
        values = np.asarray(image, dtype=np.float64) * 255 / white
        image = Image.fromarray(values.clip(0, 255).round().astype(np.uint8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    image = image.convert(MODES[channels])
    image = image.resize((width, height), Image.Resampling.BILINEAR)
    pixels = torch.from_numpy(np.array(image))
    return pixels.view(height, width, channels).permute(2, 0, 1)


def to_float(images: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor:
    """Return uint8 images in [0, 255] as float32.

    They are scaled to [0, 1] and then standardised: (x - mean) / std.

    Args:
        mean: Of all channels, for images in [0, 1].
        std: Of all channels, for images in [0, 1].
    """
    x = images / 255  # in one pass, and as exact as images.float() / 255
    if mean:
        x = x.sub_(mean)
    if std != 1:
        x = x.div_(std)
    return x


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
        raise ValueError(f"alternating_flip takes uint8 images, not {images.dtype}")
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
    """Shift each image by up to `padding` pixels each way. Any dtype.

    Args:
        padding: Above 0; with "reflect" below the height and the width.
        mode: Fill the edge with zeros, "constant", or with the mirror image,
            "reflect".
    """
    padded = functional.pad(images, [padding] * 4, mode)
    image_stride, *strides = padded.stride()
    top, left = torch.randint(2 * padding + 1, (2, len(images)), device=images.device)
    first = image_stride * torch.arange(len(images), device=images.device)
    first = first + strides[1] * top + strides[2] * left
    # From its first pixel to its last, a crop is one piece of memory. Copying the piece
    # is faster than copying the pixels of the crop one by one.
    sizes = zip(images.shape[1:], strides, strict=True)
    length = 1 + sum((size - 1) * stride for size, stride in sizes)
    all_pieces = padded.as_strided((padded.numel() - length + 1, length), (1, 1))
    pieces = all_pieces.index_select(0, first)
    return pieces.as_strided(images.shape, (length, *strides)).contiguous()


def crop_and_flip(
    images: Tensor,
    padding: int,
    flip: bool,
    mode: Literal["constant", "reflect"] = "constant",
) -> Tensor:
    """Apply `random_crop` unless `padding` is 0, and then `random_flip` if `flip` is
    true."""
    if padding:
        images = random_crop(images, padding, mode)
    if flip:
        images = random_flip(images)
    return images
