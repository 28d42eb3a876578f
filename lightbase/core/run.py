"""A training run from its command line to its test result."""

import random
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.exceptions import (
    MisconfigurationException,
    SIGTERMException,
)
from lightning.pytorch.utilities.seed import isolate_rng

from lightbase.commands.arguments import read_command
from lightbase.commands.script import find_project, is_interactive, short_errors
from lightbase.core.callbacks import end_with_parent, leave, make_callbacks
from lightbase.core.checkpoint import AtomicCheckpointIO, ValidatedWeights
from lightbase.core.checks import choose_selection, has_test, prepare
from lightbase.core.command_line import CommandLine, default_experiment
from lightbase.core.compat import quiet_lightning
from lightbase.core.curves import is_of_class
from lightbase.core.devices import (
    check_devices,
    cpu_threads,
    describe_devices,
    num_processes_started,
    short_device_errors,
)
from lightbase.core.errors import UserError, first_line, rank, say
from lightbase.core.folder import PROJECT, Run, json_text, root_folder, short, versions
from lightbase.core.form import state_errors
from lightbase.core.record import RunRecorder, best_callback, ended, make_loggers
from lightbase.core.resume import find_restart, go_on
from lightbase.core.signals import SIGNALS, Stopped
from lightbase.core.training_cli import TrainingCLI
from lightbase.extras.step_timer import advice


def main(args: Sequence[str] | None = None) -> dict[str, Any]:
    """Train by the flags in `args`, or by those of the command line, and test the best
    checkpoint. Return what metrics.json holds.

    A user's mistake prints two lines and raises SystemExit with status 2 (usage) or 1
    (run). In a notebook it raises UserError.
    """
    find_project()
    if args is None:
        args = (
            [] if is_interactive() else sys.argv[1:]
        )  # a notebook's are those of its kernel
    with short_errors():
        end_with_parent()
        quiet_lightning()
        with short_device_errors():
            cli = parse(args)
        if not cli.restart and not CommandLine(args).names_experiment:
            file = default_experiment()
            comment, _, _ = file.read_text(encoding="utf-8").partition("\n")
            name = short(file)
            say(f"No --config given, so this is {name}: {comment.lstrip('# ')}")
            say("for another one: python scripts/train.py --config configs/NAME.yaml")
        with cpu_threads(cli.config.num_threads):
            return train(cli)


def parse(args: Sequence[str]) -> TrainingCLI:
    """Build the model and the data of a command line; of a resumed run from its saved
    config."""
    line = read_command(args)
    restart = find_restart(line)
    if restart is None:
        return TrainingCLI(line.parser_args)
    cli = TrainingCLI(line.flag_args, saved=restart.start_config)
    go_on(restart, cli, line)
    return cli


def train(cli: TrainingCLI) -> dict[str, Any]:
    """Train and test what `parse` has built. Return what metrics.json holds."""
    config, restart = cli.config, cli.restart
    root = root_folder(config)
    check_devices(config.trainer)
    if rank() == 0:
        prepare(cli.model, cli.datamodule, config)
    selection = choose_selection(config, cli.model, cli.datamodule)
    run = None
    if rank() == 0 and not config.trainer.fast_dev_run:  # other processes write nothing
        run = Run(root, config.name, restart.folder if restart else None)
    try:
        callbacks = make_callbacks(cli, root, run, selection)
        loggers = make_loggers(cli, root, run)
        with ended(loggers), short_device_errors():
            validated = ValidatedWeights()
            plugins = [AtomicCheckpointIO(validated if selection else None)]
            options: Any = {
                "logger": loggers,
                "callbacks": callbacks,
                "plugins": plugins,
            }
            trainer = cli.make_trainer(first=[validated], **options)
            path = restart.path if restart else None
            return fit_and_test(trainer, cli.model, cli.datamodule, path, run)
    except (UserError, OSError, Stopped) as error:
        if run:
            end_early(run, error, config)
        raise
    finally:
        if run:
            run.close()


def end_early(run: Run, error: Exception | Stopped, config: Any) -> None:
    """Say how a stopped run goes on, or remove the folder of a new run without a
    checkpoint."""
    has_checkpoints = config.trainer.enable_checkpointing is not False
    if any(run.checkpoints.glob("*.ckpt")):
        if isinstance(error, Stopped):
            error.hint = f"; to continue:\n{resume_command(run, config.name)}"
    elif run.is_new and (has_checkpoints or not isinstance(error, Stopped)):
        run.discard()


def resume_command(run: Run, name: str) -> str:
    """The command that continues this run, in the folder where it was started. Its
    settings are in the checkpoint."""
    start = "python" if num_processes_started() == (0, 0) else "torchrun (or srun) ..."
    flags = ["--name", name, "--ckpt_path", "last"]
    if run.root != PROJECT.logs:
        flags += ["--trainer.default_root_dir", short(run.root)]
    if (
        run.folder != [*versions(run.folder.parent).values()][-1]
    ):  # `last` is a newer run
        flags = ["--ckpt_path", short(run.checkpoints / "last.ckpt")]
    return (
        f"{start} {shlex.join([short(PROJECT.root / 'scripts' / 'train.py'), *flags])}"
    )


