"""Imports all modules of the library. Prints their number, and what the imports have
changed in other packages and in this process."""

import importlib
import os
import signal
import sys
import threading
import warnings
from pathlib import Path

from jsonargparse import _common
from lightning import Trainer
from lightning.pytorch.accelerators import AcceleratorRegistry
from lightning.pytorch.strategies import StrategyRegistry

import lightbase

OTHERS = (
    "lightning.pytorch.cli",
    "torch.utils.tensorboard",
    "torchvision",
    "matplotlib.figure",
)


def state():
    return {
        "streams": (sys.stdout, sys.stderr, *sys.argv, *sys.path),
        "warnings": list(warnings.filters),
        "environment": dict(os.environ),
        "signals": {
            number: signal.getsignal(number) for number in signal.valid_signals()
        },
        "threads": threading.active_count(),
        "Trainer": {**vars(Trainer)},
        "strategies": StrategyRegistry.available_strategies(),
        "accelerators": AcceleratorRegistry.available_accelerators(),
        "jsonargparse": dict(_common.parsing_settings),
    }


if __name__ == "__main__":
    for name in OTHERS:
        importlib.import_module(name)  # these may change what they like
    before = state()
    folder = Path(lightbase.__path__[0])
    num_modules = 0
    for file in folder.rglob("*.py"):
        if folder / "tests" not in file.parents:
            path = file.relative_to(folder.parent).with_suffix("")
            importlib.import_module(".".join(path.parts))
            num_modules += 1
    after = state()
    print(num_modules, [key for key in before if before[key] != after[key]])
