"""Image files in folders, a folder a class: read while training, so they need not fit in memory."""

import os
from pathlib import Path
from typing import Literal

import torch
from jsonargparse.typing import NonNegativeInt, PositiveInt
from torch import Tensor

from project.base.datamodule import TensorDataModule
from project.base.errors import UserError
from project.base.image_files import find_images, read_image
from project.base.samples import Batch, Samples
from project.data.transforms import random_crop, random_flip, to_float


class ImageFiles(Samples):
    """Labelled image files. A DataLoader's worker reads a whole batch: uint8 (N, *image_shape)."""

    def __init__(self, files: list[Path], labels: Tensor, image_shape: tuple[int, int, int]) -> None:
        self.files = files
        self.labels = labels
        self.image_shape = image_shape

    def __getitem__(self, index: int) -> Batch:
        try:
            return read_image(self.files[index], self.image_shape), self.labels[index]
        except UserError as error:
            raise UserError(f"{self.files[index]} cannot be read: {error}; mend or remove it") from error

    def __getitems__(self, indices: list[int]) -> Batch:
        images, labels = zip(*(self[index] for index in indices), strict=True)
        return torch.stack(images), torch.stack(labels)

    def select(self, index: Tensor) -> "ImageFiles":
        return ImageFiles([self.files[i] for i in index.tolist()], self.labels[index], self.image_shape)


class ImageFolder(TensorDataModule):
    """data_dir/train/CLASS/... and data_dir/test/CLASS/..., images of any size, in [0, 1] for the network.

    Args:
        data_dir: The folder with `train` and `test`.
        image_shape: Channels (1 grey, 3 colour), height and width that the images are brought to.
        num_workers: Processes that read the images; as many as there are cores unless given, 8 at most.
        random_crop: Shift training images by up to this many pixels; 0 leaves them.
        random_flip: Mirror half of the training images.
    """

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
        self.classes = []

    def samples(self, split: Literal["train", "test"]) -> Samples:
        folder = self.data_dir / split
        found = sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
        if not found:
            raise UserError(f"data.data_dir {self.data_dir}: there is no {split}/CLASS/ with images in it")
        self.classes = self.classes or found
        unknown = set(found) - set(self.classes)
        if unknown:
            raise UserError(f"{folder} has classes that the training had not: {', '.join(sorted(unknown)[:5])}")
        files: list[Path] = []
        labels: list[int] = []
        for name in found:
            in_class, _ = find_images([folder / name])
            files += in_class
            labels += [self.classes.index(name)] * len(in_class)
        return ImageFiles(files, torch.tensor(labels, dtype=torch.long), self.image_shape)

    def normalize(self, inputs: Tensor) -> Tensor:
        return to_float(inputs)

    def augment(self, inputs: Tensor) -> Tensor:
        if self.random_crop:
            inputs = random_crop(inputs, self.random_crop)
        return random_flip(inputs) if self.random_flip else inputs
