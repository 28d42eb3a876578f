"""Search the flags of train.py. Each trial is a run; lists alone are a grid.

This file checks the flags and prints the results. The trials and their order are in
lightbase/extras/sweep.py. Read `main` first.
"""

import shlex
from collections import defaultdict
from typing import Any

import numpy as np
from optuna.trial import TrialState

from lightbase.commands import arguments
from lightbase.commands.runs import Row, as_text, find_runs, print_table
from lightbase.commands.script import short_errors
from lightbase.commands.train import parse, train
from lightbase.core.checks import choose_monitor, load_data
from lightbase.core.compat import quiet_lightning
from lightbase.core.data import BaseDataModule
from lightbase.core.devices import check_one_device
from lightbase.core.errors import UserError, say
from lightbase.core.files import relative_to_cwd
from lightbase.core.folder import root_folder
from lightbase.core.names import RUN_LOCATION_KEYS, flatten
from lightbase.core.signals import Stopped
from lightbase.core.spec import as_values
from lightbase.extras.sweep import (
    Choices,
    Flags,
    Sweep,
    Trials,
    as_flags,
    make_grid,
    open_study,
    read_search,
)

NOT_SEARCHED = [*RUN_LOCATION_KEYS, "monitor", "monitor_mode"]
"""Flags that no trial may change: the place of the runs, and the metric that compares
the trials."""
REPEATS = ["data.fold", "seed_everything"]
"""Flags that repeat a training. Their trials get a mean."""


def main(args: arguments.Args = None) -> Trials:
    """Train the trials, print the results, and return the trials by the names of their
    folders.

    The same command continues a sweep that was interrupted. After a signal the message
    says so.

    args: The arguments of the script.
    A user's mistake prints two lines and raises SystemExit. In a notebook it raises
    UserError.
    """
    with short_errors():
        options, flags = arguments.sweep().read(args)
        quiet_lightning()
        searches = dict(map(read_search, options.search))
        num_trials = count_trials(searches, options.trials)
        sweep = begin(options, flags, searches)
        folder = relative_to_cwd(sweep.folder)
        say(f"{num_trials} trials in {folder}, each with its output.txt")
        try:
            for name in sweep.train_trials(num_trials, train_run):
                row = as_row(sweep, name).items()
                say(", ".join(f"{key} {as_text(value, key)}" for key, value in row))
        except Stopped as stopped:
            stopped.hint = "; the same command continues"
            raise
        show_results(sweep)
        return sweep.trials()


def train_run(args: Flags) -> None:
    """Train a trial, or continue it.

    args: The arguments of train.py.
    """
    train(*parse(args))


def count_trials(searches: dict[str, Any], limit: int | None) -> int:
    """Return how many trials a sweep has: the combinations of a grid, at most --trials,
    or --trials if a flag has a range.

    searches: The distributions by flag.
    limit: The value of --trials; None if it is not given.
    Raise UserError if a range has no --trials, if a flag cannot be searched, or if a
    fold or a seed is searched together with a range.
    """
    grid = make_grid(searches)
    refused = NOT_SEARCHED
    if not grid:
        refused = NOT_SEARCHED + REPEATS
    for flag in searches:
        if flag in refused:
            problem = f"--search: {flag} cannot be searched"
            raise UserError(problem, "folds and seeds can, in a grid of lists", 2)
    if grid:
        return len(grid[:limit])
    if limit is None:
        raise UserError("--trials N: how many? a range has no end", status=2)
    return limit


