"""Search the flags of train.py. Each trial is a run; lists alone are a grid.

Read `run` and `Sweep.train_trials` first. Optuna keeps settings, trials and
results, in `study.journal` of the sweep's folder or in a database.

Folds share most of their training samples. So their range is printed, and no standard
error, which would be too small (Bengio and Grandvalet, "No unbiased estimator of the
variance of k-fold cross-validation", 2004).
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
import optuna
import torch
import yaml
from filelock import FileLock, Timeout
from lightning import Callback
from numpy.random import SeedSequence
from optuna import Study
from optuna.distributions import CategoricalDistribution as Choices
from optuna.distributions import FloatDistribution, IntDistribution
from optuna.storages import JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy.exc import SQLAlchemyError

from lightbase.commands.seeds import spread
from lightbase.commands.train import parse, train_flags
from lightbase.compare.runs import print_table, short_text
from lightbase.compat import quiet_lightning
from lightbase.config.errors import UserError, first_line, say
from lightbase.config.files import Values, read_json, relative_to_cwd
from lightbase.config.spec import as_values
from lightbase.config.yaml_files import SAME_TRAINING_KEYS, flatten
from lightbase.data.module import BaseDataModule
from lightbase.model.metrics import Accumulator
from lightbase.model.module import BaseModule
from lightbase.model.monitor import choose_monitor
from lightbase.run.devices import check_one_device
from lightbase.run.fit import make_trainer, run_test, users_callbacks
from lightbase.run.folder import check_same_settings, root_folder, script_command
from lightbase.run.results import Row, find_runs, numbers_of
from lightbase.run.signals import SIGNALS, Stopped
from lightbase.setup.load import load_run
from lightbase.watch.dry_run import load_data

NOT_SEARCHED = [*SAME_TRAINING_KEYS, "monitor", "monitor_mode"]
"""Flags that no trial may change: the place of the runs, and the metric that compares
the trials."""

REPEATS = ["data.fold", "seed_everything"]
"""Flags that repeat a training. Their trials get a mean."""


def run(options: Namespace) -> Study:
    """Train the trials, print the results, and return the study."""
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
    train_flags(args)


@dataclass
class Sweep:
    """Trials that several processes may train at once.

    A process locks the folder of the trial that it trains. A running trial whose lock
    is free was interrupted; it is continued.

    study: Its user attributes have the settings, and the reason of each failure by the
        name of the trial.
    lock: A process holds it while it adds a trial.
    folder: ROOT/NAME.
    flags: The flags of train.py that all trials have.
    searches: Optuna's distributions by flag.
    grid: The values of each trial; empty with a range.
    monitor: The metric that compares the trials. None in folds without a validation.
    with_test: Whether each trial is tested. Trials that are compared are not.
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

    def train_trials(self) -> Iterator[FrozenTrial]:
        """Yield each trial that this process trains, until all have ended. The first
        round leaves out trials that other processes train. The second waits for them,
        and continues a trial whose process has died."""
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
                        gc.collect()
                        torch.cuda.empty_cache()
                # a signal is only kept during a failed training and gc.collect
                if SIGNALS.received:
                    raise Stopped(SIGNALS.received)

    def begin_trial(self, number: int) -> FrozenTrial:
        """Return a trial. New trials up to this number are added to the study."""
        with self.lock:
            for new in range(len(self.study.trials), number + 1):
                # one line of the journal: after a kill the trial is there with all
                # values
                self.study.add_trial(self.choose_trial(new))
        return self.study.trials[number]

    def choose_trial(self, number: int) -> FrozenTrial:
        """Return a running trial. Its values follow from the seed, the number and the
        results of the finished trials, in an interrupted sweep, too."""
        seed = self.study.user_attrs["settings"]["seed_everything"]
        seeds = SeedSequence([seed, number]).generate_state(1)
        sampler = optuna.samplers.TPESampler(seed=int(seeds[0]))
        study = optuna.create_study(direction=self.study.direction, sampler=sampler)
        study.add_trials(self.study.get_trials(states=[TrialState.COMPLETE]))
        if self.grid:
            study.enqueue_trial(self.grid[number])
        study.ask(self.searches)
        return study.trials[-1]

    def train_trial(self, trial: FrozenTrial) -> None:
        """Train a trial, or continue it, and tell the study how it ended. An error ends
        the trial only. A signal or an error of the disk ends the sweep, and the trial
        counts as running."""
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
                if isinstance(error.__cause__ or error, OSError):  # such as a full disk
                    raise
                traceback.print_exc()
                self.study.set_user_attr(
                    name, f"{type(error).__name__}: {first_line(error)}"
                )
                self.study.tell(trial.number, state=TrialState.FAIL)

    def arguments(self, run: Path, values: Values) -> Flags:
        """Return the arguments of train.py that train a trial, or continue it. The
        files of a run without a checkpoint are removed."""
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
    """Check the searches and the flags, prepare the data, and open the study. Nothing
    is written before all is checked."""
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
    # both ends of a range are parsed, and the first and the last value of a list: most
    # mistakes are found here, and another wrong value ends its trial
    for end in (-1, 0):
        values = {flag: values_in(searches[flag])[end] for flag in searches}
        spec, model, data = parse([*options.others, *as_flags(values)])
        check_one_device(spec.config.trainer)
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
    study, lock = open_study(folder, settings, mode, options.storage)
    flags = options.others
    return Sweep(
        study, lock, folder, flags, searches, grid, num_trials, metric, with_test
    )


