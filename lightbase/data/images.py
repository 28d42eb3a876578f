"""Image files: `read_image` reads one as a tensor."""

from functools import cache
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from PIL.TiffImagePlugin import BITSPERSAMPLE, SAMPLEFORMAT
from torch import Tensor
from torch.utils.data import get_worker_info

from lightbase.config.errors import UserError, first_line, say

FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
"""The formats that Pillow may open. The content of a file decides, not its name. Other
formats are refused, because for some of them, such as EPS, Pillow runs other programs
(Ghostscript)."""

MODES = {1: "L", 3: "RGB"}
"""{number of channels: Pillow's name of the mode}."""

IMAGE_ERRORS = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    Image.DecompressionBombError,
)
"""The errors that Pillow raises for a file that is damaged or not an image."""


def read_image(file: Path, shape: tuple[int, int, int]) -> Tensor:
    """Read an image file. Return uint8 (C, H, W), see `to_tensor`.

    Raise UserError with the reason if the file is damaged or not an image. The message
    does not name the file: the caller does.

    Args:
        shape: (C, H, W) of the result, where C is 1 or 3.
    """
    try:
        with Image.open(file, formats=FORMATS) as image:
            if getattr(image, "is_animated", False) and get_worker_info() is None:
                say_frames()
            return to_tensor(image, shape)
    except UnidentifiedImageError as error:
        raise UserError("not an image, or cut short") from error
    except IMAGE_ERRORS as error:
        raise UserError(first_line(error)) from error


def to_tensor(image: Image.Image, shape: tuple[int, int, int]) -> Tensor:
    """Return a Pillow image as uint8 (C, H, W).

    The image is rotated as its EXIF data says. Transparent parts become white. Numbers
    of more than 8 bits are scaled to [0, 255]. Then the image is converted to grey or
    RGB, and resized without keeping its proportions (bilinear). Raise UserError if it
    is not certain which number is white.

    Args:
        shape: (C, H, W) of the result, where C is 1 (grey) or 3 (RGB).
    """
    channels, height, width = shape
    ImageOps.exif_transpose(image, in_place=True)
    image = as_8_bits(image)
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    image = image.convert(MODES[channels])
    image = image.resize((width, height), Image.Resampling.BILINEAR)
    pixels = torch.from_numpy(np.array(image))
    return pixels.view(height, width, channels).permute(2, 0, 1)


def as_8_bits(image: Image.Image) -> Image.Image:
    """Return a grey image of more than 8 bits, or of floats, with 8 bits: Pillow would
    clip values above 255. Other images stay.

    White is the highest number of the bits. But floats may be in [0, 1] or in [0, 255],
    and integers of 32 bits may hold 8 or 16 bits: the first of these ranges that has
    all numbers is taken. Raise UserError if none has, and for signed numbers of fewer
    bits.
    """
    tags = getattr(image, "tag_v2", {})  # of TIFF
    bits = tags.get(BITSPERSAMPLE, (16,))[0]
    is_signed = 2 in tags.get(SAMPLEFORMAT, ())
    if not image.mode.startswith(("I", "F")) and not is_signed:
        return image
    whites = [2**bits - 1]
    if image.mode == "F":
        whites = [1, 255]
    elif bits == 32:
        whites = [255, 65535]
    elif is_signed:
        whites = []
    values = np.asarray(image, dtype=np.float64)
    low, high = values.min(), values.max()
    for white in whites:
        if low >= 0 and high <= white:
            return Image.fromarray((values * 255 / white).round().astype(np.uint8))
    raise UserError(
        f"its numbers are from {low:g} to {high:g}, and it is unknown which one is "
        "white; convert it to 8 bits"
    )


@cache
def say_frames() -> None:
    """Print a line, once."""
    say("Images: of several frames or pages in a file, the first one is read")
