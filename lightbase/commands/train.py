"""Train a network: from the command line to the test result.

`main` parses the flags and builds the model and the data (`parse`), then trains and
tests them (`train`). sweep.py, tune.py and lightbase/commands/python.py call the parts.
"""

import sys
from collections.abc import Sequence
from typing import Any

from lightning import LightningDataModule, LightningModule

from lightbase.commands.arguments import first_look
from lightbase.commands.extras import advice_after, make_extras, register_strategies
from lightbase.commands.script import find_project, is_interactive, short_errors
from lightbase.commands.seeds import repeat_with_seeds
from lightbase.compat import quiet_lightning
from lightbase.config.errors import UserError, imported, say
from lightbase.config.files import relative_to_cwd
from lightbase.config.spec import CommandLine, RunSpec, default_experiment, new_spec
from lightbase.model.module import BaseModule
from lightbase.run import fit
from lightbase.run.devices import cpu_threads, short_device_errors
from lightbase.run.signals import SIGNALS
from lightbase.setup.build import build
from lightbase.setup.load import Loaded
from lightbase.setup.resume import check_restart, find_restart, resumed_spec
from lightbase.watch.dry_run import dry_run
from lightbase.watch.loggers import open_loggers

REPEATS = [repeat_with_seeds]
"""Functions that train several times if the arguments ask for it. Otherwise they return
None."""


def main(args: Sequence[str] | None = None) -> dict[str, Any]:
    """Train by the flags in `args`, or by the flags of the command line, and test the
    best checkpoint. Return the content of metrics.json.

    A user's mistake prints two lines and raises SystemExit with status 2 (usage) or 1
    (run). In a notebook it raises UserError.
    """
    find_project()
    if args is None:
        args = sys.argv[1:]
        if is_interactive():
            args = []  # sys.argv has the flags of the notebook's kernel
    first_look("train", args)
    with short_errors():
        quiet_lightning()
        for train_repeatedly in REPEATS:
            results = train_repeatedly(args, parse, train)
            if results is not None:
                return results
        with short_device_errors():
            spec, model, data = parse(args)
        return train(spec, model, data)


def parse(args: Sequence[str]) -> Loaded:
    """Return the record, the model and the data of a command line.

    With --ckpt_path they are the model and the data of a saved run: its config counts,
    and the flags may change some settings. Without an experiment in the flags, the
    default experiment is used, and two lines say so.

    args: The flags of train.py.
    Raise UserError for a mistake in the flags, the config files or the checkpoint.
    """
    line = CommandLine(args)
    restart = find_restart(line)
    if restart is None:
        check_model_alone(line)
        spec = new_spec(line)
        model, data = build(spec)
        if not line.names_experiment:
            say_default()
    else:
        spec = resumed_spec(restart, line)
        model, data = build(spec)
        check_restart(restart, spec, model, data)
    return spec, model, data


def check_model_alone(line: CommandLine) -> None:
    """Raise UserError for a plain LightningModule without a data module. The default
    experiment has settings of a BaseModule, and its data is for such a model."""
    if line.names_experiment or line.model is None:
        return
    if not issubclass(imported("model", line.model), BaseModule):
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


def train(
    spec: RunSpec, model: LightningModule, data: LightningDataModule
) -> dict[str, Any]:
    """Train and test what `parse` has returned, with all extras. Return the content of
    metrics.json. If the step timer has a finding about the speed, print it as
    advice."""
    register_strategies()
    # a caller that handles no signals, such as a test, gets its handlers back
    with SIGNALS.handled(), cpu_threads(spec.config.num_threads):
        metrics, trainer = fit.train(
            spec, model, data, dry_run, open_loggers, make_extras(spec)
        )
        text = advice_after(trainer)
    if text:
        say(f"Advice: {text}")
    return metrics