def as_row(sweep: Sweep, trial: FrozenTrial) -> Row:
    """Return the values of a trial, its best value, and its state, for a failed one
    with the reason."""
    name = name_of(trial.number)
    row = {"trial": name} | trial.params
    if sweep.monitor:
        row[sweep.monitor] = trial.value
    row["state"] = trial.state.name.lower()
    if trial.state == TrialState.FAIL:
        row["state"] = f"failed, {sweep.study.user_attrs.get(name, 'no reason told')}"
    return row


def show_results(sweep: Sweep) -> None:
    """Print the trials, and the means of the folds or the best setting."""
    print_table([as_row(sweep, trial) for trial in sweep.study.trials])
    complete = sweep.study.get_trials(states=[TrialState.COMPLETE])
    if not complete:
        raise UserError(f"no trial finished: see {sweep.folder}/trial_000/output.txt")
    if sweep.with_test:
        print_folds(sweep, complete)
    else:
        show_best(sweep)


def print_folds(sweep: Sweep, trials: list[FrozenTrial]) -> None:
    """Print for each metric the mean, the lowest and the highest value of the folds,
    and the value of all folds together."""
    runs = find_runs(sweep.folder, [name_of(trial.number) for trial in trials])
    pooled = pooled_metrics(sweep.folder.parent, [run.folder for run in runs])
    rows: list[Row] = []
    for metric, by_fold in numbers_of(dict(enumerate(runs))).items():
        values = [*by_fold.values()]
        row = {"metric": metric, "folds": len(values), "mean": np.mean(values)}
        row |= {"lowest": min(values), "highest": max(values)}
        rows.append(row | {"pooled": pooled.get(metric)})
    print_table(rows)


