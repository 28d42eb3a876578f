"""The trials of a sweep, in a study of Optuna. Each trial is a run.

The file `study.journal` in the sweep's folder is Optuna's: it holds the settings of the
sweep and the values, states and results of its trials. Optuna's TPE chooses values from
ranges. The command gives the function that trains a run.

Read `Sweep.train_trials` first: it shows how several processes share the trials, and
how an interrupted trial is continued.
"""

import contextlib
import errno
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
    LARGEST_TEXT,
    check_readable,
    read_json,
    refuse_links,
    relative_to_cwd,
)
from lightbase.core.signals import SIGNALS, Stopped

try:
    import optuna
except ImportError as error:
    way_out = 'pip install -c constraints.txt -e ".[sweep]"'
    raise UserError(f"a sweep needs Optuna: {error}", way_out) from error

from optuna.distributions import CategoricalDistribution as Choices
from optuna.distributions import FloatDistribution, IntDistribution
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState, create_trial

Values = dict[str, Any]  # by flag
Flags = list[str]  # of train.py
Trials = dict[str, FrozenTrial]  # by the names of their folders
Train = Callable[[Flags], Any]
"""A function that trains a run by the arguments of train.py."""

DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
"""The disk is full, over its quota or read-only, or a file is over its limit. This is
no result of a trial."""
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
        problem = f"--search {search}: {first_line(error)}"
        way_out = "give FLAG=a,b,c, FLAG=1..9 or FLAG=log:1e-4..1e-1"
        raise UserError(problem, way_out, 2) from error


def read_range(log: str | None, low: str, high: str) -> Any:
    """Return the distribution of a range. It is of whole numbers unless one of its ends
    has a point or an exponent. Raise ValueError for a wrong range."""
    try:
        return IntDistribution(int(low), int(high), log=bool(log))
    except ValueError:
        return FloatDistribution(float(low), float(high), log=bool(log))


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


