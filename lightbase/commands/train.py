"""Train a network: from the command line to the test result.

`train_flags` parses the flags and builds the model and the data (`parse`), then trains
and tests them (`train_parsed`). sweep.py, tune.py and commands/python.py call these
functions.
`make_callbacks` lists the callbacks of a training, with the reason for their order.
"""

import functools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning import Callback, LightningDataModule, LightningModule
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    LearningRateFinder,
    ModelCheckpoint,
    ProgressBar,
    StochasticWeightAveraging,
)
from lightning.pytorch.strategies import StrategyRegistry

from lightbase.checks.first_step import FirstStep
from lightbase.commands.script import run_command
from lightbase.commands.seeds import split_seeds, train_seeds
from lightbase.compat import quiet_lightning
from lightbase.config.errors import UserError, imported, say
from lightbase.config.files import relative_to_cwd
from lightbase.config.spec import (
    CommandLine,
    RunSpec,
    arguments,
    as_list,
    as_values,
    default_experiment,
    new_spec,
)
from lightbase.model.curves import RunFolder
from lightbase.model.module import BaseModule
from lightbase.model.monitor import Monitor
from lightbase.run import fit
from lightbase.run.checkpoint import AverageFollows, RunCheckpoint, ValidatedWeights
from lightbase.run.devices import (
    DataParallelStrategy,
    FullyShardedStrategy,
    ShardedCheckpoints,
    check_one_device,
    cpu_threads,
)
from lightbase.run.fit import users_callbacks
from lightbase.run.folder import root_folder
from lightbase.run.record import RunRecorder
from lightbase.run.signals import SIGNALS
from lightbase.run.state import (
    PlateauFirst,
    RandomState,
    ResumedOptimizer,
    WholeEpochs,
)
from lightbase.run.stops import BetweenSteps, Patience
from lightbase.setup.build import build
from lightbase.setup.load import Loaded
from lightbase.setup.resume import find_restart, load_restart, resumed_spec
from lightbase.watch.cuda_graphs import CudaGraphs
from lightbase.watch.device_monitor import DeviceMonitor, busy_shares
from lightbase.watch.dry_run import dry_run
from lightbase.watch.environment import EnvironmentFile
from lightbase.watch.figures import PredictionFigures
from lightbase.watch.log import LogFile, copied_output
from lightbase.watch.loggers import LoggedSettings, open_loggers
from lightbase.watch.progress import EpochLines, TrainingProgressBar
from lightbase.watch.step_timer import StepTimer, advice
from lightbase.watch.stop_on_nan import StopOnNan

EPOCH_FILES = "epoch_{epoch:03d}"
"""The names of the checkpoints of --keep_every_epoch."""


def main(args: Sequence[str] | None = None) -> dict[str, Any]:
    """Train by the flags in `args`, or by the flags of the command line, and test the
    best checkpoint. Return the content of metrics.json.

    A user's mistake prints two lines and raises SystemExit with status 2 (usage) or 1
    (run). In a notebook, use `lightbase.train`.
    """
    metrics: dict[str, Any] = run_command("commands.train", args)
    return metrics


def run(args: Sequence[str]) -> dict[str, Any]:
    """Train by the flags in `args`, with one seed or with several. `run_command`
    imports this module and calls this function."""
    quiet_lightning()
    seeds, has_own_splits, others = split_seeds(args)
    if not seeds:
        return train_flags(others, restarts=True)
    spec, _, _ = parse(others)
    check_one_device(spec.config.trainer)
    if spec.config.trainer.fast_dev_run or spec.checkpoint:
        raise UserError(
            "--seeds trains new runs: not beside --trainer.fast_dev_run or --ckpt_path",
            "leave it out; the same command with --seeds continues",
            2,
        )
    if arguments(spec.config.data).get("val_split") == "ordered":
        say("All seeds have the same validation set: --data.val_split ordered")
    return train_seeds(
        root_folder(spec.config),
        as_values(spec),
        others,
        seeds,
        has_own_splits,
        train_flags,
    )


