"""Image files: `read_image` reads one as a tensor."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from lightbase.config.errors import UserError, first_line

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

    Of several frames or pages the first one is read. Raise UserError with the reason if
    the file is damaged or not an image. The message does not name the file: the caller
    does.

    Args:
        shape: (C, H, W) of the result, where C is 1 or 3.
    """
    try:
        with Image.open(file, formats=FORMATS) as image:
            return to_tensor(image, shape)
    except IMAGE_ERRORS as error:
        raise UserError(first_line(error)) from error


def to_tensor(image: Image.Image, shape: tuple[int, int, int]) -> Tensor:
    """Return a Pillow image as uint8 (C, H, W).

    The image is rotated as its EXIF data says. Transparent parts become white. Numbers
    of 16 bits are scaled to [0, 255]. Then the image is converted to grey or RGB, and
    resized without keeping its proportions (bilinear).

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
    """Return a grey image of 16 bits with 8 bits: Pillow would clip values above 255.
    Other images stay."""
    if image.mode in ("I", "F"):
        raise UserError("it has numbers of 32 bits: convert it to 8 or 16 bits")
    if not image.mode.startswith("I;16"):
        return image
    values = np.asarray(image) / 257
    return Image.fromarray(values.round().astype(np.uint8))
