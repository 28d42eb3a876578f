"""The trials of a sweep, in a study of Optuna. Each trial is a run.

The file `study.journal` in the sweep's folder is Optuna's: it holds the settings of the
sweep and the values, states and results of its trials. Optuna's TPE chooses values from
ranges. The command gives the function that trains a run.

Read `Sweep.train_trials` first: it shows how several processes share the trials, and
how an interrupted trial is continued.
"""

import contextlib
import gc
import itertools
import os
import re
import shutil
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from filelock import FileLock, Timeout
from numpy.random import SeedSequence

from lightbase.core.errors import UserError, first_line
from lightbase.core.files import (
    DISK_ERRORS,
    LARGEST_TEXT,
    check_readable,
    read_json,
    refuse_links,
    relative_to_cwd,
)
from lightbase.core.folder import check_same_settings
from lightbase.core.signals import SIGNALS, Stopped

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

Values = dict[str, Any]  # by flag
Flags = list[str]  # of train.py
Train = Callable[[Flags], Any]
"""A function that trains a run by the arguments of train.py."""

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
    fastest. Return an empty list if a flag has a range: then there is no grid.

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
    grid: The values of each trial, if there is no range.
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

    def train_trials(self, train: Train) -> Iterator[FrozenTrial]:
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
                        self.train_trial(trial, train)
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

    def train_trial(self, trial: FrozenTrial, train: Train) -> None:
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
                    train(self.arguments(run, trial.params))
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


def open_study(folder: Path, settings: Values, mode: str) -> tuple[Study, Any]:
    """Return the study in a sweep's folder, and the lock of its file. The folder and
    the study are made if needed.

    settings: What all starts have in common, for JSON: the config by flag, and
        `search`.
    mode: "min" if a lower value of the monitored metric is better, else "max".
    Raise UserError if the file is damaged, if an earlier start had other settings, for
    a link in the folder, and for a folder with trials but without a study, as of
    version 0.3.
    """
    refuse_links([folder, *folder.rglob("*")])
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "study.journal"
    if not file.exists() and any(folder.glob("trial_*")):
        raise UserError(
            f"{relative_to_cwd(folder)} has trials, but no study.journal",
            "give another --name",
            2,
        )
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
