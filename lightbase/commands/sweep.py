"""Search the flags of train.py. Each trial is a run; lists alone are a grid.

This file checks the flags and prints the results. The trials and their order are in
lightbase/extras/sweep.py. Read `main` first.
"""

import math
import shlex
from typing import Any

from lightbase.commands import arguments
from lightbase.commands.runs import (
    Row,
    find_runs,
    numbers_of,
    print_table,
    short_text,
)
from lightbase.commands.script import short_errors
from lightbase.commands.train import parse, train
from lightbase.core.compat import quiet_lightning
from lightbase.core.data import BaseDataModule
from lightbase.core.devices import check_one_device
from lightbase.core.errors import UserError, say
from lightbase.core.files import relative_to_cwd
from lightbase.core.folder import root_folder, script_command
from lightbase.core.monitor import choose_monitor
from lightbase.core.names import SAME_TRAINING_KEYS, flatten
from lightbase.core.signals import Stopped
from lightbase.core.spec import as_values
from lightbase.extras.dry_run import load_data
from lightbase.extras.folds import fold_rows, pooled_metrics
from lightbase.extras.spread import spread
from lightbase.extras.sweep import (
    Flags,
    FrozenTrial,
    Study,
    Sweep,
    TrialState,
    Values,
    as_flags,
    ends_of,
    make_grid,
    name_of,
    open_study,
    read_search,
)

NOT_SEARCHED = [*SAME_TRAINING_KEYS, "monitor", "monitor_mode"]
"""Flags that no trial may change: the place of the runs, and the metric that compares
the trials."""
REPEATS = ["data.fold", "seed_everything"]
"""Flags that repeat a training. Their trials get a mean."""


def main(args: arguments.Args = None) -> Study:
    """Train the trials, print the results, and return the study with the trials.

    The same command continues a sweep that was interrupted. After a signal the message
    says so.

    args: The arguments of the script.
    A user's mistake prints two lines and raises SystemExit. In a notebook it raises
    UserError.
    """
    with short_errors():
        options, flags = arguments.sweep().read(args)
        quiet_lightning()
        sweep = begin(options, flags)
        folder = relative_to_cwd(sweep.folder)
        say(f"{sweep.num_trials} trials in {folder}, each with its output.txt")
        try:
            for trial in sweep.train_trials(train_run):
                row = as_row(sweep, trial).items()
                say(", ".join(f"{key} {short_text(value)}" for key, value in row))
        except Stopped as stopped:
            stopped.hint = "; the same command continues"
            raise
        show_results(sweep)
        return sweep.study


def train_run(args: Flags) -> None:
    """Train a trial, or continue it.

    args: The arguments of train.py.
    """
    train(*parse(args))


def begin(options: Any, flags: Flags) -> Sweep:
    """Check the searches and the flags, prepare the data, and open the study.

    options: The flags of sweep.py.
    flags: The flags of train.py.
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
    spec, model, data = parse_ends(searches, flags)
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
        flags,
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

    A setting is the values of the flags that are no repeats. Of equal means, the one
    with the smaller deviation is the best, and then the first. A setting with a failed
    trial cannot be the best: the others may have been lucky. Raise UserError if each
    setting has one.
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
