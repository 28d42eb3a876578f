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

# RuntimeError is torchvision's, for files that are missing or damaged; the last four
# are errors of unpacking.
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
    """An object of the class `source` of torchvision.datasets, made with `options`. If
    its files are missing, one process downloads them, and others wait.

    files: For the error, what to put where without a network: "a.gz and b.gz into
        data/X".
    published: Size in bytes and MD5 of files below data_dir, for sets whose files
        torchvision does not check. A file of this size must have this MD5; other sizes
        are other data.
    Raises UserError if a file is damaged, cannot be read, or cannot be downloaded.
    """
    name = source.__name__
    for path, (size, md5) in (published or {}).items():
        file = data_dir / path
        if (
            file.is_file()
            and file.stat().st_size == size
            and not check_integrity(file, md5)
        ):
            raise UserError(f"{file} is damaged: move it away to download it again")
    try:
        with short_download_errors(name, data_dir, files):
            data_dir.mkdir(parents=True, exist_ok=True)
            can_write = os.access(data_dir, os.W_OK)
            with (
                FileLock(data_dir / f".{name}.lock")
                if can_write
                else contextlib.nullcontext()
            ):
                try:
                    return source(**options)
                except DOWNLOAD_ERRORS:
                    return source(**options, download=True)
    except (TypeError, ValueError, KeyError, AssertionError) as error:
        reason = str(error) or "a file is damaged, move it away to download it again"
        raise UserError(f"{name} cannot be read from {data_dir}: {reason}") from error


@contextlib.contextmanager
def short_download_errors(name: str, data_dir: Path, files: str) -> Iterator[None]:
    """Around a download: turn its errors into a UserError that says what belongs where.
    name: of the data set. files: What to put where without a network: "a.gz and b.gz
        into data/X"."""
    try:
        yield
    except DOWNLOAD_ERRORS as error:
        reason = (str(error) or type(error).__name__).splitlines()[-1]
        what = f"{name} is not in {data_dir}, or damaged, and cannot be downloaded: {reason}"
        way_out = "move away what is damaged and start the command again"
        raise UserError(what, f"{way_out}; without a network, put {files}") from error


class ArrayUnpickler(pickle.Unpickler):
    """Reads numbers, texts, lists, dicts and NumPy arrays. It refuses all other names
    in a pickle, which could run code."""

    def find_class(self, module: str, name: str) -> Any:
        is_numpy = module.partition(".")[0] == "numpy" and name in NUMPY_NAMES
        if is_numpy or (module, name) == ("_codecs", "encode"):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def read_arrays(file: Path, *keys: str) -> list[Tensor]:
    """The arrays or lists of numbers under these keys of a pickled dict. Nothing in the
    file is run. Raises UserError if the file is damaged, or holds something else."""
    try:
        with file.open("rb") as stream:
            content = ArrayUnpickler(stream, encoding="latin1").load()
        return [torch.tensor(content[key]) for key in keys]
    except Exception as error:  # a damaged pickle raises errors of any type
        what = f"{file} cannot be read: {type(error).__name__}: {first_line(error)}"
        raise UserError(what, "move it away to download it again") from error
