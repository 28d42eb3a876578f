"""Search the flags of train.py. Each trial is a run; lists alone are a grid.

Read `run` first, and then `Sweep.train_trials`: it shows how several processes share
the trials, and how an interrupted trial is continued. The file `study.journal` in the
sweep's folder is Optuna's: it holds the settings of the sweep and the values, states
and results of its trials.

A sweep of the folds of a cross-validation ends with the numbers of each fold and those
of all samples together. The folds share most of their training samples, so their
results are not independent. Their range is printed, and no standard error: it would be
too small (Bengio and Grandvalet, "No unbiased estimator of the variance of k-fold
cross-validation", 2004).
"""

import contextlib
import gc
import itertools
import math
import os
import re
import shlex
import shutil
import traceback
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from filelock import FileLock, Timeout
from lightning import Callback
from numpy.random import SeedSequence

from lightbase.commands.seeds import spread
from lightbase.commands.train import parse, train_parsed
from lightbase.compare.runs import print_table, short_text
from lightbase.compat import quiet_lightning
from lightbase.config.errors import UserError, first_line, say
from lightbase.config.files import (
    DISK_ERRORS,
    LARGEST_TEXT,
    check_readable,
    read_json,
    refuse_links,
    relative_to_cwd,
)
from lightbase.config.names import SAME_TRAINING_KEYS, flatten
from lightbase.config.spec import as_values
from lightbase.data.module import BaseDataModule
from lightbase.model.metrics import Accumulator
from lightbase.model.module import BaseModule
from lightbase.model.monitor import choose_monitor
from lightbase.run.devices import check_one_device
from lightbase.run.fit import make_trainer, run_test
from lightbase.run.folder import check_same_settings, root_folder, script_command
from lightbase.run.results import Row, find_runs, numbers_of
from lightbase.run.signals import SIGNALS, Stopped
from lightbase.setup.load import load_run
from lightbase.watch.dry_run import load_data

try:
    import optuna
except ImportError as error:
    raise UserError(
        f"a sweep needs Optuna: {error}", 'pip install -c constraints.txt -e ".[sweep]"'
    ) from error

from optuna import Study
from optuna.distributions import CategoricalDistribution as Choices
from optuna.distributions import FloatDistribution, IntDistribution
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState

NOT_SEARCHED = [*SAME_TRAINING_KEYS, "monitor", "monitor_mode"]
"""Flags that no trial may change: the place of the runs, and the metric that compares
the trials."""

REPEATS = ["data.fold", "seed_everything"]
"""Flags that repeat a training. Their trials get a mean."""


def run(options: Namespace) -> Study:
    """Train the trials, print the results, and return the study with the trials.

    The same command continues a sweep that was interrupted. After a signal the message
    says so.
    """
    quiet_lightning()
    sweep = begin(options)
    folder = relative_to_cwd(sweep.folder)
    say(f"{sweep.num_trials} trials in {folder}, each with its output.txt")
    try:
        for trial in sweep.train_trials():
            row = as_row(sweep, trial).items()
            say(", ".join(f"{key} {short_text(value)}" for key, value in row))
    except Stopped as stopped:
        stopped.hint = "; the same command continues"
        raise
    show_results(sweep)
    return sweep.study


Flags = list[str]  # of train.py


def train_run(args: Flags) -> None:
    """Train a trial, or continue it.

    args: The arguments of train.py.
    """
    train_parsed(*parse(args))


Values = dict[str, Any]  # by flag


