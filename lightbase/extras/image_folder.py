"""Image files of any size and mode: how they are found, and read as tensors."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from jsonargparse.typing import NonNegativeInt, PositiveInt
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor
from torch.utils.data import Dataset

from lightbase.core.data import BaseDataModule
from lightbase.core.errors import UserError, first_line, say
from lightbase.extras.transforms import crop_and_flip, to_float

SUFFIXES = [
    "bmp",
    "gif",
    "jfif",
    "jpeg",
    "jpg",
    "pgm",
    "png",
    "ppm",
    "tif",
    "tiff",
    "webp",
]
# A file of another format, whatever its name, is not opened: for EPS, Pillow would run
# Ghostscript.
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
# What Pillow raises for a file that is damaged, or no image.
IMAGE_ERRORS = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    Image.DecompressionBombError,
)
# The split that a folder is for, by its name in lower case.
SPLITS = {"train": "train", "training": "train", "test": "test", "testing": "test"}
SPLITS |= {"val": "val", "valid": "val", "validation": "val"}


def find_images(paths: Iterable[Path]) -> tuple[list[Path], list[tuple[Path, str]]]:
    """The files among `paths` and the images below its folders, sorted; and the paths
    without any, with the reason."""
    files: list[Path] = []
    missing: list[tuple[Path, str]] = []
    for path in paths:
        images = [path] if path.is_file() else list_images(path)
        files += images
        if not images:
            missing.append((path, "no image file, and no folder with image files"))
    return files, missing


def list_images(folder: Path) -> list[Path]:
    """The images below the folder, sorted. Hidden files and folders do not count:
    `._1.jpg` of macOS, for instance."""
    images: list[Path] = []
    for place, subfolders, names in os.walk(folder):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        files = [Path(place, name) for name in names if not name.startswith(".")]
        images += [
            file
            for file in files
            if file.suffix[1:].lower() in SUFFIXES and file.is_file()
        ]
    return sorted(images)


def read_image(file: Path, shape: tuple[int, int, int]) -> Tensor:
    """uint8 (C, H, W) of the given shape, see `to_tensor`. Raises UserError with the
    reason if the file is damaged, or no image."""
    try:
        with Image.open(file, formats=FORMATS) as image:
            return to_tensor(image, shape)
    except UnidentifiedImageError as error:
        raise UserError("not an image, or cut short") from error
    except IMAGE_ERRORS as error:
        raise UserError(first_line(error)) from error


def to_tensor(image: Image.Image, shape: tuple[int, int, int]) -> Tensor:
    """uint8 (C, H, W) of the given shape, C 1 (grey) or 3 (RGB): upright, resized, and
    on white where the image is transparent."""
    channels, height, width = shape
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith(("I", "F")):
        # Pillow would clip at 255. White is 65535 for integers of 16 or 32 bits, and 1
        # for floats.
        values = (
            np.asarray(image, dtype=np.float64)
            * 255
            / (1 if image.mode == "F" else 65535)
        )
        image = Image.fromarray(values.clip(0, 255).round().astype(np.uint8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    image = image.convert("L" if channels == 1 else "RGB")
    image = image.resize((width, height), Image.Resampling.BILINEAR)
    return (
        torch.from_numpy(np.array(image))
        .reshape(height, width, channels)
        .permute(2, 0, 1)
    )


@dataclass(eq=False)
class ImageFiles(Dataset[tuple[Tensor, int]]):
    """Images as uint8 (*shape), read when they are needed, and their class numbers."""

    files: list[Path]
    targets: list[int]
    shape: tuple[int, int, int]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        file = self.files[index]
        try:
            return read_image(file, self.shape), self.targets[index]
        except UserError as error:
            raise UserError(
                f"{file} cannot be read: {error}; mend, shrink or remove it"
            ) from error


class ImageFolder(BaseDataModule):
    """data_dir/train/CLASS/..., and val/ and test/ if they exist; images of any size,
    in [0, 1] for the network.

    If the classes are in data_dir itself, a seeded fifth of each class is the test set.
    Hidden files and folders do not count.

    Args:
        data_dir: The folder with `train`, or with the classes.
        image_shape: Channels (1 grey, 3 colour), height and width that the images are
            brought to.
        num_workers: Processes that read the images; if not given, one for each core, 8
            at most.
        random_crop: Shift training images by up to this many pixels; 0 leaves them.
        random_flip: Mirror half of the training images.
    """

    def __init__(
        self,
        data_dir: Path,
        image_shape: tuple[Literal[1, 3], PositiveInt, PositiveInt] = (3, 64, 64),
        num_workers: NonNegativeInt | None = None,
        random_crop: NonNegativeInt = 0,
        random_flip: bool = False,
        **kwargs,
    ) -> None:
        num_workers = (
            min(8, os.cpu_count() or 1) if num_workers is None else num_workers
        )
        super().__init__(data_dir=data_dir, num_workers=num_workers, **kwargs)
        self.image_shape: tuple[int, int, int] = image_shape
        self.random_crop = random_crop
        self.random_flip = random_flip

    @cached_property
    def folders(self) -> dict[str, Path]:
        """The folder of each split; empty if the classes are in data_dir itself."""
        folders: dict[str, Path] = {}
        for path in folders_in(self.data_dir):
            if path.name.lower() in SPLITS:
                folders.setdefault(SPLITS[path.name.lower()], path)
        return folders if {"train", "test"} & folders.keys() else {}

    @cached_property
    def files(self) -> dict[str, dict[str, list[Path]]]:
        """The images by split and class, sorted. With folds there is no other test
        set."""
        if self.folders:
            files = {
                split: images_by_class(folder) for split, folder in self.folders.items()
            }
        else:
            part = "a fold" if self.fold else "a fifth"
            say(
                f"Images: no train and test in {self.data_dir}: {part} of each class is the test"
            )
            files = {"train": {}, "test": {}}
            for name, images in images_by_class(self.data_dir).items():
                for split in files:
                    index = self.seeded_part(len(images), split)  # type: ignore[arg-type]
                    files[split][name] = [images[i] for i in index]
        if self.fold:
            files.pop("test", None)
        if files.get("val"):
            say(
                f"Images: validation on {self.folders['val']}; data.val_fraction has no effect"
            )
        return files

    @cached_property
    def own_splits(self) -> list[str]:  # type: ignore[override]
        return [
            split for split, by_class in self.files.items() if any(by_class.values())
        ]

    @cached_property
    def classes(self) -> list[str]:  # type: ignore[override]  # a checkpoint assigns its classes
        names = list(self.files.get("train", {}))
        if not names:
            raise UserError(
                f"data.data_dir {self.data_dir}: no image in train/CLASS/, nor CLASS/"
            )
        return names

    def prepare_data(self) -> None:
        for split, by_class in self.files.items():
            if unknown := sorted(by_class.keys() - {*self.classes}):
                folder = self.folders.get(split, self.data_dir)
                raise UserError(
                    f"{folder} has classes that the training had not: {unknown[:5]}"
                )

    def load(self, split: Literal["train", "val", "test"]) -> ImageFiles:
        files: list[Path] = []
        targets: list[int] = []
        for name, images in self.files[split].items():
            files += images
            targets += [self.classes.index(name)] * len(images)
        return ImageFiles(files, targets, self.image_shape)

    def normalize(self, inputs: Tensor) -> Tensor:
        return to_float(inputs)

    def augment(self, inputs: Tensor) -> Tensor:
        return crop_and_flip(inputs, self.random_crop, self.random_flip)


def folders_in(folder: Path) -> list[Path]:
    """Sorted, without hidden folders, such as .ipynb_checkpoints."""
    return sorted(path for path in folder.glob("[!.]*") if path.is_dir())


def images_by_class(folder: Path) -> dict[str, list[Path]]:
    """The images of each class that has any."""
    images = {path.name: list_images(path) for path in folders_in(folder)}
    return {name: files for name, files in images.items() if files}
