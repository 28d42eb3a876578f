"""Files of data sets: download them if they are missing, with short errors, and read
pickled arrays without running code from the file.

`open_or_download` is for data sets of torchvision. For other downloads,
`short_download_errors` turns any error into two lines; docs/data.md has an example.
"""

import contextlib
import os
import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from torch import Tensor
from torchvision.datasets.utils import check_integrity

from lightbase.core.errors import UserError, first_line

NUMPY_NAMES = ("_reconstruct", "_frombuffer", "ndarray", "dtype")  # of a pickled array


def open_or_download(
    source: Any,
    data_dir: Path,
    files: str,
    published: Mapping[str, tuple[int, str]] = {},
    **options: Any,
) -> Any:
    """Return a data set of torchvision. If its files are missing, one process downloads
    them, and other processes wait.

    Raise UserError if a file is damaged, cannot be read, or cannot be downloaded.

    Args:
        source: A class of torchvision.datasets, such as MNIST.
        data_dir: The folder for the download. It is made if it is missing.
        files: A text for the error: which files a user without a network has to put
            where, such as "a.gz and b.gz into data/X".
        published: {path below data_dir: (size in bytes, MD5)}, for data sets whose
            files torchvision does not check. A file of this size must have this MD5. A
            file of another size is taken for other data and is not checked.
        options: The arguments of `source`, such as `root` and `train`.
    """
    name = source.__name__
    for path, (size, md5) in published.items():
        file = data_dir / path
        has_size = file.is_file() and file.stat().st_size == size
        if has_size and not check_integrity(file, md5):
            raise UserError(f"{file} is damaged: move it away to download it again")
    with short_download_errors(name, data_dir, files):
        data_dir.mkdir(parents=True, exist_ok=True)
        lock: Any = contextlib.nullcontext()
        if os.access(data_dir, os.W_OK):  # nobody downloads into any other folder
            lock = FileLock(data_dir / f".{name}.lock")
        with lock:
            try:
                return source(**options)
            except Exception:  # files that are missing or damaged
                return source(**options, download=True)


@contextlib.contextmanager
def short_download_errors(name: str, data_dir: Path, files: str) -> Iterator[None]:
    """Turn any error of a download, of unpacking or of reading into a UserError. It
    says which files belong into which folder.

    Args:
        name: The name of the data set.
        data_dir: The folder in which the files were expected.
        files: See `open_or_download`.
    """
    try:
        yield
    except Exception as error:  # of many types, also of the archives
        reason = (str(error) or type(error).__name__).splitlines()[-1]
        raise UserError(
            f"{name} is not in {data_dir}, or damaged, and cannot be downloaded: "
            f"{reason}",
            "move away what is damaged and start the command again; "
            f"without a network, put {files}",
        ) from error


class ArrayUnpickler(pickle.Unpickler):
    """Reads numbers, texts, lists, dicts and NumPy arrays from a pickle. A pickle can
    name any function and have it called. This class refuses all names except the names
    in a pickled array. See "Restricting Globals" in Python's documentation of pickle.
    """

    def find_class(self, module: str, name: str) -> Any:
        """Return the object of a name in the pickle, if arrays need it. Otherwise raise
        UnpicklingError."""
        is_numpy = module.partition(".")[0] == "numpy" and name in NUMPY_NAMES
        if is_numpy or (module, name) == ("_codecs", "encode"):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def read_arrays(file: Path, *keys: str) -> list[Tensor]:
    """Return the arrays, or lists of numbers, under these keys of a pickled dict, as
    tensors. No code in the file is run. Raise UserError if the file is damaged, or if
    it has other content."""
    try:
        with file.open("rb") as stream:
            content = ArrayUnpickler(stream, encoding="latin1").load()
        return [torch.tensor(content[key]) for key in keys]
    except Exception as error:  # a damaged pickle raises errors of any type
        raise UserError(
            f"{file} cannot be read: {type(error).__name__}: {first_line(error)}",
            "move it away to download it again",
        ) from error
