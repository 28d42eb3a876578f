"""Data sets of torchvision: downloaded where their files are missing, and their arrays."""

import contextlib
import inspect
import os
import zlib
from functools import cached_property
from http.client import HTTPException
from lzma import LZMAError
from pathlib import Path
from tarfile import TarError
from typing import Any, Literal
from zipfile import BadZipFile

import numpy as np
import torch
from filelock import FileLock
from jsonargparse.typing import NonNegativeInt, PositiveFloat, PositiveInt
from lightning import LightningDataModule
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset
from torchvision import datasets

from lightbase.compat import labels_of
from lightbase.data.batches import Batch
from lightbase.data.images import ResizedImages
from lightbase.data.module import BaseDataModule
from lightbase.data.transforms import crop_and_flip, to_float
from lightbase.errors import UserError, did_you_mean

# A failed download, or a file that was cut short: RuntimeError is torchvision's, the last four are
# of unpacking.
DOWNLOAD_ERRORS = (
    OSError,
    HTTPException,
    RuntimeError,
    EOFError,
    BadZipFile,
    TarError,
    LZMAError,
    zlib.error,
)
WAY_OUT = "delete what has come in half, and start the command again"


def prepare_data(data: LightningDataModule) -> None:
    """Call the data module's prepare_data. An error of a download gets a note below its
    traceback."""
    try:
        data.prepare_data()
    except DOWNLOAD_ERRORS as error:
        error.add_note(f"Is the network there? If a download failed, {WAY_OUT}.")
        raise


def open_or_download(source: Any, data_dir: Path, files: str, **options: Any) -> Any:
    """A class of torchvision.datasets, with its `options`. One process downloads, others wait for
    it.

    files: What to put where without a network, for the error: "a.gz and b.gz into data/X".
    Raises UserError if the set is not there and cannot be downloaded, or cannot be read.
    """
    name = source.__name__
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        may_write = os.access(data_dir, os.W_OK)
        with FileLock(data_dir / f".{name}.lock") if may_write else contextlib.nullcontext():
            try:
                return source(**options)
            except DOWNLOAD_ERRORS:
                return source(**options, download=True)
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        raise UserError(f"{name} needs {package}: pip install {package}") from error
    except DOWNLOAD_ERRORS as error:
        reason = (str(error) or type(error).__name__).splitlines()[-1]
        what = f"{name} is not in {data_dir}, or damaged, and cannot be downloaded: {reason}"
        raise UserError(f"{what}\n{WAY_OUT}; without a network, put {files}") from error
    except (TypeError, ValueError, AssertionError) as error:
        raise UserError(f"{name} cannot be read from {data_dir}: {error}") from error


def in_memory(found: Any) -> Batch | None:
    """uint8 (N, C, H, W) and class numbers (N,) of a torchvision set that has them as arrays: HW,
    HWC or CHW."""
    fields = vars(found)
    images, targets = fields.get("data"), fields.get("targets", fields.get("labels"))
    if not isinstance(images, Tensor | np.ndarray) or targets is None:
        return None
    images, targets = torch.as_tensor(images), torch.as_tensor(targets)
    images = images[:, None] if images.dim() == 3 else images
    if images.shape[-1] in (1, 3) and images.shape[1] not in (1, 3):
        images = images.permute(0, 3, 1, 2).contiguous()
    return (images, targets) if targets.dim() == 1 else None


class TorchvisionSet(BaseDataModule):
    """FashionMNIST, KMNIST, SVHN, CIFAR100, STL10, Food101, FakeData, ..., downloaded where files
    are missing.

    Sets that torchvision has in memory train from there; of others images are read while training:
    see num_workers. Where torchvision knows no test set, a seeded fifth is it.

    Args:
        dataset: The class in torchvision.datasets.
        random_crop: Shift training images by up to this many pixels; 0 leaves them.
        random_flip: Mirror half of the training images.
        mean: Taken off the values, which are in [0, 1] then.
        std: Divides what is left.
        image_shape: Channels, height and width; if not given, the set's own, or [3, 64, 64] for
            what is not in memory.
    """

    def __init__(
        self,
        dataset: str,
        random_crop: NonNegativeInt = 0,
        random_flip: bool = False,
        mean: float = 0.0,
        std: PositiveFloat = 1.0,
        image_shape: tuple[Literal[1, 3], PositiveInt, PositiveInt] | None = None,
        **kwargs,
    ) -> None:
        super().__init__(**kwargs)
        if dataset not in datasets.__all__ or dataset == "LSUN":  # which unpickles a file
            hint = (
                did_you_mean(dataset, datasets.__all__)
                or "; FashionMNIST, SVHN and CIFAR100 are some"
            )
            raise UserError(
                f"data.dataset {dataset!r} is no class of torchvision.datasets{hint}", 2
            )
        self.source: Any = vars(datasets)[dataset]
        self.parameters = inspect.signature(self.source).parameters
        self.opened: dict[str, Any] = {}
        self.random_crop, self.random_flip = random_crop, random_flip
        self.mean, self.std = mean, std
        if image_shape is not None:
            self.image_shape = image_shape

    @cached_property
    # users and checkpoints assign their own
    def image_shape(self) -> tuple[int, int, int]:  # type: ignore[override]
        arrays = in_memory(self.open("train"))
        return tuple(arrays[0].shape[1:]) if arrays else (3, 64, 64)  # type: ignore[return-value]

    @cached_property
    def classes(self) -> list[str]:  # type: ignore[override]
        found = self.open("train")
        with contextlib.suppress(AttributeError):
            return [str(name) for name in found.classes]
        arrays = in_memory(found)
        last = int(arrays[1].max()) if arrays else max(found[i][1] for i in range(len(found)))
        return [str(i) for i in range(last + 1)]

    def prepare_data(self) -> None:
        self.open("train")
        if not self.fold:
            self.open("test")

    def open(self, split: Literal["train", "test"]) -> Any:
        """torchvision's own object."""
        if split not in self.opened:
            known = {"root": self.data_dir, "train": split == "train", "split": split}
            options: dict[str, Any] = {
                key: value for key, value in known.items() if key in self.parameters
            }
            is_mnist = issubclass(self.source, datasets.MNIST)
            folder = self.data_dir / self.source.__name__ / "raw" if is_mnist else self.data_dir
            self.opened[split] = open_or_download(
                self.source, self.data_dir, f"its files into {folder}", **options
            )
        return self.opened[split]

    def load(self, split: Literal["train", "test"]) -> Dataset:
        found = self.open(split)
        arrays = in_memory(found)
        fits = arrays and arrays[0].shape[1:] == tuple(self.image_shape)
        targets = labels_of(found)
        data: Any = (
            TensorDataset(*arrays)
            if arrays and fits
            else ResizedImages(found, self.image_shape, targets)
        )
        if "train" in self.parameters or "split" in self.parameters:
            return data
        return Subset(data, self.seeded_part(len(data), split).tolist())

    def normalize(self, inputs: Tensor) -> Tensor:
        return to_float(inputs, self.mean, self.std)

    def augment(self, inputs: Tensor) -> Tensor:
        return crop_and_flip(inputs, self.random_crop, self.random_flip)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {
            "image_shape": [int(size) for size in self.image_shape]
        }  # no PositiveInt

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        vars(self).setdefault(
            "image_shape", tuple(state_dict["image_shape"])
        )  # that of a flag stays
        super().load_state_dict(state_dict)
