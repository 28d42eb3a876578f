"""Data sets of torchvision: downloaded where their files are missing, and their arrays."""

import contextlib
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock
from torch import Tensor

from project.base.errors import UserError
from project.base.samples import Batch


def open_or_download(source: Any, data_dir: Path, files: str, **options: Any) -> Any:
    """A class of torchvision.datasets, with its `options`. One process downloads, others wait for it.

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
            except (OSError, RuntimeError):
                return source(**options, download=True)
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        raise UserError(f"{name} needs {package}: pip install {package}") from error
    except (OSError, RuntimeError) as error:
        what = f"{name} is not in {data_dir}, or damaged, and cannot be downloaded: {str(error).splitlines()[-1]}"
        raise UserError(f"{what}\nwithout a network, put {files}") from error
    except (TypeError, ValueError, AssertionError) as error:
        raise UserError(f"{name} cannot be read from {data_dir}: {error}") from error


def in_memory(found: Any) -> Batch | None:
    """uint8 (N, C, H, W) and class numbers (N,) of a torchvision set that has them as arrays: HW, HWC or CHW."""
    fields = vars(found)
    images, targets = fields.get("data"), fields.get("targets", fields.get("labels"))
    if not isinstance(images, Tensor | np.ndarray) or targets is None:
        return None
    images, targets = torch.as_tensor(images), torch.as_tensor(targets)
    images = images[:, None] if images.dim() == 3 else images
    if images.shape[-1] in (1, 3) and images.shape[1] not in (1, 3):
        images = images.permute(0, 3, 1, 2).contiguous()
    return (images, targets) if targets.dim() == 1 else None
