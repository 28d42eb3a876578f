"""Files of data sets, downloaded if they are missing."""

import contextlib
import os
import zlib
from collections.abc import Iterator
from http.client import HTTPException
from lzma import LZMAError
from pathlib import Path
from tarfile import TarError
from typing import Any
from zipfile import BadZipFile

from filelock import FileLock

from lightbase.errors import UserError

# RuntimeError is torchvision's, for files that are missing or damaged; the last four are errors of
# unpacking.
DOWNLOAD_ERRORS = (
    *(OSError, HTTPException, RuntimeError, EOFError),
    *(BadZipFile, TarError, LZMAError, zlib.error),
)


def open_or_download(source: Any, data_dir: Path, files: str, **options: Any) -> Any:
    """An object of the class `source` of torchvision.datasets, made with `options`. If its files
    are missing, one process downloads them, and others wait.

    files: For the error, what to put where without a network: "a.gz and b.gz into data/X".
    Raises UserError if a file is damaged, cannot be read, or cannot be downloaded.
    """
    name = source.__name__
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
        way_out = f"move away what is damaged; without a network, put {files}"
        raise UserError(f"{what}\n{way_out}") from error
