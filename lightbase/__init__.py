"""A library for training with PyTorch Lightning: what a project derives from, and its
tools.

The names below are its public interface. They are imported when they are first used:
scripts are to answer Ctrl-C before torch is imported, which takes seconds.
"""

import importlib
from typing import Any

__version__ = "0.4.0"

NAMES = {
    "commands.checkpoint": ("Result",),
    "commands.predict": ("predict",),
    "commands.python": ("confusion_matrix", "load", "mistakes", "pictures", "train"),
    "commands.train": ("main",),
    "config.errors": ("UserError", "say"),
    "data.downloads": ("open_or_download", "short_download_errors"),
    "data.image_folder": ("ImageFolder",),
    "data.loader": ("ResumableLoader",),
    "data.module": ("BaseDataModule",),
    "data.sampler": ("EpochBatchSampler",),
    "data.tensors": ("Batch", "at_least_float32"),
    "data.transforms": (
        "alternating_flip",
        "crop_and_flip",
        "flip_where",
        "random_crop",
        "random_flip",
        "to_float",
    ),
    "model.curves": ("run_folder",),
    "model.metrics": ("Metrics", "collection"),
    "model.module": ("BaseModule",),
    "model.optim": ("FinalDecayLR", "WarmupCosineLR"),
}
"""The public names of each module. `__init__.pyi` has them for type checkers."""
MODULES = {name: module for module, names in NAMES.items() for name in names}
__all__ = [*MODULES]


def __getattr__(name: str) -> Any:
    if name not in MODULES:
        raise AttributeError(f"module 'lightbase' has no attribute {name!r}")
    return getattr(importlib.import_module(f"lightbase.{MODULES[name]}"), name)
