"""Image files: `read_image` reads one as a tensor."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from lightbase.core.errors import UserError, first_line

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
            return to_tensor(image, shape)
    except UnidentifiedImageError as error:
        raise UserError("not an image, or cut short") from error
    except IMAGE_ERRORS as error:
        raise UserError(first_line(error)) from error


def to_tensor(image: Image.Image, shape: tuple[int, int, int]) -> Tensor:
    """Return a Pillow image as uint8 (C, H, W).

    The image is rotated as its EXIF data says. Transparent parts become white. Numbers
    of more than 8 bits are scaled to [0, 255]. Then the image is converted to grey or
    RGB, and resized without keeping its proportions (bilinear).

    Args:
        shape: (C, H, W) of the result, where C is 1 (grey) or 3 (RGB).
    """
    channels, height, width = shape
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith(("I", "F")):
        # Pillow would clip values above 255. White is 65535 in images of integers with
        # 16 or 32 bits, and 1 in images of floats.
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