def fit_and_test(
    trainer: Any,
    model: LightningModule,
    data: LightningDataModule,
    path: Path | None,
    run: Run | None,
) -> dict[str, Any]:
    """Train, from the checkpoint `path` if there is one, test the best checkpoint, and
    write and print the results."""
    say(describe_devices(trainer))
    for logger in trainer.loggers if run else []:
        if isinstance(logger, TensorBoardLogger):
            say(
                f"Curves: tensorboard --logdir {shlex.quote(short(Path(logger.save_dir)))}"
            )
    recorder = next(cb for cb in trainer.callbacks if isinstance(cb, RunRecorder))
    with short_endings(trainer, recorder), state_errors(path):
        trainer.fit(model, data, ckpt_path=path, weights_only=True)
        tested = best_checkpoint(trainer)
        test_metrics, reason = run_test(trainer, model, data, tested)
    values = test_metrics | recorder.metrics()
    SIGNALS.waits = True  # the run is complete: a signal no longer ends it
    if run:
        run.write("metrics.json", json_text(values, indent=2) + "\n")
    leave(trainer)
    say_results(values, tested, run, reason)
    if text := advice(trainer):
        say(f"Advice: {text}")
    return values


@contextmanager
def short_endings(trainer: Trainer, recorder: RunRecorder) -> Iterator[None]:
    """Turn Lightning's errors about flags into a UserError. When it has stopped at a
    signal and the
    state is saved, end this process: Lightning would exit with status 0 (its issue
        21623)."""
    try:
        yield
    except (MisconfigurationException, ValueError, RuntimeError) as error:
        texts = ("`val_check_interval`", "Early stopping conditioned on metric")
        is_of_flag = any(text in str(error) for text in texts)
        if not isinstance(error, MisconfigurationException) and not is_of_flag:
            raise
        raise UserError(first_line(error), status=2) from error
    except SIGTERMException as error:
        SIGNALS.waits = False
        recorder.write_progress(trainer)
        leave(trainer)
        if trainer.local_rank > 0 and num_processes_started() == (0, 0):
            sys.exit(
                0
            )  # Lightning has started this process, and kills the run if one fails
        raise Stopped(SIGNALS.received) from error


def run_test(
    trainer: Any, model: LightningModule, data: LightningDataModule, path: Path | None
) -> tuple[dict[str, Any], str]:
    """Test the checkpoint `path`, or the last weights. Return the metrics, or why there
    are none.

    The random numbers of a test are always the same, whatever drew some before.
    """
    if not has_test(model, data):
        return {}, "No test: the model or the data has none"
    # best.ckpt holds the averaged weights; WeightAveraging would replace them by the
    # others
    trainer.callbacks = [
        x for x in trainer.callbacks if not isinstance(x, WeightAveraging)
    ]
    with isolate_rng(include_cuda=torch.cuda.is_initialized()):
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        results = trainer.test(
            model, data, ckpt_path=path, verbose=False, weights_only=True
        )
    if not results:
        return (
            {},
            "No test: the data has no batch for it, or trainer.limit_test_batches is 0",
        )
    metrics: dict[str, Any] = {
        key: value for result in results for key, value in result.items()
    }
    for (
        key,
        value,
    ) in metrics.items():  # in the digits of float32: 0.979, not 0.9789999723434448
        metrics[key] = (
            int(value) if key == "test/num_samples" else float(str(np.float32(value)))
        )
    step = f"test_step of {type(model).__name__}"
    return (
        metrics,
        "" if metrics else f"No test: {step} logs nothing with self.track or self.log",
    )


def best_checkpoint(trainer: Trainer) -> Path | None:
    """Return best.ckpt; None if the first process has not written one."""
    best = best_callback(trainer)
    path = Path(str(best.dirpath), "best.ckpt") if best else None
    # one that was written and has been deleted is an error of the test
    is_written = bool(best and best.best_model_path) or (
        path is not None and path.is_file()
    )
    return path if trainer.strategy.broadcast(is_written) else None


def say_results(
    values: Mapping[str, Any], tested: Path | None, run: Run | None, why: str
) -> None:
    """Print the length of the training, the test metrics, those of each class, and the
    folder.

    why: why there are no test metrics.
    """
    length = f"{values['epochs']} epochs, {values['steps']:,} steps"
    say(f"Trained {length} in {values['train_seconds']:.1f} s")
    texts = {
        key: str(value) if isinstance(value, int) else f"{value:.4f}"
        for key, value in values.items()
        if key not in ("epochs", "steps", "train_seconds")
    }
    if texts:
        what = f"the best checkpoint {short(tested)}" if tested else "the last weights"
        shown = ", ".join(
            f"{key} {texts[key]}" for key in texts if not is_of_class(key)
        )
        say(f"Test of {what}: {shown}")
    else:
        say(why)
    for key in sorted(filter(is_of_class, texts), key=lambda key: float(values[key])):
        say(f"  {key:<40}{texts[key]}")  # the worst class first
    say(f"Run folder: {short(run.folder)}" if run else "fast_dev_run: nothing written")
