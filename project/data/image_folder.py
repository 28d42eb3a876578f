"""Image files in folders, a folder a class: read while training, so they need not fit in memory."""

import os
from functools import cached_property
from typing import Literal

from jsonargparse.typing import NonNegativeInt, PositiveInt
from torch import Tensor

from project.base.datamodule import TensorDataModule
from project.base.errors import UserError
from project.base.image_files import ResizedImages, find_images
from project.data.transforms import crop_and_flip, to_float


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
        num_workers = min(8, os.cpu_count() or 1) if num_workers is None else num_workers
        super().__init__(data_dir=data_dir, num_workers=num_workers, **kwargs)
        self.image_shape: tuple[int, int, int] = image_shape
        self.random_crop = random_crop
        self.random_flip = random_flip

    @cached_property
    def classes(self) -> list[str]:  # type: ignore[override]  # a checkpoint assigns its own
        return self._folders("train")

    def _folders(self, split: str) -> list[str]:
        found = sorted(path.name for path in self.data_dir.glob(f"{split}/*") if path.is_dir())
        if not found:
            raise UserError(f"data.data_dir {self.data_dir}: there is no {split}/CLASS/ with images in it")
        return found

    def load(self, split: Literal["train", "test"]) -> ResizedImages:
        found = self._folders(split)
        if unknown := sorted(set(found) - set(self.classes)):
            raise UserError(f"{self.data_dir / split} has classes that the training had not: {', '.join(unknown[:5])}")
        folders = [(self.data_dir / split / name, self.classes.index(name)) for name in found]
        files = [(file, target) for folder, target in folders for file in find_images([folder])[0]]
        return ResizedImages(files, self.image_shape)

    def normalize(self, inputs: Tensor) -> Tensor:
        return to_float(inputs)

    def augment(self, inputs: Tensor) -> Tensor:
        return crop_and_flip(inputs, self.random_crop, self.random_flip)
