"""The extras of a training, put together. An extra that is deleted loses its lines
here, and nothing else changes.

The import of this file adds the flags of the extras to train.py. It has to come before
`lightbase.core.parser.make_parser` is called.
"""

import sys
from typing import Any

from jsonargparse.typing import NonNegativeInt
from lightning import Callback
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.strategies import StrategyRegistry

from lightbase.commands.script import is_interactive
from lightbase.core.build import as_list
from lightbase.core.checkpoint import CheckpointCheck
from lightbase.core.parser import EXTRA_FLAGS
from lightbase.core.run import OpenLoggers
from lightbase.core.spec import RunSpec
from lightbase.extras.data_parallel import DataParallelStrategy
from lightbase.extras.device_monitor import DeviceMonitor, busy_shares
from lightbase.extras.figures import PredictionFigures
from lightbase.extras.loggers import StartCurves, open_loggers
from lightbase.extras.progress import EpochLines, TrainingProgressBar
from lightbase.extras.step_timer import StepTimer, advice
from lightbase.extras.validated import ValidatedWeights

EXTRA_FLAGS[:] = [
    ("device_monitor", bool, True),
    ("step_timer", bool, True),
    ("figures_every_n_epochs", NonNegativeInt, 5),
]
LOGGERS: list[OpenLoggers] = [open_loggers]
"""What opens the loggers of a training."""


def register_strategies() -> None:
    """Let --trainer.strategy have the names of the extras' strategies. Call this before
    the Trainer is made; a second call has no effect."""
    StrategyRegistry.register("dp", DataParallelStrategy, override=True)


def extra_callbacks(spec: RunSpec) -> list[Callback]:
    """Return the callbacks of the extras for a training. They only watch: the weights
    are the same without them.

    spec: The record of the run. Its flags say which extras are used.
    """
    config = spec.config
    callbacks: list[Callback] = [PredictionFigures(config.figures_every_n_epochs)]
    if config.step_timer:
        callbacks.append(StepTimer())
    if config.device_monitor:
        callbacks.append(DeviceMonitor())
    return [*callbacks, EpochLines(), *progress_bar(spec), StartCurves()]


def extra_checks() -> list[CheckpointCheck]:
    """Return the extras' callbacks that come before all others, and check best.ckpt."""
    return [ValidatedWeights()]


def progress_bar(spec: RunSpec) -> list[Callback]:
    """Return the progress bar of a run, in a list, or an empty list.

    --trainer.enable_progress_bar decides. Without this flag there is a bar in a
    terminal and in a notebook. If --trainer.callbacks has another bar, there is only
    that one.

    spec: The record of the run, after `build`.
    """
    is_wanted = spec.config.trainer.enable_progress_bar
    if is_wanted is None:
        is_wanted = sys.stdout.isatty() or is_interactive()
    configured = as_list(spec.trainer["callbacks"])
    if is_wanted and not any(isinstance(x, ProgressBar) for x in configured):
        return [TrainingProgressBar()]
    return []


def advice_after(trainer: Any) -> str:
    """Return a finding about the time of a training and what to try. Return "" if there
    is none.

    trainer: The Trainer, after the training.
    """
    return advice(trainer, busy_shares(trainer))
