"""Folders of image files, and the data module `ImageFolder` that reads them."""

import fnmatch
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from jsonargparse.typing import NonNegativeInt, PositiveInt
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.datasets.folder import IMG_EXTENSIONS

from lightbase.config.errors import UserError, say
from lightbase.data.module import BaseDataModule
from lightbase.data.tensors import read_image
from lightbase.data.transforms import crop_and_flip, to_float

SUFFIXES = (*IMG_EXTENSIONS, ".gif", ".jfif")

SPLITS = {
    "train": "train",
    "training": "train",
    "test": "test",
    "testing": "test",
    "val": "val",
    "valid": "val",
    "validation": "val",
}
"""The split that a folder is for, by its name in lower case."""

PARTS: tuple[Literal["train", "test"], ...] = ("train", "test")
"""The splits of a folder that has the classes alone."""


def list_images(folder: Path) -> list[Path]:
    """Return the images below the folder, at any depth, sorted. Hidden files and
    folders are left out: macOS makes files such as `._1.jpg`."""
    return [path for path in files_in(folder) if is_image(path)]


def files_in(folder: Path) -> list[Path]:
    files = []
    for path, folders, names in os.walk(folder):
        folders[:] = fnmatch.filter(folders, "[!.]*")  # os.walk continues with these
        files += [Path(path, name) for name in fnmatch.filter(names, "[!.]*")]
    return sorted(files)


def is_image(path: Path) -> bool:
    # opening a pipe would wait for ever for a writer
    return path.name.lower().endswith(SUFFIXES) and path.is_file()


def folders_in(folder: Path) -> list[Path]:
    """Return the subfolders, sorted, without hidden ones."""
    return sorted(path for path in folder.glob("[!.]*") if path.is_dir())


def images_by_class(folder: Path, seen: set[Any]) -> dict[str, list[Path]]:
    """Return {class: images}. Each subfolder of `folder` with an image below it is a
    class of its name. Print how many files are left out.

    seen: The images so far, also of other splits. A file with two paths is taken once.
    """
    classes: dict[str, list[Path]] = {}
    num_left_out = 0
    for path in folders_in(folder):
        for file in files_in(path):
            if is_image(file):
                key = file.stat()[1:3]  # inode and device
                if key not in seen:
                    seen.add(key)
                    classes.setdefault(path.name, []).append(file)
                    continue
            num_left_out += 1
    if num_left_out:
        say(
            f"Images: {num_left_out:,} files in {folder.name}/ are left out: other "
            "formats, broken links, or images that have another path, too"
        )
    return classes


@dataclass(eq=False)
class ImageFiles(Dataset[tuple[Tensor, int]]):
    """A Dataset of pairs (image, class number). An image is read from its file each
    time it is needed, and converted to uint8 of `shape`, (C, H, W)."""

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
    """Images of any size in folders. The network gets them as float32 in [0, 1].

    The folders are data_dir/train/CLASS, with test and val beside train if they exist,
    or data_dir/CLASS; then a seeded fifth of each class is the test set. Images may lie
    in subfolders of CLASS. Hidden files and folders are left out.

    Args:
        data_dir: The folder with `train`, or with the classes.
        image_shape: Channels (1 for grey, 3 for colour), height and width. All images
            are converted to this shape.
        num_workers: Processes that read the images, by default one for each core, but
            at most 8.
        random_crop: Shift each training image at random by up to this many pixels.
        random_flip: Mirror each training image left to right with probability 1/2.
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
        if num_workers is None:
            num_workers = min(8, os.cpu_count() or 1)
        super().__init__(data_dir=data_dir, num_workers=num_workers, **kwargs)
        self.image_shape: tuple[int, int, int] = image_shape
        self.random_crop = random_crop
        self.random_flip = random_flip

    @cached_property
    def files(self) -> dict[str, dict[str, list[Path]]]:
        """{split: {class: images, sorted}}. If no folder of classes has a name in
        SPLITS, data_dir has the classes, and each is divided into training and test:
        see `seeded_part`."""
        files: dict[str, dict[str, list[Path]]] = {}
        seen: set[Any] = set()
        others = []
        for path in folders_in(self.data_dir):
            split = SPLITS.get(path.name.lower(), "")
            classes = {}
            if split and split not in files:
                classes = images_by_class(path, seen)
            if classes:
                files[split] = classes
            elif list_images(path):
                others.append(path.name)
        if others and files.keys() == {"train"}:
            raise UserError(
                f"data.data_dir {self.data_dir}: its folders {others[0]}/ and train/ "
                "may be two classes, or train/ the training set",
                "rename train/ if it is a class; otherwise move the others away",
            )
        if files:
            return files
        if not self.fold:
            say("Images: no train/ and test/: a fifth of each class is the test")
        for name, paths in images_by_class(self.data_dir, seen).items():
            for part in PARTS:
                chosen = [paths[i] for i in self.seeded_part(len(paths), part)]
                files.setdefault(part, {})[name] = chosen
        return files

    @property
    def own_splits(self) -> list[str]:  # type: ignore[override]
        return [split for split, classes in self.files.items() if any(classes.values())]

    @cached_property  # unlike a property, it can be assigned, from a checkpoint
    def classes(self) -> list[str]:  # type: ignore[override]
        """The names of the classes in the training set, sorted."""
        if not self.files.get("train"):
            raise UserError(
                f"data.data_dir {self.data_dir}: no image in train/CLASS/, nor CLASS/"
            )
        return list(self.files["train"])

    def load(self, split: Literal["train", "val", "test"]) -> ImageFiles:
        """Return the images of a split, class by class. No file is opened yet."""
        files: list[Path] = []
        targets: list[int] = []
        for name, images in self.files[split].items():
            if name not in self.classes:  # the network has no output for it
                raise UserError(
                    f"data.data_dir {self.data_dir}: {split} has a class that the "
                    f"training had not: {name}"
                )
            files += images
            targets += [self.classes.index(name)] * len(images)
        return ImageFiles(files, targets, self.image_shape)

    def normalize(self, inputs: Tensor) -> Tensor:
        return to_float(inputs)

    def augment(self, inputs: Tensor) -> Tensor:
        return crop_and_flip(inputs, self.random_crop, self.random_flip)
