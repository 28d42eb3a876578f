"""Image files of any size and mode: found, checked, read as tensors."""

import contextlib
import os
from collections.abc import Iterable, Iterator
from functools import cached_property
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from jsonargparse.typing import NonNegativeInt, PositiveInt
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor
from torch.utils.data import Dataset

from lightbase.data.module import BaseDataModule
from lightbase.data.transforms import crop_and_flip, to_float
from lightbase.errors import UserError, first_line
from lightbase.ranks import say

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


NAMES = {"train": "train", "training": "train", "val": "val", "valid": "val", "validation": "val"}
NAMES |= {"test": "test", "testing": "test"}


class ImageFolder(BaseDataModule):
    """data_dir/train/CLASS/..., and val/ and test/ where there are such; images of any size, in [0,
    1] for the network.

    With CLASS/... in data_dir itself, a seeded fifth of each class is the test set. What is hidden
    does not count.

    Args:
        data_dir: The folder with `train`, or with the classes.
        image_shape: Channels (1 grey, 3 colour), height and width that the images are brought to.
        num_workers: Processes that read the images; as many as there are cores unless given, 8 at
            most.
        random_crop: Shift training images by up to this many pixels; 0 leaves them.
        random_flip: Mirror half of the training images.
    """

    is_checked = False

    def __init__(
        self,
        data_dir: str,
        image_shape: tuple[Literal[1, 3], PositiveInt, PositiveInt] = (3, 64, 64),
        num_workers: NonNegativeInt | None = None,
        random_crop: NonNegativeInt = 0,
        random_flip: bool = False,
        **kwargs,
    ) -> None:
        num_workers = min(8, os.cpu_count() or 1) if num_workers is None else num_workers
        super().__init__(data_dir=data_dir, num_workers=num_workers, **kwargs)
        self.image_shape: tuple[int, int, int] = image_shape
        self.random_crop = random_crop
        self.random_flip = random_flip

    @cached_property
    def folders(self) -> dict[str, Path]:
        """By split; none where the classes lie in data_dir itself."""
        found: dict[str, Path] = {}
        for path in folders_in(self.data_dir):
            split = NAMES.get(path.name.lower(), "")
            if split in found:
                raise UserError(
                    f"data.data_dir {self.data_dir} has {found[split].name} and {path.name}: "
                    "which is it?"
                )
            found |= {split: path} if split else {}
        return found if {"train", "test"} & found.keys() else {}

    @cached_property
    def files(self) -> dict[str, dict[str, list[Path]]]:
        """The images by split and class, sorted."""
        if self.folders:  # a fold is the test set, if there is one
            used = {
                split: folder
                for split, folder in self.folders.items()
                if split != "test" or not self.fold
            }
            return {split: images_by_class(folder) for split, folder in used.items()}
        found, splits = (
            images_by_class(self.data_dir),
            ("train",) if self.fold else ("train", "test"),
        )
        return {
            split: {name: self._part(files, split) for name, files in found.items()}
            for split in splits
        }

    def _part(self, files: list[Path], split: Any) -> list[Path]:
        return [files[i] for i in self.seeded_part(len(files), split).tolist()]

    @cached_property
    def own_splits(self) -> list[str]:  # type: ignore[override]
        return [split for split, by_class in self.files.items() if any(by_class.values())]

    @cached_property
    def classes(self) -> list[str]:  # type: ignore[override]  # a checkpoint assigns its own
        found = [name for name, files in self.files.get("train", {}).items() if files]
        if not found:
            raise UserError(
                f"data.data_dir {self.data_dir}: there is no train/CLASS/ with images in it, "
                "nor CLASS/"
            )
        return found

    def prepare_data(self) -> None:
        """Say which images are used for what, and open all: a broken one is found now, not in the
        third epoch."""
        if self.is_checked:
            return
        if not self.folders:
            part = "a fold" if self.fold else "a fifth"
            say(
                f"Images: no train and test in {self.data_dir}: {part} of each class is the "
                "test set"
            )
        elif others := [
            path.name for path in folders_in(self.data_dir) if path not in self.folders.values()
        ]:
            say(f"Images: not used, neither train, val nor test: {', '.join(others[:5])}")
        if "val" in self.own_splits:
            say(f"Images: validation on {self.folders['val']}; data.val_fraction has no effect")
        if "test" not in self.own_splits and not self.fold:
            say(f"Images: no test/CLASS/ in {self.data_dir}: nothing is tested")
        for split, by_class in self.files.items():
            missing = [
                name
                for name in {**by_class, **dict.fromkeys(self.classes)}
                if not by_class.get(name)
            ]
            if missing:
                say(
                    f"Images: {split} has none of "
                    f"{', '.join(missing[:5])}{', ...' * (len(missing) > 5)}"
                )
            if unknown := [name for name in by_class if name not in [*self.classes, *missing]]:
                folder = self.folders.get(split, self.data_dir)
                raise UserError(
                    f"{folder} has classes that the training had not: {', '.join(unknown[:5])}"
                )
        every = [
            file
            for by_class in self.files.values()
            for files in by_class.values()
            for file in files
        ]
        check_images(every)
        self.is_checked = True

    def load(self, split: Literal["train", "val", "test"]) -> ResizedImages:
        index = {name: i for i, name in enumerate(self.classes)}
        files = [(file, index[name]) for name, found in self.files[split].items() for file in found]
        return ResizedImages(files, self.image_shape, [target for _, target in files])

    def normalize(self, inputs: Tensor) -> Tensor:
        return to_float(inputs)

    def augment(self, inputs: Tensor) -> Tensor:
        return crop_and_flip(inputs, self.random_crop, self.random_flip)


def folders_in(folder: Path) -> list[Path]:
    """Sorted, without the hidden ones, such as .ipynb_checkpoints."""
    return sorted(path for path in folder.glob("[!.]*") if path.is_dir())


def images_by_class(folder: Path) -> dict[str, list[Path]]:
    return {path.name: find_images([path])[0] for path in folders_in(folder)}
