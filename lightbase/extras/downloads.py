"""Files of data sets: downloaded if they are missing, and pickled arrays read
safely."""

import contextlib
import os
import pickle
import zlib
from collections.abc import Iterator, Mapping
from http.client import HTTPException
from lzma import LZMAError
from pathlib import Path
from tarfile import TarError
from typing import Any
from zipfile import BadZipFile

import torch
from filelock import FileLock
from torch import Tensor
from torchvision.datasets.utils import check_integrity

from lightbase.core.errors import UserError, first_line

DOWNLOAD_ERRORS = (
    *(OSError, HTTPException),
    RuntimeError,  # torchvision's, for files that are missing or damaged
    *(EOFError, BadZipFile, TarError, LZMAError, zlib.error),  # of unpacking
)
NUMPY_NAMES = ("_reconstruct", "_frombuffer", "ndarray", "dtype")  # of a pickled array


def open_or_download(
    source: Any,
    data_dir: Path,
    files: str,
    published: Mapping[str, tuple[int, str]] | None = None,
    **options: Any,
) -> Any:
    """Return an object of the class `source` of torchvision.datasets. If its files are
    missing, one process downloads them, and others wait.

    Args:
        files: For the error, what to put where without a network: "a.gz and b.gz into
            data/X".
        published: Size in bytes and MD5 of files below data_dir, for sets whose files
            torchvision does not check. A file of this size must have this MD5. A file
            of another size is other data.
        options: Arguments of `source`.

    Raise UserError if a file is damaged, cannot be read, or cannot be downloaded.
    """
    name = source.__name__
    for path, (size, md5) in (published or {}).items():
        file = data_dir / path
        has_size = file.is_file() and file.stat().st_size == size
        if has_size and not check_integrity(file, md5):
            raise UserError(f"{file} is damaged: move it away to download it again")
    try:
        with short_download_errors(name, data_dir, files), one_process(name, data_dir):
            try:
                return source(**options)
            except DOWNLOAD_ERRORS:
                return source(**options, download=True)
    except (TypeError, ValueError, KeyError, AssertionError) as error:
        reason = str(error) or "a file is damaged, move it away to download it again"
        raise UserError(f"{name} cannot be read from {data_dir}: {reason}") from error


@contextlib.contextmanager
def one_process(name: str, data_dir: Path) -> Iterator[None]:
    """Let one process at a time use the files of a data set. A folder that cannot be
    written needs no lock.

    name: The name of the data set.
    """
    data_dir.mkdir(parents=True, exist_ok=True)
    if os.access(data_dir, os.W_OK):
        with FileLock(data_dir / f".{name}.lock"):
            yield
    else:
        yield


@contextlib.contextmanager
def short_download_errors(name: str, data_dir: Path, files: str) -> Iterator[None]:
    """Turn the errors of a download into a UserError that says which files belong in
    which folder.

    Args:
        name: The name of the data set.
        files: What to put where without a network: "a.gz and b.gz into data/X".
    """
    try:
        yield
    except DOWNLOAD_ERRORS as error:
        reason = (str(error) or type(error).__name__).splitlines()[-1]
        raise UserError(
            f"{name} is not in {data_dir}, or damaged, and cannot be downloaded: "
            f"{reason}",
            "move away what is damaged and start the command again; "
            f"without a network, put {files}",
        ) from error


class ArrayUnpickler(pickle.Unpickler):
    """Reads numbers, texts, lists, dicts and NumPy arrays. It refuses all other names
    in a pickle, which could run code."""

    def find_class(self, module: str, name: str) -> Any:
        """Return what a name in the pickle stands for, if it belongs to an array."""
        is_numpy = module.partition(".")[0] == "numpy" and name in NUMPY_NAMES
        if is_numpy or (module, name) == ("_codecs", "encode"):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def read_arrays(file: Path, *keys: str) -> list[Tensor]:
    """Return the arrays or lists of numbers under these keys of a pickled dict. Nothing
    in the file is run. Raise UserError if the file is damaged, or holds something
    else."""
    try:
        with file.open("rb") as stream:
            content = ArrayUnpickler(stream, encoding="latin1").load()
        return [torch.tensor(content[key]) for key in keys]
    except Exception as error:  # a damaged pickle raises errors of any type
        raise UserError(
            f"{file} cannot be read: {type(error).__name__}: {first_line(error)}",
            "move it away to download it again",
        ) from error
