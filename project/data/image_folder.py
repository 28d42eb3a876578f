"""Image files in folders, a folder a class: read while training, so they need not fit in memory."""

import os
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from jsonargparse.typing import NonNegativeInt, PositiveInt
from torch import Tensor

from project.base.datamodule import TensorDataModule
from project.base.errors import UserError
from project.base.image_files import ResizedImages, check_images, find_images
from project.base.rank import say
from project.data.transforms import crop_and_flip, to_float

NAMES = {"train": "train", "training": "train", "val": "val", "valid": "val", "validation": "val"}
NAMES |= {"test": "test", "testing": "test"}


class ImageFolder(TensorDataModule):
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