@dataclass
class Sweep:
    """Trials that several processes may train at once.

    A process holds the lock of a trial's folder while it trains the trial. A trial that
    is running and whose lock is free was interrupted; it is continued.

    study: The study in the sweep's folder. Its user attributes have the settings, and
        the reason of each failure by the name of the trial's folder.
    lock: A process holds it while it adds a trial. See `open_study`.
    folder: The sweep's folder, ROOT/NAME.
    flags: The flags of train.py that all trials have.
    searches: Optuna's distributions by flag.
    grid: The values of each trial; empty with a range.
    num_trials: How many trials the sweep has, in all processes.
    monitor: The metric that compares the trials. None in folds without a validation.
    with_test: Whether each trial is tested. Trials that are compared are not, so that
        nothing is chosen by a test.
    seed: The values that Optuna chooses follow from it.
    """

    study: Study
    lock: Any
    folder: Path
    flags: Flags
    searches: Values
    grid: list[Values]
    num_trials: int
    monitor: str | None
    with_test: bool
    seed: int

    def train_trials(self) -> Iterator[FrozenTrial]:
        """Train trials until all have ended. Yield each trial that this process has
        trained.

        The first round leaves out the trials that other processes train. The second
        one waits for them, and continues a trial whose process has died.
        """
        for waits in (False, True):
            for number in range(self.num_trials):
                folder = self.folder / name_of(number)
                folder.mkdir(exist_ok=True)
                lock = FileLock(folder / ".lock", blocking=waits)
                with contextlib.suppress(Timeout), lock:
                    trial = self.begin_trial(number)
                    if not trial.state.is_finished():
                        self.train_trial(trial)
                        yield self.study.trials[number]
                        free_memory()
                # a signal is only kept during a failed training and gc.collect
                if SIGNALS.received:
                    raise Stopped(SIGNALS.received)

    def begin_trial(self, number: int) -> FrozenTrial:
        """Return a trial. It is added to the study if it is new, and the trials before
        it, too: the process that trains one of them may not have come so far."""
        with self.lock:
            for new in range(len(self.study.trials), number + 1):
                # one line of the journal: after a kill the trial is there with all
                # values
                self.study.add_trial(self.choose_trial(new))
        return self.study.trials[number]

    def choose_trial(self, number: int) -> FrozenTrial:
        """Return a running trial with its values. They follow from the seed, the number
        and the results of the finished trials; in a grid, from the number.

        The sampler is made anew for each trial. So with one process, a sweep that was
        interrupted chooses the same values as one that was not.
        """
        seeds = SeedSequence([self.seed, number]).generate_state(1)
        sampler = optuna.samplers.TPESampler(seed=int(seeds[0]))
        study = optuna.create_study(direction=self.study.direction, sampler=sampler)
        study.add_trials(self.study.get_trials(states=[TrialState.COMPLETE]))
        if self.grid:
            study.enqueue_trial(self.grid[number])
        study.ask(self.searches)
        return study.trials[-1]

    def train_trial(self, trial: FrozenTrial) -> None:
        """Train a trial, or continue it, and tell the study how it ended. What the
        training prints goes to output.txt in the trial's folder.

        An error ends the trial, which then counts as failed, and not the sweep. A
        signal and an error of the disk end both, and the trial counts as running.
        """
        name = name_of(trial.number)
        run = self.folder / name / "version_0"
        with (
            run.with_name("output.txt").open("a", buffering=1, encoding="utf-8") as out,
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(out),
        ):
            try:
                if not (run / "metrics.json").is_file():  # not killed after its end
                    train_run(self.arguments(run, trial.params))
                best = 0.0  # Optuna needs a value
                if self.monitor:
                    progress = read_json(run / "progress.json")
                    if "best" not in progress:
                        raise UserError(f"{self.monitor} was never a finite number")
                    best = progress["best"]
                self.study.tell(trial.number, best)
            except Exception as error:
                for cause in (error, error.__cause__):  # no result of a trial
                    if isinstance(cause, OSError) and cause.errno in DISK_ERRORS:
                        raise
                traceback.print_exc()
                self.study.set_user_attr(
                    name, f"{type(error).__name__}: {first_line(error)}"
                )
                self.study.tell(trial.number, state=TrialState.FAIL)

    def arguments(self, run: Path, values: Values) -> Flags:
        """Return the arguments of train.py that train a trial from where it was
        interrupted. What was left before the first checkpoint is removed.

        run: The folder of the trial's run.
        values: The values of the trial by flag.
        """
        place = [
            f"--name={self.folder.name}/{run.parent.name}",
            f"--trainer.default_root_dir={self.folder.parent}",
            f"--test={self.with_test}",
        ]
        if (run / "checkpoints" / "last.ckpt").is_file():
            return [*place, "--ckpt_path=last"]
        shutil.rmtree(run, ignore_errors=True)
        return [*self.flags, *as_flags(values), *place]


