"""A library for training with PyTorch Lightning: what a project derives from, and its tools.

The names below are its public interface. They are imported when they are first used: scripts are
to answer Ctrl-C before torch is imported, which takes seconds.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightbase.curves import MayMissSteps, run_folder
    from lightbase.data.batches import Batch, EpochBatchSampler, ResumableLoader, at_least_float32
    from lightbase.data.downloads import open_or_download, read_arrays, short_download_errors
    from lightbase.data.images import ImageFolder
    from lightbase.data.module import BaseDataModule
    from lightbase.errors import UserError, say
    from lightbase.metrics import Metrics, collection
    from lightbase.module import BaseModule
    from lightbase.optim import FinalDecayLR, WarmupCosineLR
    from lightbase.run.python import load, train
    from lightbase.run.train import main

__version__ = "0.3.0"

NAMES = {
    "curves": ("MayMissSteps", "run_folder"),
    "data.batches": ("Batch", "EpochBatchSampler", "ResumableLoader", "at_least_float32"),
    "data.downloads": ("open_or_download", "read_arrays", "short_download_errors"),
    "data.images": ("ImageFolder",),
    "data.module": ("BaseDataModule",),
    "errors": ("UserError", "say"),
    "metrics": ("Metrics", "collection"),
    "module": ("BaseModule",),
    "optim": ("FinalDecayLR", "WarmupCosineLR"),
    "run.python": ("load", "train"),
    "run.train": ("main",),
}
"""The public names of each module."""
MODULES = {name: module for module, names in NAMES.items() for name in names}
__all__ = [*MODULES]


def __getattr__(name: str) -> Any:
    if name not in MODULES:
        raise AttributeError(f"module 'lightbase' has no attribute {name!r}")
    return getattr(importlib.import_module(f"lightbase.{MODULES[name]}"), name)