def show_best(sweep: Sweep) -> None:
    """Print the means over folds or seeds, the flags of the best setting, and the
    commands that test its runs. Of equal means, the one with the smaller deviation is
    the best. A setting with a failed trial cannot be: the others may have been lucky.
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
    return {flag: x for flag, x in trial.params.items() if flag not in REPEATS}


def as_mean(
    sweep: Sweep, trials: list[FrozenTrial], num_repeats: int
) -> dict[Any, Any]:
    """Return the values of a setting, the mean and the standard deviation (divisor n -
    1) of the monitored metric over its finished trials, and unless they are folds the
    95 % confidence interval of the mean.

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
    FLAG=a,b,c. The values of a list stay texts."""
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
    """Return the distribution of a range, of integers if both ends are integers."""
    try:
        return IntDistribution(int(low), int(high), log=bool(log))
    except ValueError:
        return FloatDistribution(float(low), float(high), log=bool(log))


def values_in(distribution: Any) -> Sequence[Any]:
    """Return the values of a list, or the two ends of a range."""
    if isinstance(distribution, Choices):
        return distribution.choices
    return distribution.low, distribution.high


def make_grid(searches: Values) -> list[Values]:
    """Return the values of each trial, one for each combination; the last flag changes
    fastest. With a range the list is empty."""
    if not all(isinstance(values, Choices) for values in searches.values()):
        return []
    combinations = itertools.product(*(x.choices for x in searches.values()))
    return [dict(zip(searches, values, strict=True)) for values in combinations]


def as_flags(values: Values) -> Flags:
    return [f"--{flag}={value}" for flag, value in values.items()]


def name_of(number: int) -> str:
    return f"trial_{number:03d}"


def open_study(
    folder: Path, settings: Values, mode: str, url: str | None
) -> tuple[Study, Any]:
    """Return the study of a sweep, and the lock that a process holds while it changes
    the study. The sweep's folder is made if needed.

    settings: The config by flag, and `search`. Those of an earlier start must be equal.
    url: The database of the study, or None for the file in the sweep's folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock: Any = FileLock(folder / ".lock")  # Optuna's would stay for 30 s after kill -9
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with lock:
        study = optuna.create_study(
            storage=open_storage(url) if url else open_journal(folder, lock),
            study_name=folder.name,
            direction=f"{mode}imize",  # type: ignore[arg-type]
            load_if_exists=True,
        )
        before = study.user_attrs.get("settings", settings)
        study.set_user_attr("settings", before)
    check_same_settings(folder, before, settings)
    return study, lock


def open_journal(folder: Path, lock: Any) -> JournalStorage:
    """Return the storage in the file of a sweep."""
    file = folder / "study.journal"
    file.touch()
    # a full disk may have cut the last line: the next would be appended to it
    os.truncate(file, file.read_bytes().rfind(b"\n") + 1)
    return JournalStorage(JournalFileBackend(str(file), lock))


def open_storage(url: str) -> RDBStorage:
    """Return the storage in a database, whose tables are made if needed."""
    try:
        return RDBStorage(url)
    except (ImportError, ValueError, SQLAlchemyError) as error:
        raise UserError(
            f"--storage: {first_line(error)}",
            "give a URL of SQLAlchemy and install its driver: docs/sweep.md",
            2,
        ) from error


class Pool(Callback):
    """Adds the test samples of several checkpoints to one accumulator."""

    means: Accumulator | None = None

    def on_test_start(self, trainer: Any, pl_module: Any) -> None:
        if isinstance(pl_module, BaseModule):
            test = pl_module.curves_callback.means["test"]
            if self.means is None:
                metrics = test.metrics.clone()
                self.means = Accumulator(metrics, test.prefix, test.classes)
            test.epoch = self.means


def pooled_metrics(root: Path, folders: Sequence[Path]) -> dict[str, float]:
    """Return the test metrics over the samples of all folds, each tested by the best
    checkpoint of its fold. A metric such as F1 is computed from all predictions.

    root, folders: The folder of all runs, and that of each run.
    """
    pool = Pool()
    for folder in folders:
        flags = [f"--trainer.default_root_dir={root}", "--trainer.devices=1"]
        spec, model, data = load_run(folder / "checkpoints" / "best.ckpt", flags)
        callbacks = [pool, *users_callbacks(spec, model)]
        trainer = make_trainer(
            spec, callbacks, logger=False, enable_checkpointing=False
        )
        run_test(trainer, model, data, None)
    if pool.means is None:  # not a BaseModule
        return {}
    metrics = pool.means.result(lambda x: x)  # one process has all samples
    num = int(metrics["test/num_samples"])
    say(f"pooled: {num:,} samples, each tested by the network of its fold")
    return {name: float(value) for name, value in metrics.items()}