def begin(options: Namespace) -> Sweep:
    """Check the searches and the flags, prepare the data, and open the study.

    options: The flags of sweep.py. `others` are flags of train.py.
    Raise UserError if something is wrong, before anything is written. Raise it too if
    an earlier start of this sweep had other settings.
    """
    searches = dict(map(read_search, options.search))
    grid = make_grid(searches)[: options.trials]
    for flag in searches:
        if flag in NOT_SEARCHED or (flag in REPEATS and not grid):
            raise UserError(
                f"--search: {flag} cannot be searched",
                "folds and seeds can, in a grid of lists",
                2,
            )
    num_trials = len(grid) or options.trials
    if num_trials is None:
        raise UserError("--trials N: how many? a range has no end", status=2)
    spec, model, data = parse_ends(searches, options.others)
    monitor = choose_monitor(spec.config, model, data)
    metric, mode = monitor or (None, "min")
    # folds of one setting estimate its test: nothing is chosen
    is_estimate = "data.fold" in searches and searches.keys() <= {*REPEATS}
    with_test = is_estimate and spec.config.test
    if monitor is None and not with_test:
        raise UserError(
            "a search compares trials by a validation, and there is none",
            "give --monitor, or validate, such as by --data.val_fraction 0.1",
            2,
        )
    spec.config.name = options.name or f"{spec.config.name}_sweep"
    folder = root_folder(spec.config) / spec.config.name
    if isinstance(data, BaseDataModule):
        load_data(data, with_test=False)  # once, a download for instance
    settings = flatten(as_values(spec)) | {"search": options.search}
    # the path may be typed in several ways; the test changes no training
    del settings["trainer.default_root_dir"], settings["test"]
    study, lock = open_study(folder, settings, mode)
    return Sweep(
        study,
        lock,
        folder,
        options.others,
        searches,
        grid,
        num_trials,
        metric,
        with_test,
        spec.config.seed_everything,
    )


def parse_ends(searches: Values, flags: Flags) -> Any:
    """Parse two commands: one with the last value of each list and the upper end of
    each range, and one with the first values. Most mistakes are found here, before the
    first training. A mistake in another value of a list ends its trial.

    searches: The distributions by flag.
    flags: The flags of train.py that all trials have.
    Return what `parse` returns for the first values. Raise UserError for a wrong value,
    and if a trial would use several devices.
    """
    for end in (-1, 0):
        values = {flag: ends_of(searches[flag])[end] for flag in searches}
        parsed = parse([*flags, *as_flags(values)])
        check_one_device(parsed[0].config.trainer)
    return parsed


def as_row(sweep: Sweep, trial: FrozenTrial) -> Row:
    """Return the values, the best value of the monitored metric, and the state of a
    trial. A failed one has the reason. After a kill, a trial is still "running"."""
    name = name_of(trial.number)
    state = trial.state.name.lower()
    if trial.state == TrialState.FAIL:
        state = f"failed, {sweep.study.user_attrs.get(name, 'no reason told')}"
    row = {"trial": name} | trial.params
    if sweep.monitor:
        row[sweep.monitor] = trial.value
    return row | {"state": state}


def show_results(sweep: Sweep) -> None:
    """Print the trials, and the means of the folds or the best setting.

    Raise UserError if no trial has finished, or if no setting can be the best.
    """
    print_table([as_row(sweep, trial) for trial in sweep.study.trials])
    if not sweep.study.get_trials(states=[TrialState.COMPLETE]):
        raise UserError(f"no trial finished: see {sweep.folder}/trial_000/output.txt")
    if sweep.with_test:
        print_folds(sweep)
    else:
        show_best(sweep)


def print_folds(sweep: Sweep) -> None:
    """Print mean and range of each metric over the folds, and its value over the test
    samples of all folds together."""
    trials = sweep.study.get_trials(states=[TrialState.COMPLETE])
    runs = find_runs(sweep.folder, [name_of(trial.number) for trial in trials])
    pooled = pooled_metrics(sweep.folder.parent, [run.folder for run in runs])
    print_table(fold_rows(numbers_of(dict(enumerate(runs))), pooled))


