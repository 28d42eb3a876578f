"""Image files: `read_image` reads one as a tensor."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from PIL.TiffImagePlugin import BITSPERSAMPLE, SAMPLEFORMAT, TiffImageFile
from torch import Tensor
from torch.utils.data import get_worker_info

from lightbase.core.errors import UserError, first_line, say

FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
"""The formats that Pillow may open. The content of a file decides, not its name. Other
formats are refused, because for some of them, such as EPS, Pillow runs other programs
(Ghostscript)."""
MODES = {1: "L", 3: "RGB"}
"""{number of channels: Pillow's name of the mode}."""
WITH_FRAMES: list[Path] = []
"""The images of several frames that this process has read."""
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
                say_frames(file)
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
    bits, sign = 16, 1
    if isinstance(image, TiffImageFile):
        bits = image.tag_v2.get(BITSPERSAMPLE, (1,))[0]
        sign = image.tag_v2.get(SAMPLEFORMAT, (1,))[0]  # 2: signed
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith(("I", "F")) or sign == 2:
        image = as_8_bits(image, bits, sign == 2)
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    image = image.convert(MODES[channels])
    image = image.resize((width, height), Image.Resampling.BILINEAR)
    pixels = torch.from_numpy(np.array(image))
    return pixels.view(height, width, channels).permute(2, 0, 1)


def as_8_bits(image: Image.Image, bits: int, is_signed: bool) -> Image.Image:
    """Return a grey image of more than 8 bits, or of floats, with 8 bits. Pillow would
    clip values above 255.

    White is the highest number of `bits`. But floats may be in [0, 1] or in [0, 255],
    and integers of 32 bits may hold 8 or 16 bits: the first of these ranges that has
    all numbers is taken. Raise UserError if none has, and for signed numbers of fewer
    bits.
    """
    values = np.asarray(image, dtype=np.float64)
    whites = [2**bits - 1]
    if image.mode == "F":
        whites = [1, 255]
    elif bits == 32:
        whites = [255, 65535]
    elif is_signed:
        whites = []
    fitting = [x for x in whites if values.min() >= 0 and values.max() <= x]
    if not fitting:  # also for NaN
        raise UserError(
            f"its numbers of {bits} bits are from {values.min():g} to "
            f"{values.max():g}, and it is unknown which one is white; convert it to 8 "
            "bits"
        )
    return Image.fromarray((values * 255 / fitting[0]).round().astype(np.uint8))


def say_frames(file: Path) -> None:
    """Print a line about the first image with several frames."""
    if not WITH_FRAMES:
        say(
            f"Images: {file} has several frames or pages: the first one of each is read"
        )
    WITH_FRAMES.append(file)
