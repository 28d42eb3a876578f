"""Image files of any size and mode as tensors."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor
from torch.utils.data import Dataset

from project.base.errors import UserError


def find_images(paths: Iterable[Path]) -> tuple[list[Path], list[tuple[Path, str]]]:
    """The files among `paths` and the images below its folders, sorted; and what is not there, with the reason."""
    # without the formats that Pillow writes only, such as PDF
    known = {suffix for suffix, kind in Image.registered_extensions().items() if kind in Image.OPEN}
    files: list[Path] = []
    missing: list[tuple[Path, str]] = []
    for path in paths:
        found = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.suffix.lower() in known)
        files += found
        if not found:
            missing.append((path, "no image files in this folder" if path.is_dir() else "no such file or folder"))
    return files, missing


def read_image(file: Path, shape: tuple[int, int, int]) -> Tensor:
    """uint8 (C, H, W) of the given shape, as `to_tensor` makes it.

    Raises UserError with the reason if the file is no image or is damaged.
    """
    try:
        with Image.open(file) as opened:
            return to_tensor(opened, shape)
    except UnidentifiedImageError as error:
        raise UserError("not an image, or cut short") from error
    except (OSError, SyntaxError, ValueError, EOFError, Image.DecompressionBombError) as error:
        raise UserError(str(error).splitlines()[0]) from error


def to_tensor(image: Image.Image, shape: tuple[int, int, int]) -> Tensor:
    """uint8 (C, H, W) of the given shape, C 1 (grey) or 3 (RGB): upright, on white where it is transparent, resized."""
    channels, height, width = shape
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith(("I", "F")):
        image = to_8_bits(image)
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    image = image.convert("L" if channels == 1 else "RGB")
    image = image.resize((width, height), Image.Resampling.BILINEAR)
    return torch.from_numpy(np.array(image)).reshape(height, width, channels).permute(2, 0, 1)


def to_8_bits(image: Image.Image) -> Image.Image:
    """From 16 or 32 bits or floating point, all grey; PIL alone would cut off what is over 255."""
    values = np.nan_to_num(np.asarray(image, dtype=np.float64))
    if image.mode.startswith("I;16") or values.max(initial=0) > 255:
        values = values / 257  # 65535 is white
    elif image.mode == "F" and values.max(initial=0) <= 1:
        values = values * 255
    return Image.fromarray(values.clip(0, 255).round().astype(np.uint8))


class ResizedImages(Dataset[tuple[Tensor, Any]]):
    """Another Dataset's, or a list's, (image, target) as (uint8 (*shape), target). Images are Pillow's, or paths."""

    def __init__(self, source: Any, shape: tuple[int, int, int]) -> None:
        self.source = source
        self.shape = shape

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> tuple[Tensor, Any]:
        image, target = self.source[index]
        if not isinstance(image, Path):
            return to_tensor(image, self.shape), target
        try:
            return read_image(image, self.shape), target
        except UserError as error:
            raise UserError(f"{image} cannot be read: {error}; mend or remove it") from error