def train_flags(args: Sequence[str], restarts: bool = False) -> dict[str, Any]:
    """Parse the flags, then train and test. Return the content of metrics.json.

    restarts: Whether torchrun may have started this command again.
    """
    with copied_output() as log:
        return train_parsed(*parse(args, restarts), log)


def parse(args: Sequence[str], restarts: bool = False) -> Loaded:
    """Return the record, the model and the data of a command line.

    With --ckpt_path they are the model and the data of a saved run: its config counts,
    and the flags may change some settings. Without an experiment in the flags, the
    default experiment is used, and two lines say so.

    args: The flags of train.py.
    restarts: Whether torchrun may have started this command again.
    Raise UserError for a mistake in the flags, the config files or the checkpoint.
    """
    line = CommandLine(args)
    restart = find_restart(line, restarts)
    if restart is None:
        check_model_alone(line)
        spec, model, data = build(new_spec(line))
        if not line.names_experiment:
            say_default()
    else:
        spec, model, data = build(resumed_spec(restart, line))
        load_restart(restart, spec, model, data)
    return spec, model, data


def check_model_alone(line: CommandLine) -> None:
    """Raise UserError for a plain LightningModule without a data module. The default
    experiment has settings of a BaseModule, and its data is for such a model."""
    if line.names_experiment or line.model is None:
        return
    model = imported("model", line.model, LightningModule)
    if not (isinstance(model, type) and issubclass(model, BaseModule)):
        raise UserError(
            f"--model {line.model} names no data",
            "give --data CLASS; its own loaders go into a LightningDataModule",
            2,
        )


def say_default() -> None:
    """Print which experiment trains, with the comment in its first line."""
    file = default_experiment()
    with file.open(encoding="utf-8") as lines:
        comment = lines.readline().strip().lstrip("# ")
    say(f"No --config given, so this is {relative_to_cwd(file)}: {comment}")
    say("for another one: python scripts/train.py --config configs/NAME.yaml")


def train_parsed(
    spec: RunSpec, model: LightningModule, data: LightningDataModule, log: LogFile
) -> dict[str, Any]:
    """Train and test what `parse` has returned, with all extras. Return the content of
    metrics.json. If the step timer has a finding about the speed, print it as advice.

    log: Begins when the run has a folder.
    """
    loggers = functools.partial(open_loggers, log)
    register_strategies()
    # a caller that handles no signals, such as a test, gets its handlers back
    with SIGNALS.handled(), cpu_threads(spec.config.num_threads):
        metrics, trainer = fit.train(
            spec, model, data, dry_run, loggers, make_callbacks
        )
        text = advice(trainer, busy_shares(trainer))
    if text:
        say(f"Advice: {text}")
    return metrics


def register_strategies() -> None:
    """Let --trainer.strategy be dp, fsdp2 or fsdp2_sharded. A second call has no
    effect."""
    StrategyRegistry.register("dp", DataParallelStrategy, override=True)
    StrategyRegistry.register("fsdp2", FullyShardedStrategy, override=True)
    StrategyRegistry.register("fsdp2_sharded", ShardedCheckpoints, override=True)