def begin(options: Any, flags: Flags, searches: dict[str, Any]) -> Sweep:
    """Check all values, prepare the data, and open the study.

    options: The flags of sweep.py.
    flags: The flags of train.py.
    searches: The distributions by flag.
    Raise UserError if a value or a flag is wrong, before anything is written. Raise it
    too if an earlier start of this sweep had other settings.
    """
    spec, model, data = check_values(searches, flags)
    monitor = choose_monitor(spec.config, model, data)
    metric, mode = monitor or (None, "min")
    if monitor is None and not make_grid(searches):
        problem = "a search compares trials by a validation, and there is none"
        raise UserError(problem, status=2)
    spec.config.name = options.name or f"{spec.config.name}_sweep"
    folder = root_folder(spec.config) / spec.config.name
    if isinstance(data, BaseDataModule):
        load_data(data, with_test=False)  # once, a download for instance
    settings = flatten(as_values(spec)) | {"search": options.search}
    del settings["trainer.default_root_dir"]  # it may be typed in several ways
    study = open_study(folder, settings, mode)
    return Sweep(study, folder, flags, searches, metric, spec.config.seed_everything)


def check_values(searches: dict[str, Any], flags: Flags) -> Any:
    """Parse commands that have each value of the lists and both ends of the ranges. A
    mistake is found here, before the first training.

    There are as many commands as the longest list has values; the two ends of a range
    count as a list. Shorter lists start again at their beginning, so not every
    combination is parsed.

    searches: The distributions by flag.
    flags: The flags of train.py that all trials have.
    Return what `parse` returns for the first values. Raise UserError for a wrong value,
    and if a trial would use several devices.
    """
    values: dict[str, Any] = {}
    for flag, distribution in searches.items():
        if isinstance(distribution, Choices):
            values[flag] = distribution.choices
        else:
            values[flag] = (distribution.low, distribution.high)
    # in reverse order: the first values come last and are returned
    for i in reversed(range(max(map(len, values.values())))):
        chosen = {flag: choices[i % len(choices)] for flag, choices in values.items()}
        parsed = parse([*flags, *as_flags(chosen)])
        check_one_device(parsed[0].config.trainer)
    return parsed


def as_row(sweep: Sweep, name: str) -> Row:
    """Return the values, the best value of the monitored metric, and the state of a
    trial. A failed one has the reason. After a kill, a trial is still "running".

    name: The name of the trial's folder.
    """
    trial = sweep.trials()[name]
    state = trial.state.name.lower()
    if trial.state == TrialState.FAIL:
        state = f"failed, {sweep.study.user_attrs.get(name, 'no reason told')}"
    row = {"trial": name} | trial.params
    if sweep.monitor:
        row[sweep.monitor] = trial.value
    return row | {"state": state}


def show_results(sweep: Sweep) -> None:
    """Print the trials, and the best flags, or the means over folds or seeds.

    Raise UserError if no trial has finished.
    """
    trials = sweep.trials()
    print_table([as_row(sweep, name) for name in trials])
    if any(trial.state == TrialState.FAIL for trial in trials.values()):
        say("To repeat a failed trial, delete its folder and give the same command")
    if all(trial.state != TrialState.COMPLETE for trial in trials.values()):
        raise UserError(f"no trial finished: see {sweep.folder}/trial_000/output.txt")
    if any(flag in sweep.searches for flag in REPEATS):
        print_means(sweep)
    elif sweep.monitor:
        best = as_flags(sweep.study.best_params)
        print(f"Best flags: {shlex.join([*sweep.flags, *best])}")


def print_means(sweep: Sweep) -> None:
    """Print mean and standard deviation of each metric of the trials that differ in the
    fold or the seed only. A single trial is left out.

    The standard deviation has the divisor n - 1.
    """
    results = {run.results["name"]: run.results for run in find_runs(sweep.folder, [])}
    groups: Any = defaultdict(list)
    for name, trial in sweep.trials().items():
        if trial.state == TrialState.COMPLETE:
            values = {k: v for k, v in trial.params.items() if k not in REPEATS}
            groups[tuple(values.items())].append(results[name])
    rows = []
    for values, group in groups.items():
        for metric in group[0]:
            if metric.startswith(("best ", "test/")) and len(group) > 1:
                numbers = np.array([result.get(metric) for result in group], float)
                row = {"metric": metric, "n": len(group)}
                row |= {"mean": numbers.mean(), "spread": numbers.std(ddof=1)}
                rows.append(dict(values) | row)
    if rows:
        print_table(rows)
