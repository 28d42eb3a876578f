"""Folders of image files: how the images are found, and a data module that reads them
while training."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from jsonargparse.typing import NonNegativeInt, PositiveInt
from torch import Tensor
from torch.utils.data import Dataset

from lightbase.core.data import BaseDataModule
from lightbase.core.errors import UserError, say
from lightbase.core.images import crop_and_flip, read_image, to_float

SUFFIXES = (
    *(".bmp", ".gif", ".jfif", ".jpeg", ".jpg", ".pgm"),
    *(".png", ".ppm", ".tif", ".tiff", ".webp"),
)
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


def find_images(paths: Iterable[Path]) -> tuple[list[Path], list[tuple[Path, str]]]:
    """Return the images that a user names by files and folders.

    The first list has the files among `paths`, and the images below its folders,
    sorted. The second one has the paths without an image, each with the reason.
    """
    files: list[Path] = []
    missing: list[tuple[Path, str]] = []
    for path in paths:
        images = [path] if path.is_file() else list_images(path)
        files += images
        if not images:
            missing.append((path, "no image file, and no folder with image files"))
    return files, missing


def list_images(folder: Path) -> list[Path]:
    """Return the images below the folder, sorted. Hidden files and folders do not
    count: `._1.jpg` of macOS, for instance."""
    images: list[Path] = []
    for place, subfolders, names in os.walk(folder):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        for name in names:
            if name.startswith(".") or not name.lower().endswith(SUFFIXES):
                continue
            file = Path(place, name)
            if file.is_file():  # not a pipe, which would wait for ever for a writer
                images.append(file)
    return sorted(images)


def images_by_class(folder: Path) -> dict[str, list[Path]]:
    """Return the images of each class that has any. A class is a folder in `folder`."""
    classes: dict[str, list[Path]] = {}
    for path in folders_in(folder):
        images = list_images(path)
        if images:
            classes[path.name] = images
    return classes


def folders_in(folder: Path) -> list[Path]:
    """Return its folders, sorted, without hidden ones such as .ipynb_checkpoints."""
    return sorted(path for path in folder.glob("[!.]*") if path.is_dir())


@dataclass(eq=False)
class ImageFiles(Dataset[tuple[Tensor, int]]):
    """Images as uint8 (*shape), read when they are needed, and their class numbers.

    Args:
        files: The image files.
        targets: The class number of each file.
        shape: Channels, height and width that the images are brought to.
    """

    files: list[Path]
    targets: list[int]
    shape: tuple[int, int, int]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """Read an image. Raise UserError, which names the file, if it is damaged."""
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
        if num_workers is None:
            num_workers = min(8, os.cpu_count() or 1)
        super().__init__(data_dir=data_dir, num_workers=num_workers, **kwargs)
        self.image_shape: tuple[int, int, int] = image_shape
        self.random_crop = random_crop
        self.random_flip = random_flip

    @cached_property
    def folders(self) -> dict[str, Path]:
        """The folder of each split; no folder if the classes are in data_dir itself."""
        folders: dict[str, Path] = {}
        for path in folders_in(self.data_dir):
            split = SPLITS.get(path.name.lower())
            if split:
                folders.setdefault(split, path)
        if "train" in folders or "test" in folders:
            return folders
        return {}

    @cached_property
    def files(self) -> dict[str, dict[str, list[Path]]]:
        """The images by split and class, sorted. With folds there is no other test
        set."""
        files = {name: images_by_class(path) for name, path in self.folders.items()}
        if not files:
            files = self._divide(images_by_class(self.data_dir))
        if self.fold:
            files.pop("test", None)
        if files.get("val"):
            folder = self.folders["val"]
            say(f"Images: validation on {folder}; data.val_fraction has no effect")
        return files

    def _divide(self, classes: dict[str, list[Path]]) -> dict[str, Any]:
        """Return the images by split and class, with a seeded part of each class for
        the test.

        classes: All images of each class.
        """
        part = "a fold" if self.fold else "a fifth"
        say(
            f"Images: no train and test in {self.data_dir}: "
            f"{part} of each class is the test"
        )
        files: dict[str, Any] = {"train": {}, "test": {}}
        for name, images in classes.items():
            for split, by_class in files.items():
                index = self.seeded_part(len(images), split)  # type: ignore[arg-type]
                by_class[name] = [images[i] for i in index]
        return files

    @cached_property
    def own_splits(self) -> list[str]:  # type: ignore[override]
        """The splits that have an image."""
        return [name for name, classes in self.files.items() if any(classes.values())]

    @cached_property  # which a checkpoint can assign
    def classes(self) -> list[str]:  # type: ignore[override]
        """The names of the class folders for the training."""
        names = list(self.files.get("train", {}))
        if not names:
            raise UserError(
                f"data.data_dir {self.data_dir}: no image in train/CLASS/, nor CLASS/"
            )
        return names

    def prepare_data(self) -> None:
        """Raise UserError if a split has a class that the training set does not
        have."""
        for split, by_class in self.files.items():
            unknown = sorted(by_class.keys() - {*self.classes})
            if unknown:
                folder = self.folders.get(split, self.data_dir)
                raise UserError(
                    f"{folder} has classes that the training had not: {unknown[:5]}"
                )

    def load(self, split: Literal["train", "val", "test"]) -> ImageFiles:
        """Return the images of a split, class by class. None is read yet."""
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