def show_best(sweep: Sweep) -> None:
    """Print the means over folds or seeds, the flags of the best setting, and the
    commands that test its runs.

    A setting is the values of the flags that are not in `REPEATS`. Of equal means, the
    one with the smaller deviation is the best, and then the first. A setting with a
    failed trial cannot be the best: the others may have been lucky. Raise UserError if
    each setting has one.
    """
    settings: dict[str, list[FrozenTrial]] = {}
    for trial in sweep.study.trials:
        settings.setdefault(repr(values_of(trial)), []).append(trial)
    repeats = [sweep.searches[flag] for flag in REPEATS if flag in sweep.searches]
    num_repeats = math.prod(len(repeat.choices) for repeat in repeats)
    rows = {key: as_mean(sweep, settings[key], num_repeats) for key in settings}
    if repeats:
        print_table([*rows.values()])
    complete = [key for key in rows if rows[key]["state"] == "complete"]
    if not complete:
        raise UserError("each setting has a failed trial, so none is the best")
    sign = {"MINIMIZE": 1, "MAXIMIZE": -1}[sweep.study.direction.name]
    best = min(complete, key=lambda x: (sign * rows[x][sweep.monitor], rows[x]["±"]))
    values = as_flags(values_of(settings[best][0]))
    say(f"Best flags: {shlex.join([*sweep.flags, *values])}")
    for trial in settings[best]:
        path = f"{sweep.folder.name}/{name_of(trial.number)}"
        command = script_command("evaluate.py", path, sweep.folder.parent)
        say(f"To test it: python {command}")


def values_of(trial: FrozenTrial) -> Values:
    """Return the values of a trial by flag, without the flags of `REPEATS`."""
    return {flag: x for flag, x in trial.params.items() if flag not in REPEATS}


def as_mean(
    sweep: Sweep, trials: list[FrozenTrial], num_repeats: int
) -> dict[Any, Any]:
    """Return the values of a setting, the mean and the standard deviation (divisor n -
    1) of the monitored metric over the `n` trials that have finished, and the 95 %
    confidence interval of the mean. For folds, which share training samples, this
    interval would be too narrow, so it is left out.

    trials: The trials of the setting. With --trials, the last setting may have fewer.
    num_repeats: The number of trials of a whole setting.
    """
    scores: list[Any] = [x.value for x in trials if x.state == TrialState.COMPLETE]
    total = spread(scores or [math.nan], str(sweep.monitor))
    row = values_of(trials[0]) | {"n": len(scores), sweep.monitor: total.mean}
    row["±"] = total.deviation
    if "data.fold" not in sweep.searches:
        row |= {"95 % from": total.low, "to": total.high}
    row["state"] = "complete"
    if len(scores) < num_repeats:
        row["state"] = f"{num_repeats - len(scores)} of {num_repeats} failed"
    return row


RANGE = re.compile(r"(log:)?([-+.\de]+?)\.\.([-+.\de]+)")


def read_search(search: str) -> tuple[str, Any]:
    """Return the flag and Optuna's distribution of FLAG=log:1e-4..1e-1, FLAG=16..512 or
    FLAG=a,b,c. The values of a list stay texts, as they are typed.

    search: The text after --search.
    Raise UserError if the values are neither a range nor a list, and for a range that
    Optuna refuses, such as a range whose first end is larger.
    """
    flag, _, values = search.partition("=")
    match = RANGE.fullmatch(values)
    try:
        if match:
            return flag, read_range(*match.groups())
        # YAML splits at the commas outside of inner brackets and quotes
        text = f"[{values}]"
        items: Any = yaml.compose(text)
        words = [text[x.start_mark.index : x.end_mark.index] for x in items.value]
        return flag, Choices(words)
    except (ValueError, yaml.YAMLError) as error:
        raise UserError(
            f"--search {search}: {first_line(error)}",
            "give FLAG=a,b,c, FLAG=1..9 or FLAG=log:1e-4..1e-1",
            2,
        ) from error


def read_range(log: str | None, low: str, high: str) -> Any:
    """Return the distribution of a range. It is of whole numbers unless one of its ends
    has a point or an exponent. Raise ValueError for a wrong range."""
    try:
        return IntDistribution(int(low), int(high), log=bool(log))
    except ValueError:
        return FloatDistribution(float(low), float(high), log=bool(log))


def ends_of(distribution: Any) -> tuple[Any, Any]:
    """Return the first and the last value of a list, or the ends of a range."""
    if isinstance(distribution, Choices):
        return distribution.choices[0], distribution.choices[-1]
    return distribution.low, distribution.high


def make_grid(searches: Values) -> list[Values]:
    """Return the values of each trial, one for each combination. The last flag changes
    fastest. Return an empty list if a flag has a range.

    searches: Optuna's distributions by flag.
    """
    if not all(isinstance(values, Choices) for values in searches.values()):
        return []
    combinations = itertools.product(*(x.choices for x in searches.values()))
    return [dict(zip(searches, values, strict=True)) for values in combinations]


