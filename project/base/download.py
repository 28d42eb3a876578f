"""Data sets of torchvision: downloaded where their files are missing, and their arrays."""

import contextlib
import os
import zlib
from http.client import HTTPException
from lzma import LZMAError
from pathlib import Path
from tarfile import TarError
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch
from filelock import FileLock
from lightning import LightningDataModule
from torch import Tensor

from project.base.errors import UserError
from project.base.samples import Batch

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
