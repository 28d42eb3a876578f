"""Data sets of torchvision, downloaded if their files are missing."""

import contextlib
import inspect
import os
import pickle
import zlib
from collections.abc import Iterator, Mapping
from functools import cached_property
from http.client import HTTPException
from lzma import LZMAError
from pathlib import Path
from tarfile import TarError
from typing import Any, Literal
from zipfile import BadZipFile

import torch
from filelock import FileLock
from jsonargparse.typing import NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset
from torchvision import datasets
from torchvision.datasets.utils import check_integrity

from lightbase.compat import labels_of
from lightbase.data.batches import Batch
from lightbase.data.images import ResizedImages
from lightbase.data.module import BaseDataModule
from lightbase.data.transforms import crop_and_flip, to_float
from lightbase.errors import UserError, did_you_mean, first_line

# RuntimeError is torchvision's, for files that are missing or damaged; the last four are errors of
# unpacking.
DOWNLOAD_ERRORS = (
    *(OSError, HTTPException, RuntimeError, EOFError),
    *(BadZipFile, TarError, LZMAError, zlib.error),
)
NUMPY_NAMES = ("_reconstruct", "_frombuffer", "ndarray", "dtype")  # of a pickled array


def open_or_download(
    source: Any,
    data_dir: Path,
    files: str,
    published: Mapping[str, tuple[int, str]] | None = None,
    **options: Any,
) -> Any:
    """An object of the class `source` of torchvision.datasets, made with `options`. If its files
    are missing, one process downloads them, and others wait.

    files: For the error, what to put where without a network: "a.gz and b.gz into data/X".
    published: Size in bytes and MD5 of files below data_dir, for sets whose files torchvision does
        not check. A file of this size must have this MD5; other sizes are other data.
    Raises UserError if a file is damaged, cannot be read, or cannot be downloaded.
    """
    name = source.__name__
    for path, (size, md5) in (published or {}).items():
        file = data_dir / path
        if file.is_file() and file.stat().st_size == size and not check_integrity(file, md5):
            raise UserError(f"{file} is damaged: move it away to download it again")
    try:
        with short_download_errors(name, data_dir, files):
            data_dir.mkdir(parents=True, exist_ok=True)
            can_write = os.access(data_dir, os.W_OK)
            with FileLock(data_dir / f".{name}.lock") if can_write else contextlib.nullcontext():
                try:
                    return source(**options)
                except DOWNLOAD_ERRORS:
                    return source(**options, download=True)
    except (TypeError, ValueError, KeyError, AssertionError) as error:
        reason = str(error) or "a file is damaged, move it away to download it again"
        raise UserError(f"{name} cannot be read from {data_dir}: {reason}") from error


@contextlib.contextmanager
def short_download_errors(name: str, data_dir: Path, files: str) -> Iterator[None]:
    """Around a download: turn its errors into a UserError that says what belongs where. name: of
    the data set. files: What to put where without a network: "a.gz and b.gz into data/X"."""
    try:
        yield
    except DOWNLOAD_ERRORS as error:
        reason = (str(error) or type(error).__name__).splitlines()[-1]
        what = f"{name} is not in {data_dir}, or damaged, and cannot be downloaded: {reason}"
        way_out = "move away what is damaged and start the command again"
        raise UserError(f"{what}\n{way_out}; without a network, put {files}") from error


class ArrayUnpickler(pickle.Unpickler):
    """Reads numbers, texts, lists, dicts and NumPy arrays. It refuses all other names in a pickle,
    which could run code."""

    def find_class(self, module: str, name: str) -> Any:
        is_numpy = module.partition(".")[0] == "numpy" and name in NUMPY_NAMES
        if is_numpy or (module, name) == ("_codecs", "encode"):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def read_arrays(file: Path, *keys: str) -> list[Tensor]:
    """The arrays or lists of numbers under these keys of a pickled dict. Nothing in the file is
    run. Raises UserError if the file is damaged, or holds something else."""
    try:
        with file.open("rb") as stream:
            content = ArrayUnpickler(stream, encoding="latin1").load()
        return [torch.tensor(content[key]) for key in keys]
    except Exception as error:  # a damaged pickle raises errors of any type
        what = f"{file} cannot be read: {type(error).__name__}: {first_line(error)}"
        raise UserError(f"{what}\nmove it away to download it again") from error