def as_flags(values: Values) -> Flags:
    """Return the arguments of train.py that set these values, such as
    "--model.lr=0.01"."""
    return [f"--{flag}={value}" for flag, value in values.items()]


def name_of(number: int) -> str:
    """Return the name of a trial's folder, such as trial_007."""
    return f"trial_{number:03d}"


def open_study(folder: Path, settings: Values, mode: str) -> tuple[Study, Any]:
    """Return the study in a sweep's folder, and the lock of its file. The folder and
    the study are made if needed.

    settings: What all starts have in common, for JSON: the config by flag, and
        `search`.
    mode: "min" if a lower value of the monitored metric is better, else "max".
    Raise UserError if the file is damaged, if an earlier start had other settings, and
    for a link in the folder.
    """
    refuse_links([folder, *folder.rglob("*")])
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "study.journal"
    lock: Any = FileLock(folder / ".lock")  # Optuna's would stay for 30 s after kill -9
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        with lock:
            file.touch()
            check_readable(file, LARGEST_TEXT)  # reading a pipe would not end
            # a full disk may have cut the last line: the next would be appended to it
            os.truncate(file, file.read_bytes().rfind(b"\n") + 1)
            study = optuna.create_study(
                storage=JournalStorage(JournalFileBackend(str(file), lock)),
                study_name=folder.name,
                direction=f"{mode}imize",  # type: ignore[arg-type]
                load_if_exists=True,
            )
            before = study.user_attrs.get("settings", settings)
            study.set_user_attr("settings", before)
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{file} cannot be read: {error!r}", "give another --name"
        ) from error
    check_same_settings(folder, before, settings)
    return study, lock


def free_memory() -> None:
    """Free the memory of the GPU. Raise an error if the trial left it unusable: the
    wait for the GPU reports errors of earlier steps."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


class Pool(Callback):
    """Adds the test samples of several checkpoints to one accumulator.

    means: The accumulator. None before the first test.
    """

    means: Accumulator | None = None

    def on_test_start(self, trainer: Any, pl_module: Any) -> None:
        """Let the accumulator of this test add its batches to the common one, too."""
        if isinstance(pl_module, BaseModule):
            test = pl_module.curves_callback.means["test"]
            if self.means is None:
                metrics = test.metrics.clone()
                self.means = Accumulator(metrics, test.prefix, test.classes)
            test.epoch = self.means


def pooled_metrics(root: Path, folders: Sequence[Path]) -> dict[str, float]:
    """Return the test metrics over the samples of all folds, each tested by the best
    checkpoint of its fold: {test/acc: ..., test/num_samples: ...}. Each sample counts
    once, and a metric such as F1 is computed from all predictions. Print a line and
    return nothing if this is not possible.

    root: The folder of all runs.
    folders: The folder of each run, with one model and other folds of one data set.
    """
    pool = Pool()
    for folder in folders:
        path = folder / "checkpoints" / "best.ckpt"
        if not path.is_file():
            say(f"Nothing is pooled: {relative_to_cwd(path)} is missing")
            return {}
        flags = [f"--trainer.default_root_dir={root}", "--trainer.devices=1"]
        spec, model, data = load_run(path, flags)
        trainer = make_trainer(
            spec, model, first=[pool], logger=False, enable_checkpointing=False
        )
        run_test(trainer, model, data, None)
    if pool.means is None:
        say("Nothing is pooled: the module is not a BaseModule, or has no test")
        return {}
    metrics = pool.means.result(lambda x: x)  # one process has all samples
    num = int(metrics["test/num_samples"])
    say(f"pooled: {num:,} samples, each tested by the network of its fold")
    return {name: float(value) for name, value in metrics.items()}


def fold_rows(
    numbers: dict[str, dict[Any, float]], pooled: dict[str, float]
) -> list[dict[str, Any]]:
    """Return a row for each metric: the mean, the lowest and the highest value of the
    folds, and the value of all folds together.

    numbers: {metric: {fold: value}}.
    pooled: The result of `pooled_metrics`.
    """
    rows = []
    for metric in numbers:
        values = [*numbers[metric].values()]
        row = {"metric": metric, "folds": len(values), "mean": np.mean(values)}
        row |= {"lowest": np.min(values), "highest": np.max(values)}
        rows.append(row | {"pooled": pooled.get(metric)})
    return rows
