"""Imports all modules of the library and of the example. Prints how many, and what the imports have
changed in other packages and in this process.

jsonargparse's table of types is left out: it has to know our types of arguments (WeightsFile, Seed)
before it reads a class with such an argument, and nothing else looks them up.
"""

import ast
import importlib
import inspect
import os
import pkgutil
import signal
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import jsonargparse
from jsonargparse import _common
from lightning import Trainer
from lightning.pytorch import loggers
from lightning.pytorch.accelerators import AcceleratorRegistry
from lightning.pytorch.strategies import StrategyRegistry

import lightbase

LOGGERS = (loggers.CSVLogger, loggers.TensorBoardLogger, loggers.WandbLogger, loggers.MLFlowLogger)
HERE = Path(__file__).parent
ROOTS = (Path(lightbase.__file__).parent, HERE / "example")


def state() -> dict[str, Any]:
    return {
        "excepthooks": (sys.excepthook, threading.excepthook),
        "streams": (sys.stdout, sys.stderr, *sys.argv, *sys.path),
        "warnings": list(warnings.filters),
        "environment": dict(os.environ),
        "signals": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "threads": threading.active_count(),
        "Trainer": {**Trainer.__init__.__annotations__, "signature": inspect.signature(Trainer)},
        "loggers": [inspect.signature(logger.__init__) for logger in LOGGERS],
        "registries": (
            StrategyRegistry.available_strategies(),
            AcceleratorRegistry.available_accelerators(),
        ),
        "jsonargparse": dict(_common.parsing_settings),
        "classes": [{**vars(kind)} for kind in (Trainer, jsonargparse.ArgumentParser, *LOGGERS)],
    }


def imports(node: ast.AST) -> list[str]:
    if isinstance(node, ast.ImportFrom):
        return [node.module or ""]
    return [alias.name for alias in node.names] if isinstance(node, ast.Import) else []


if __name__ == "__main__":
    nodes = [
        node
        for root in ROOTS
        for path in root.rglob("*.py")
        for node in ast.parse(path.read_text()).body
    ]
    for name in sorted({name for node in nodes for name in imports(node)}):
        if name.partition(".")[0] not in ("lightbase", "example"):
            importlib.import_module(name)  # these may change what they like
    before = state()
    names = [
        module.name
        for root in ROOTS
        for module in pkgutil.walk_packages([str(root)], f"{root.name}.")
    ]
    for name in names:
        importlib.import_module(name)
    after = state()
    print(len(names), [key for key in before if before[key] != after[key]])
