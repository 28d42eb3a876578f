"""Image files of any size and mode: found, checked, read as tensors."""

import contextlib
import os
from collections.abc import Iterable, Iterator
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor
from torch.utils.data import Dataset

from project.base.errors import UserError, first_line

LAST_BYTES = (b"\xff\xd9", b"IEND\xaeB`\x82")  # of JPEG and of PNG


def find_images(paths: Iterable[Path]) -> tuple[list[Path], list[tuple[Path, str]]]:
    """The files among `paths` and the images below its folders, sorted; and what is not there, with
    the reason. Hidden files and folders are left out: `._1.jpg` of macOS, `.ipynb_checkpoints`."""
    # without the formats that Pillow writes only, such as PDF
    known = {suffix for suffix, kind in Image.registered_extensions().items() if kind in Image.OPEN}
    files: list[Path] = []
    missing: list[tuple[Path, str]] = []
    for path in paths:
        found = [path] if path.is_file() else []
        for folder, folders, names in os.walk(path):
            folders[:] = [name for name in folders if not name.startswith(".")]
            here = (Path(folder, name) for name in names if not name.startswith("."))
            found += [file for file in here if file.suffix.lower() in known]
        files += sorted(found)
        if not found:
            missing.append(
                (
                    path,
                    "no image files in this folder" if path.is_dir() else "no such file or folder",
                )
            )
    return files, missing


def check_images(files: list[Path]) -> None:
    """Open each file, and decode those that may be cut short. Raises UserError naming a broken
    one."""
    with ThreadPool(16) as pool:  # a network's file system has many at once
        pairs = zip(files, pool.imap(fault, files, 16), strict=True)
        bar = Tqdm(pairs, "Checking images", len(files), leave=False, disable=None)  # in a terminal
        broken = [f"{file} cannot be read: {reason}" for file, reason in bar if reason]
    if broken:
        more = f"; so are {len(broken) - 1} more" if len(broken) > 1 else ""
        raise UserError(f"{broken[0]}{more}\nmend or remove what is broken")


def fault(file: Path) -> str:
    """Why an image cannot be read; empty if it can."""
    try:
        with short_reasons(), file.open("rb") as stream:
            stream.seek(max(0, stream.seek(0, os.SEEK_END) - 32))
            last_bytes = stream.read()
            stream.seek(0)
            with Image.open(stream) as opened:
                if not any(mark in last_bytes for mark in LAST_BYTES):
                    opened.load()
    except UserError as error:
        return str(error)
    return ""


@contextlib.contextmanager
def short_reasons() -> Iterator[None]:
    """What Pillow raises for a file that is no image or is damaged, as UserError with the
    reason."""
    try:
        yield
    except UnidentifiedImageError as error:
        raise UserError("not an image, or cut short") from error
    except (OSError, SyntaxError, ValueError, EOFError, Image.DecompressionBombError) as error:
        raise UserError(first_line(error)) from error


def read_image(file: Path, shape: tuple[int, int, int]) -> Tensor:
    """uint8 (C, H, W) of the given shape, as `to_tensor` makes it.

    Raises UserError with the reason if the file is no image or is damaged.
    """
    with short_reasons(), Image.open(file) as opened:
        return to_tensor(opened, shape)


def to_tensor(image: Image.Image, shape: tuple[int, int, int]) -> Tensor:
    """uint8 (C, H, W) of the given shape, C 1 (grey) or 3 (RGB): upright, on white where it is
    transparent, resized."""
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
    """Another Dataset's, or a list's, (image, target) as (uint8 (*shape), target). Images are
    Pillow's, or paths.

    targets: all of them, where they are known without reading an image."""

    def __init__(self, source: Any, shape: tuple[int, int, int], targets: Any = None) -> None:
        self.source = source
        self.shape = shape
        self.targets = targets

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