def in_memory(source: Any) -> Batch | None:
    """uint8 (N, C, H, W) and class numbers (N,) of a torchvision set that has them as arrays, in
    any of the layouts HW, HWC and CHW; None of other sets."""
    images, targets = vars(source).get("data"), labels_of(source)
    if targets is None or not hasattr(images, "shape"):
        return None
    images, targets = torch.as_tensor(images), torch.as_tensor(targets)
    if images.dim() == 3:
        images = images[:, None]
    if images.shape[-1] in (1, 3) and images.shape[1] not in (1, 3):
        images = images.permute(0, 3, 1, 2).contiguous()
    return (images, targets) if targets.dim() == 1 else None


class TorchvisionSet(BaseDataModule):
    """FashionMNIST, KMNIST, SVHN, CIFAR100, STL10, Food101, FakeData, ..., downloaded if files are
    missing.

    Sets that torchvision has in memory train from there. The images of others are read while
    training: see num_workers. If torchvision has no test set, a seeded fifth of the samples is it.

    Args:
        dataset: The class in torchvision.datasets.
        random_crop: Shift training images by up to this many pixels; 0 leaves them.
        random_flip: Mirror half of the training images.
        mean: Subtracted from the values, which are in [0, 1] before.
        std: Divides the difference.
        image_shape: Channels, height and width; if not given, the set's, or [3, 64, 64] for sets
            that are not in memory.
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
        if dataset not in datasets.__all__ or dataset == "LSUN":  # LSUN unpickles a file
            hint = did_you_mean(dataset, datasets.__all__) or "; try FashionMNIST or CIFAR100"
            raise UserError(f"data.dataset {dataset!r} is not in torchvision.datasets{hint}", 2)
        self.source: Any = vars(datasets)[dataset]
        self.parameters = inspect.signature(self.source).parameters
        self.opened: dict[str, Any] = {}
        self.random_crop, self.random_flip = random_crop, random_flip
        self.mean, self.std = mean, std
        if image_shape is not None:
            self.image_shape = image_shape

    @cached_property
    # users and checkpoints assign another one
    def image_shape(self) -> tuple[int, int, int]:  # type: ignore[override]
        arrays = in_memory(self.open("train"))
        return tuple(arrays[0].shape[1:]) if arrays else (3, 64, 64)  # type: ignore[return-value]

    @cached_property
    def classes(self) -> list[str]:  # type: ignore[override]
        source = self.open("train")
        with contextlib.suppress(AttributeError):
            return [str(name) for name in source.classes]
        targets = labels_of(source)
        if targets is None:
            targets = [source[i][1] for i in range(len(source))]
        return [str(i) for i in range(int(max(targets)) + 1)]

    def prepare_data(self) -> None:
        self.open("train")
        if not self.fold:
            self.open("test")

    def open(self, split: Literal["train", "test"]) -> Any:
        """torchvision's object of a split."""
        if split not in self.opened:
            arguments = {"root": self.data_dir, "train": split == "train", "split": split}
            options: Any = {k: v for k, v in arguments.items() if k in self.parameters}
            is_mnist = issubclass(self.source, datasets.MNIST)
            folder = self.data_dir / self.source.__name__ / "raw" if is_mnist else self.data_dir
            files = f"its files into {folder}"
            self.opened[split] = open_or_download(self.source, self.data_dir, files, **options)
        return self.opened[split]

    def load(self, split: Literal["train", "test"]) -> Dataset:
        source = self.open(split)
        arrays = in_memory(source)
        data: Any = ResizedImages(source, self.image_shape, labels_of(source))
        if arrays and arrays[0].shape[1:] == tuple(self.image_shape):
            data = TensorDataset(*arrays)
        if "train" in self.parameters or "split" in self.parameters or self.fold:
            return data
        return Subset(data, self.seeded_part(len(data), split).tolist())

    def normalize(self, inputs: Tensor) -> Tensor:
        return to_float(inputs, self.mean, self.std)

    def augment(self, inputs: Tensor) -> Tensor:
        return crop_and_flip(inputs, self.random_crop, self.random_flip)
