"""Image files in folders, a folder a class: read while training, so they need not fit in memory."""

import os
from functools import cached_property
from pathlib import Path
from typing import Literal

from jsonargparse.typing import NonNegativeInt, PositiveInt
from torch import Tensor
from torch.utils.data import Dataset

from project.base.datamodule import TensorDataModule
from project.base.errors import UserError
from project.base.image_files import find_images, read_image
from project.data.transforms import crop_and_flip, to_float


class ImageFiles(Dataset[tuple[Tensor, int]]):
    """Image files and their class numbers: uint8 (*image_shape) each."""

    def __init__(self, files: list[Path], targets: list[int], image_shape: tuple[int, int, int]) -> None:
        self.files = files
        self.targets = targets
        self.image_shape = image_shape

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        try:
            return read_image(self.files[index], self.image_shape), self.targets[index]
        except UserError as error:
            raise UserError(f"{self.files[index]} cannot be read: {error}; mend or remove it") from error


class ImageFolder(TensorDataModule):
    """data_dir/train/CLASS/... and data_dir/test/CLASS/..., images of any size, in [0, 1] for the network.

    Args:
        data_dir: The folder with `train` and `test`.
        image_shape: Channels (1 grey, 3 colour), height and width that the images are brought to.
        num_workers: Processes that read the images; as many as there are cores unless given, 8 at most.
        random_crop: Shift training images by up to this many pixels; 0 leaves them.
        random_flip: Mirror half of the training images.
    """

    image_shape: tuple[int, int, int]

    def __init__(
        self,
        data_dir: str,
        image_shape: tuple[PositiveInt, PositiveInt, PositiveInt] = (3, 64, 64),
        num_workers: NonNegativeInt | None = None,
        random_crop: NonNegativeInt = 0,
        random_flip: bool = False,
        **kwargs,
    ) -> None:
        cores = os.cpu_count() or 1
        super().__init__(data_dir=data_dir, num_workers=min(8, cores) if num_workers is None else num_workers, **kwargs)
        self.image_shape = image_shape
        self.random_crop = random_crop
        self.random_flip = random_flip

    @cached_property
    def classes(self) -> list[str]:  # type: ignore[override]  # a checkpoint assigns its own
        return self._folders("train")

    def _folders(self, split: str) -> list[str]:
        folder = self.data_dir / split
        found = sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
        if not found:
            raise UserError(f"data.data_dir {self.data_dir}: there is no {split}/CLASS/ with images in it")
        return found

    def load(self, split: Literal["train", "test"]) -> ImageFiles:
        found = self._folders(split)
        if unknown := sorted(set(found) - set(self.classes)):
            raise UserError(f"{self.data_dir / split} has classes that the training had not: {', '.join(unknown[:5])}")
        files: list[Path] = []
        targets: list[int] = []
        for name in found:
            in_class, _ = find_images([self.data_dir / split / name])
            files += in_class
            targets += [self.classes.index(name)] * len(in_class)
        return ImageFiles(files, targets, self.image_shape)

    def normalize(self, inputs: Tensor) -> Tensor:
        return to_float(inputs)

    def augment(self, inputs: Tensor) -> Tensor:
        return crop_and_flip(inputs, self.random_crop, self.random_flip)