def make_callbacks(
    spec: RunSpec,
    model: LightningModule,
    recorder: RunRecorder,
    monitor: Monitor | None,
) -> list[Callback]:
    """Return the callbacks of a training, in the order in which Lightning calls them:
    what happens in a training beside its steps. Lightning calls checkpoints last. One
    that only watches may be deleted here: the weights are the same without it.

    monitor: The metric that compares epochs, or None.

    Raise UserError if the config has a callback that does not go with a run.
    """
    config = spec.config
    check_callbacks(as_list(spec.trainer["callbacks"]))
    folder = root_folder(config)
    if recorder.run:
        folder = recorder.run.checkpoints
    last = best = None
    if config.trainer.enable_checkpointing is not False:
        last = RunCheckpoint(folder, "last", minutes=config.checkpoint_minutes)
        best = best_checkpoint(config, folder, monitor)
    nan = config.stop_on_nan and StopOnNan()
    devices = config.device_monitor and DeviceMonitor()
    first = config.checks and config.try_network and FirstStep(model)
    watching = [x for x in (nan, devices, first) if x]
    callbacks: list[Any] = [
        # before averages of the user's: a validation measures what is saved
        AverageFollows(),
        monitor and ValidatedWeights(),
        # the curves first: the user's callbacks see what they log
        *users_callbacks(spec, model),
        # the state beside the weights, which they restore before the first step
        ResumedOptimizer(),
        WholeEpochs(),
        RandomState(),
        # acts in each step, as only the curves and the bar do otherwise
        BetweenSteps(last, watching),
        # the folder, before those that write into it
        RunFolder(recorder.folder),
        recorder,  # before EpochLines, which shows its history
        EnvironmentFile(),
        # they only watch
        *watching,
        PredictionFigures(config.figures_every_n_epochs),
        config.step_timer and StepTimer(config.step_timer == "table"),
        EpochLines(),
        *progress_bar(spec),
        LoggedSettings(recorder.config, continues=spec.folder is not None),
        # trains a batch when the training starts, after all others have begun
        config.cuda_graphs is True and CudaGraphs(),
        # an epoch is measured: it may be the last one, or the best one
        monitor and config.patience and Patience(monitor, config.patience),
        last and PlateauFirst(),
        best,
        last and config.keep_every_epoch and RunCheckpoint(folder, EPOCH_FILES),
        last,  # after best.ckpt, so that it records the new best value
    ]
    return [x for x in callbacks if isinstance(x, Callback)]


def best_checkpoint(config: Any, folder: Path, monitor: Monitor | None) -> Callback:
    """Return the callback that writes best.ckpt. With a monitor it may be written after
    each validation, also within an epoch. Without one, it is the newest epoch."""
    name, mode = monitor or (None, "min")
    every_n_epochs: int | None = 1
    if monitor:
        every_n_epochs = config.trainer.check_val_every_n_epoch
        if config.trainer.val_check_interval not in (None, 1.0):
            every_n_epochs = None  # after every validation
    return RunCheckpoint(folder, "best", name, mode, every_n_epochs=every_n_epochs)


def check_callbacks(callbacks: list[Callback]) -> None:
    """Raise UserError for callbacks of the config that do not go with a run.

    A ModelCheckpoint may not write over best.ckpt or last.ckpt. A finder of a batch
    size or a learning rate would train with other settings than the run records. An
    average after the last validation would never be in best.ckpt.
    """
    for callback in callbacks:
        if isinstance(callback, BatchSizeFinder | LearningRateFinder):
            raise UserError(
                f"trainer.callbacks: a {type(callback).__name__} changes a setting of "
                "the run; search before the run, with scripts/tune.py",
                status=2,
            )
        if isinstance(callback, StochasticWeightAveraging):
            raise UserError(
                "trainer.callbacks: StochasticWeightAveraging averages weights after "
                "the last validation",
                "use WeightAveraging of Lightning, by steps",
                2,
            )
        if not isinstance(callback, ModelCheckpoint) or callback.dirpath:
            continue
        if callback.save_last or callback.filename in ("best", "last"):
            raise UserError(
                "trainer.callbacks: this ModelCheckpoint would write over best.ckpt or "
                "last.ckpt of the run",
                "give it a dirpath",
                2,
            )


def progress_bar(spec: RunSpec) -> list[Callback]:
    """Return the progress bar of a run in a list, or an empty list.

    --trainer.enable_progress_bar decides. Without this flag there is a bar in a
    terminal and in a notebook. A bar in --trainer.callbacks replaces it.
    """
    is_wanted = spec.config.trainer.enable_progress_bar
    if is_wanted is None:
        is_wanted = sys.stdout.isatty() or hasattr(sys, "ps1")
    configured = as_list(spec.trainer["callbacks"])
    if is_wanted and not any(isinstance(x, ProgressBar) for x in configured):
        return [TrainingProgressBar(refresh_rate=10)]
    return []