@dataclass
class Sweep:
    """Trials that several processes may train at once.

    A process holds the lock of a trial's folder while it trains the trial. A trial that
    is running and whose lock is free was interrupted; it is continued.

    study: See `open_study`. Its user attributes have the settings, and the reason of
        each failure by the name of the trial's folder.
    folder: The sweep's folder, ROOT/NAME.
    flags: The flags of train.py that all trials have.
    searches: Optuna's distributions by flag.
    monitor: The metric that compares the trials. None in a grid without a validation.
    seed: The values that Optuna chooses follow from it.
    """

    study: optuna.Study
    folder: Path
    flags: Flags
    searches: Values
    monitor: str | None
    seed: int

    def trials(self) -> Trials:
        """Return the trials by the names of their folders. If a trial was repeated, the
        newest counts."""
        trials = self.study.get_trials(deepcopy=False)
        return {trial.user_attrs["folder"]: trial for trial in trials}

    def train_trials(self, num_trials: int, train: Train) -> Iterator[str]:
        """Train trials until all have ended. Yield the name of each trial that this
        process has trained.

        The first round leaves out the trials that other processes train. The second
        one waits for them, and continues a trial whose process has died.

        num_trials: How many trials the sweep has, in all processes.
        """
        for waits in (False, True):
            for number in range(num_trials):
                name = f"trial_{number:03d}"
                (self.folder / name).mkdir(exist_ok=True)
                lock = FileLock(self.folder / name / ".lock", blocking=waits)
                with contextlib.suppress(Timeout), lock:
                    trial = self.begin_trial(name, number)
                    if not trial.state.is_finished():
                        self.train_trial(name, trial, train)
                        yield name
                        free_memory()
                # a signal is only kept during a failed training and gc.collect
                if SIGNALS.received:
                    raise Stopped(SIGNALS.received)

    def begin_trial(self, name: str, number: int) -> FrozenTrial:
        """Return a trial, which is added to the study if it is new.

        A trial that has ended and whose folder was deleted is added again, with the
        same values. The caller holds the lock of the folder.

        name: The name of the trial's folder, trial_N.
        number: N.
        """
        trial = self.trials().get(name)
        if trial is None:
            values = self.choose_values(number)
        elif trial.state.is_finished() and not any(self.folder.glob(f"{name}/*.txt")):
            values = trial.params
        else:
            return trial
        # one line of the journal: after a kill the trial is there with all values
        self.study.add_trial(
            create_trial(
                state=TrialState.RUNNING,
                params=values,
                distributions=self.searches,
                user_attrs={"folder": name},
            )
        )
        return self.trials()[name]

    def choose_values(self, number: int) -> Values:
        """Return the values of a trial. They follow from the seed, the number and the
        results of the finished trials.

        The sampler is made anew for each trial. So with one process, a sweep that was
        interrupted chooses the same values as one that was not.

        number: The number N of the folder trial_N. In a grid it is the place of the
            values.
        """
        grid = make_grid(self.searches)
        if grid:
            return grid[number]
        seeds = SeedSequence([self.seed, number]).generate_state(1)
        sampler = optuna.samplers.TPESampler(seed=int(seeds[0]))
        study = optuna.create_study(direction=self.study.direction, sampler=sampler)
        study.add_trials(self.study.get_trials(states=[TrialState.COMPLETE]))
        return study.ask(self.searches).params

    def train_trial(self, name: str, trial: FrozenTrial, train: Train) -> None:
        """Train a trial, or continue it, and tell the study how it ended. What the
        training prints goes to output.txt in the trial's folder.

        An error ends the trial, which then counts as failed, and not the sweep. A
        signal and an error of the disk end both, and the trial counts as running.

        name: The name of the trial's folder.
        trial: The trial of the study, which has its number and its values.
        """
        file = self.folder / name / "output.txt"
        run = self.folder / name / "version_0"
        with (
            SIGNALS.handled(),
            file.open("a", buffering=1, encoding="utf-8") as output,
            contextlib.redirect_stdout(output),
            contextlib.redirect_stderr(output),
        ):
            try:
                if not (run / "metrics.json").is_file():  # not killed after its end
                    train(self.arguments(run, trial.params))
                best = 0.0  # Optuna needs a value
                if self.monitor:
                    best = read_json(run / "progress.json")["best"]
                self.study.tell(trial.number, best)
            except Exception as error:
                for cause in (error, error.__cause__):
                    if isinstance(cause, OSError) and cause.errno in DISK_ERRORS:
                        raise
                traceback.print_exc()
                reason = f"{type(error).__name__}: {first_line(error)}"
                self.study.set_user_attr(name, reason)
                self.study.tell(trial.number, state=TrialState.FAIL)

    def arguments(self, run: Path, values: Values) -> Flags:
        """Return the arguments of train.py that train a trial from where it was
        interrupted. What was left before the first checkpoint is removed.

        run: The folder of the trial's run.
        values: The values of the trial by flag.
        """
        name = f"{self.folder.name}/{run.parent.name}"
        place = [f"--name={name}", f"--trainer.default_root_dir={self.folder.parent}"]
        if (run / "checkpoints" / "last.ckpt").is_file():
            return [*place, "--ckpt_path=last"]
        shutil.rmtree(run, ignore_errors=True)
        return [*self.flags, *as_flags(values), *place]


def open_study(folder: Path, settings: Values, mode: str) -> optuna.Study:
    """Return the study in a sweep's folder; both are made if needed.

    settings: What all starts have in common, for JSON: the config by flag, and
        `search`.
    mode: "min" if a lower value of the monitored metric is better, else "max".
    Raise UserError if the file is no journal, if an earlier start had other settings,
    for a link in the folder, and for the folder of a sweep of version 0.3.
    """
    refuse_links([folder, *folder.glob("*"), *folder.glob("trial_*/*")])
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "study.journal"
    if not file.exists() and any(folder.glob("trial_*")):
        problem = f"{relative_to_cwd(folder)} has trials, but no study.journal"
        raise UserError(problem, "give another --name", 2)
    file.touch()
    lock: Any = FileLock(folder / ".lock")  # Optuna's would stay for 30 s after kill -9
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        check_readable(file, LARGEST_TEXT)
        with lock:
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
    except Exception as error:
        problem = f"{file} cannot be read: {error!r}"
        raise UserError(problem, "give another --name") from error
    for key in before | settings:
        if before.get(key) != settings.get(key):
            problem = f"--{key}: {relative_to_cwd(folder)} has {before.get(key)}"
            raise UserError(problem, "give the same, or another --name", 2)
    return study


def free_memory() -> None:
    """Free the memory of the GPU. Raise an error if the trial left it unusable: the
    wait for the GPU reports errors of earlier steps."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
