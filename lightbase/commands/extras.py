"""The extras of a training, put together. An extra that is deleted loses its lines
here, and nothing else changes.

The import of this file adds the flags of the extras to train.py, and the lines for
mistakes in flags. It has to come before `lightbase.config.parser.make_parser` is
called.
"""

import sys
from typing import Any, Literal

from jsonargparse.typing import NonNegativeInt
from lightning import Callback
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.strategies import StrategyRegistry

from lightbase.commands.script import is_interactive
from lightbase.config.parser import EXPLAINERS, EXTRA_FLAGS, explain_mistake
from lightbase.config.spec import RunSpec, as_list
from lightbase.run.devices import DataParallelStrategy
from lightbase.watch.device_monitor import DeviceMonitor, busy_shares
from lightbase.watch.environment import EnvironmentFile
from lightbase.watch.figures import PredictionFigures
from lightbase.watch.loggers import LoggedSettings
from lightbase.watch.progress import EpochLines, TrainingProgressBar
from lightbase.watch.step_timer import StepTimer, advice
from lightbase.watch.stop_on_nan import StopOnNan

EXTRA_FLAGS[:] = [
    ("try_network", bool, True),
    ("stop_on_nan", bool, True),
    ("device_monitor", bool, True),
    ("step_timer", bool | Literal["table"], True),
    ("figures_every_n_epochs", NonNegativeInt, 5),
]

EXPLAINERS[:] = [explain_mistake]


def register_strategies() -> None:
    """Let --trainer.strategy have the names of the extras' strategies. Call this before
    the Trainer is made; a second call has no effect."""
    StrategyRegistry.register("dp", DataParallelStrategy, override=True)


def make_extras(spec: RunSpec) -> list[Callback]:
    """Return the extras of a training, in the order in which their methods are called.
    They only watch: the weights are the same without them.

    spec: The record of the run. Its flags say which extras are used.
    """
    config = spec.config
    extras: list[Callback] = [EnvironmentFile()]
    if config.stop_on_nan:
        extras.append(StopOnNan())
    extras.append(PredictionFigures(config.figures_every_n_epochs))
    if config.step_timer:
        extras.append(StepTimer(config.step_timer == "table"))
    if config.device_monitor:
        extras.append(DeviceMonitor())
    return [*extras, EpochLines(), *progress_bar(spec), LoggedSettings(spec)]


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
        return [TrainingProgressBar(refresh_rate=10)]
    return []


def advice_after(trainer: Any) -> str:
    """Return a finding about the time of a training and what to try. Return "" if there
    is none.

    trainer: The Trainer, after the training.
    """
    return advice(trainer, busy_shares(trainer))
