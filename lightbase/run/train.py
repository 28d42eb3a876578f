"""A training run from its command line to its test result."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning import Callback, Trainer
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.utilities.exceptions import MisconfigurationException, SIGTERMException

from lightbase.cli.command_line import CommandLine
from lightbase.cli.config import write_config
from lightbase.cli.script import short_errors
from lightbase.cli.training_cli import TrainingCLI
from lightbase.compat import quiet_lightning
from lightbase.curves import is_of_class
from lightbase.devices.devices import cpu_threads, describe_devices
from lightbase.devices.processes import end_with_parent, is_child, leave, short_process_errors
from lightbase.devices.signals import SIGNALS, Stopped
from lightbase.errors import UserError, first_line
from lightbase.folder import PROJECT, Run, json_text, root_folder, short
from lightbase.module import BaseModule
from lightbase.ranks import rank, say
from lightbase.resume.checkpoints import AtomicCheckpointIO, RunCheckpoint
from lightbase.resume.load import check_resume
from lightbase.resume.restart import Restart, check_changes, find_restart
from lightbase.run.callbacks import make_callbacks
from lightbase.run.checks import has_test, prepare
from lightbase.run.loggers import (
    RunRows,
    RunTensorBoard,
    check_packages,
    curves,
    ended,
    make_loggers,
)
from lightbase.run.record import RunRecorder
from lightbase.run.selection import choose_selection
from lightbase.watch.advice import advice, facts


def main(args: Sequence[str] | None = None) -> dict[str, Any]:
    """Train as `args`, or the command line, say; test the best checkpoint. Returns what
    metrics.json holds.

    A user's mistake prints two lines and raises SystemExit with status 2 (usage) or 1 (run).
    """
    with short_errors():
        end_with_parent()
        quiet_lightning()
        line = CommandLine(sys.argv[1:] if args is None else args)
        cli = build(line)
        if not line.names_experiment and not (cli.restart and cli.restart.config):
            say(describe_default())
        with cpu_threads(cli.config.num_threads):
            return train(cli)


def describe_default() -> str:
    """The first comment line of the default config, and where the others are."""
    first = PROJECT.default_config.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")
    others = "for another one: python scripts/train.py --config configs/NAME.yaml"
    return f"No --config given, so this is {short(PROJECT.default_config)}: {first}\n{others}"


def parse(args: Sequence[str], first_flags: Sequence[str] | None = None) -> TrainingCLI:
    """Model and data of a command line; of the default experiment where it names none; of the run
    that it resumes.

    first_flags: What the user typed for a run of a sweep; `args` of a trial that goes on has fewer.
    """
    return build(CommandLine(args), None if first_flags is None else CommandLine(first_flags))


def build(line: CommandLine, first_line: CommandLine | None = None) -> TrainingCLI:
    """As `parse`, for command lines that have been read."""
    line.say_replaced_callbacks()
    restart = find_restart(line, first_line)
    if restart is None or restart.start_config is None:
        cli = TrainingCLI(line.parser_args)
    else:
        cli = TrainingCLI(line.flag_args, saved=restart.start_config, trust=restart.trust)
        with cli.import_rules():
            config = write_config(cli.parser, cli.config)[0]
        check_changes(restart, cli.model, config, line)
    cli.restart = restart
    return cli


def train(cli: TrainingCLI) -> dict[str, Any]:
    config = cli.config
    root = root_folder(config)
    cli.check_devices()
    check_packages(config.trainer.logger)
    restart = cli.restart or Restart("", None)
    path, checkpoint = restart.path, restart.checkpoint
    restart.checkpoint = None  # its memory is to be free when Lightning has restored it
    if checkpoint is not None and path is not None:
        if restart.trust:
            restart.trust.check_run(checkpoint, restart.folder)
        check_resume(checkpoint, cli.model, config, path)
        if isinstance(cli.model, BaseModule):
            cli.model.is_initialized = True  # when it began
    if rank() == 0:
        prepare(cli.model, cli.datamodule, config)
    selection = choose_selection(config, cli.model, cli.datamodule)
    run = None
    if rank() == 0 and not config.trainer.fast_dev_run:  # the others write nothing
        run = Run(root, config.name, restart.folder)
    try:
        callbacks = make_callbacks(cli, root, run, selection)
        loggers = make_loggers(cli, root, run, checkpoint)
        with ended(loggers), short_process_errors():
            plugins = [AtomicCheckpointIO(path, checkpoint)]
            del checkpoint  # the plugin drops it when Lightning has taken it
            trainer = cli.make_trainer(logger=loggers, callbacks=callbacks, plugins=plugins)
            return fit_and_test(trainer, cli, path, run)
    except (UserError, OSError, Stopped) as error:
        is_saved = run and list(run.checkpoints.glob("*.ckpt"))
        if isinstance(error, Stopped) and (
            is_saved or config.trainer.enable_checkpointing is False
        ):
            error.hint = (
                "; go on with --ckpt_path last" if is_saved else "; no checkpoint was asked for"
            )
        elif run and run.is_new and not is_saved:
            run.discard()
        raise
    finally:
        if run:
            run.close()


def fit_and_test(
    trainer: Trainer, cli: TrainingCLI, path: Path | None, run: Run | None
) -> dict[str, Any]:
    model, data = cli.model, cli.datamodule
    say(describe_devices(trainer))
    for place in curves(trainer.loggers) if run else []:
        say(f"Curves: {place}")
    recorder = next(callback for callback in trainer.callbacks if isinstance(callback, RunRecorder))  # type: ignore[attr-defined]
    try:
        trainer.fit(model, data, ckpt_path=path, weights_only=True)
        for logger in trainer.loggers:
            if isinstance(logger, RunTensorBoard | RunRows):
                logger.keep_points()  # with ddp_fork the processes of the test open the files anew
        tested = best_checkpoint(trainer)
        # its weights are the model's now, and best.ckpt's: it would put those before averaging in
        # their place
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        kept = [callback for callback in callbacks if not isinstance(callback, WeightAveraging)]
        trainer.callbacks = kept  # type: ignore[attr-defined]
        results = []
        if has_test(model, data):
            results = trainer.test(model, data, ckpt_path=tested, verbose=False, weights_only=True)
    except (MisconfigurationException, ValueError, RuntimeError) as error:
        if "Tried to step" in str(
            error
        ):  # torch's OneCycleLR; a resume cannot stretch one that a user's module builds
            way_out = (
                "train for fewer epochs, or start anew from the weights: "
                "--model.weights without --ckpt_path"
            )
            raise UserError(
                f"the schedule ends before the training: {first_line(error)}\n{way_out}", 2
            ) from error
        of_lightning = (
            "`val_check_interval`",
            "Early stopping conditioned on metric",
        )  # mistakes in flags
        if not isinstance(error, MisconfigurationException) and not any(
            text in str(error) for text in of_lightning
        ):
            raise
        raise UserError(first_line(error), 2 if isinstance(error, ValueError) else 1) from error
    except SIGTERMException as error:  # Lightning would exit with status 0 (its issue 21623)
        SIGNALS.waits = False  # all is saved
        leave(trainer)
        if is_child(
            trainer
        ):  # Lightning kills the whole run if a process that it has started fails
            sys.exit(0)
        raise Stopped(SIGNALS.asked) from error
    found = as_metrics(results)
    epochs, steps, seconds = recorder.result.tolist()
    epochs = int(epochs) if epochs.is_integer() else round(epochs, 2)
    values = found | {"epochs": epochs, "steps": int(steps), "train_seconds": round(seconds, 3)}
    if run:
        run.write("metrics.json", json_text(values, indent=2) + "\n")
    leave(trainer)
    what = f"the best checkpoint {short(tested)}" if tested else "the last weights"
    texts = {
        key: str(value) if isinstance(value, int) else f"{value:.4f}"
        for key, value in found.items()
    }
    numbers = ", ".join(f"{key} {text}" for key, text in texts.items() if not is_of_class(key))
    say(f"Trained {epochs} epochs, {values['steps']} steps in {values['train_seconds']:.1f} s")
    if run and not tested and trainer.checkpoint_callbacks:
        say("No validation was made, so there is no best.ckpt")
    say(
        f"Test of {what}: {numbers}"
        if found
        else "No test: the model or the data has none, or no batch of it"
    )
    for key in sorted(filter(is_of_class, texts), key=lambda key: found[key]):  # the worst first
        say(f"  {key:<40}{texts[key]}")
    say(
        f"Run folder: {short(run.folder)}"
        if run
        else "fast_dev_run: one batch of each, nothing written"
    )
    for sentence in advice(seen) if (seen := facts(trainer)) else []:
        say(f"Advice: {sentence}")
    return values


def as_metrics(results: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """What Lightning's test returns; the number of samples is an int."""
    return {
        key: int(value) if key == "test/num_samples" else value
        for row in results
        for key, value in row.items()
    }


def best_checkpoint(trainer: Trainer) -> Path | None:
    """best.ckpt of the first process, if it has written one."""
    own = [
        callback for callback in trainer.checkpoint_callbacks if isinstance(callback, RunCheckpoint)
    ]
    path = Path(str(own[0].dirpath), "best.ckpt") if own else None
    is_there: bool = trainer.strategy.broadcast(path is not None and path.is_file())
    if not is_there and own and own[0].best_model_path:
        raise UserError(
            f"{path} has been deleted since it was written: there is no best epoch to test"
        )
    if is_there and path and not path.is_file():
        raise UserError(
            f"{path} is not to be seen from here: the machines of a run must share its folder"
        )
    return path if is_there else None
