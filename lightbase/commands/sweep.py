"""Search the flags of train.py. Each trial is a run; lists alone are a grid.

This file checks the flags, starts further processes and prints the results. The trials
and their order are in lightbase/extras/sweep.py. Read `main` first.
"""

import contextlib
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from statistics import fmean, stdev
from typing import Any

from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from lightbase.commands import arguments
from lightbase.commands.runs import Row, as_text, print_table
from lightbase.commands.script import short_errors
from lightbase.commands.train import parse, train
from lightbase.core.callbacks import end_with_parent
from lightbase.core.checks import choose_monitor, load_data
from lightbase.core.compat import quiet_lightning
from lightbase.core.data import BaseDataModule
from lightbase.core.devices import check_one_device, num_gpus
from lightbase.core.errors import UserError, printable
from lightbase.core.files import read_json, relative_to_cwd
from lightbase.core.folder import root_folder
from lightbase.core.names import RUN_LOCATION_KEYS, flatten
from lightbase.core.project import PROJECT
from lightbase.core.signals import Stopped
from lightbase.core.spec import as_values
from lightbase.extras.sweep import (
    Choices,
    Sweep,
    as_flags,
    make_grid,
    open_study,
    read_search,
)

NOT_SEARCHED = (*RUN_LOCATION_KEYS, "monitor", "monitor_mode")
"""Flags that no trial may change: the place of the runs, and the metric that compares
the trials."""
REPEATS = ("data.fold", "seed_everything")
"""Flags that repeat a training: the mean over their values counts."""
STATES = {
    TrialState.RUNNING: "running",  # also after a kill
    TrialState.COMPLETE: "finished",
    TrialState.FAIL: "failed",
}


def main(args: Sequence[str] | None = None) -> dict[str, FrozenTrial]:
    """Train the trials, print the results, and return the trials by the names of their
    folders.

    The same command continues a sweep that was interrupted. After a signal the message
    says so.

    args: The arguments of the script. None means the arguments of the command line.
    A user's mistake prints two lines and raises SystemExit. In a notebook it raises
    UserError.
    """
    with short_errors():
        args = sys.argv[1:] if args is None else args
        options, flags = arguments.sweep().read(args)
        if options.worker:
            end_with_parent(is_worker=True)
        quiet_lightning()
        searches = dict(read_search(search) for search in options.search)
        num_trials = count_trials(searches, options.trials)
        sweep = begin(options, flags, searches)
        if not options.worker:
            folder = relative_to_cwd(sweep.folder)
            print(f"{num_trials} trials in {folder}, each with its output.txt")
        try:
            with workers(args, options.num_workers - 1):
                sweep.train_trials(
                    num_trials, train_run, make_report(sweep, num_trials)
                )
        except Stopped as stopped:
            stopped.hint = "; the same command continues"
            raise
        if not options.worker:
            show_results(sweep)
        return sweep.trials()


def train_run(args: list[str]) -> None:
    """Train a trial, or continue it.

    args: The arguments of train.py.
    """
    spec, model, data = parse(args)
    train(spec, model, data)


def count_trials(searches: dict[str, Any], limit: int | None) -> int:
    """Return how many trials a sweep has: the combinations of a grid, at most --trials,
    or --trials if a flag has a range.

    searches: The distributions by flag.
    limit: The value of --trials; None if it is not given.
    Raise UserError if a range has no --trials, if a flag cannot be searched, or if a
    fold or a seed is searched together with a range.
    """
    for flag in searches:
        if flag in NOT_SEARCHED:
            raise UserError(f"--search: {flag} cannot be searched", status=2)
    grid = make_grid(searches)
    if grid:
        return len(grid[:limit])
    if limit is None:
        raise UserError("--trials N: how many? a range has no end", status=2)
    if any(flag in searches for flag in REPEATS):
        problem = f"{' and '.join(REPEATS)} repeat a training"
        raise UserError(f"{problem}: search lists only, a grid", status=2)
    return limit


def begin(options: Any, flags: list[str], searches: dict[str, Any]) -> Sweep:
    """Check all values, prepare the data, and open the study.

    options: The flags of sweep.py.
    flags: The flags of train.py.
    searches: The distributions by flag.
    Raise UserError if a value or a flag is wrong, before anything is written. Raise it
    too if an earlier start of this sweep had other settings.
    """
    spec, model, data = check_values(searches, flags)
    monitor = choose_monitor(spec.config, model, data)
    if monitor is None and not make_grid(searches):
        problem = "a search compares trials by a validation, and there is none"
        raise UserError(problem, status=2)
    spec.config.name = options.name or f"{spec.config.name}_sweep"
    folder = root_folder(spec.config).absolute() / spec.config.name
    if isinstance(data, BaseDataModule):
        load_data(data, with_test=False)  # once, a download for instance
    settings = flatten(as_values(spec)) | {"search": options.search}
    metric, mode = monitor or (None, None)
    settings |= {"monitor": metric, "monitor_mode": mode}
    for key in RUN_LOCATION_KEYS:
        settings.pop(key, None)
    study = open_study(folder, json.loads(json.dumps(settings)))
    seed = spec.config.seed_everything
    return Sweep(study, folder, flags, searches, metric, seed)


def check_values(searches: dict[str, Any], flags: list[str]) -> Any:
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


@contextlib.contextmanager
def workers(args: Sequence[str], num: int) -> Iterator[None]:
    """While this lasts, `num` more processes share the trials. Each gets the next GPU,
    if there are any, and its part of the CPU.

    An error or a signal ends the processes, too. They save their states first. Without
    an error, the context ends when all processes have ended.

    args: The arguments of this process.
    num: The number of further processes; 0 starts none.
    """
    script = str(PROJECT.root / "scripts" / "sweep.py")
    command = [sys.executable, script, *args, "--worker", "--num_workers=1"]
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if gpus == [""]:
        gpus = [str(i) for i in range(num_gpus())]
    threads = max(1, (os.cpu_count() or 1) // (num + 1))
    environment = {"OMP_NUM_THREADS": str(threads)} | os.environ
    processes = []
    try:
        for i in range(num):
            if gpus:
                environment["CUDA_VISIBLE_DEVICES"] = gpus[(i + 1) % len(gpus)]
            processes.append(subprocess.Popen(command, env=environment))
        yield
        for process in processes:
            process.wait()
    finally:
        for process in processes:
            process.terminate()
            process.wait()


def best_of(sweep: Sweep, groups: Iterable[list[FrozenTrial]]) -> list[FrozenTrial]:
    """Return the group of finished trials with the best mean of the monitored metric.
    Return an empty list without groups or without a metric.

    groups: Lists of trials with the same values, apart from the fold and the seed.
    """
    if sweep.monitor is None:
        return []
    if sweep.study.direction == StudyDirection.MAXIMIZE:
        return max(groups, key=mean_value, default=[])
    return min(groups, key=mean_value, default=[])


def mean_value(trials: list[FrozenTrial]) -> float:
    """Return the mean of the best values of the monitored metric.

    trials: Finished trials, at least one.
    """
    return fmean(trial.value or 0.0 for trial in trials)


def end_of(sweep: Sweep, name: str) -> str:
    """Return the state of a trial as text, or the error if the trial failed.

    name: The name of the trial's folder.
    """
    state = STATES[sweep.trials()[name].state]
    if state == "failed":
        return str(sweep.study.user_attrs.get(name, state))
    return state


def make_report(sweep: Sweep, num_trials: int) -> Callable[[str], None]:
    """Return a function that prints a line for a trial that has ended: how far the
    sweep is, the best value, the time left, and the trial's values and result.

    The function gets the name of the trial. The time left follows from the number of
    trials that all processes have ended since this process started.
    """
    start = time.monotonic()
    num_before = count_ended(sweep)

    def report(name: str) -> None:
        """Print the line of a trial. name: The name of its folder."""
        num_ended = count_ended(sweep)
        # a trial that is repeated had ended before
        seconds = (time.monotonic() - start) / max(1, num_ended - num_before)
        # h:mm:ss; the text below leaves out hours and a ten of minutes that are zero
        left = str(timedelta(seconds=round(seconds * (num_trials - num_ended))))
        text = f"Trial {num_ended} of {num_trials}"
        finished = sweep.study.get_trials(states=[TrialState.COMPLETE])
        for best in best_of(sweep, [[trial] for trial in finished]):
            text += f", best {sweep.monitor} {as_text(best.value, '/')}"
        text += f", {left.removeprefix('0:').removeprefix('0')} left; "
        trial = sweep.trials()[name]
        values = []
        for flag, value in trial.params.items():
            values.append(f"{flag.rpartition('.')[2]} {as_text(value)}")
        text += ", ".join(values)
        result = as_text(trial.value, "/")
        if trial.state == TrialState.FAIL:
            result = f"failed, {end_of(sweep, name)}"
        print(printable(f"{text}: {result}"), flush=True)

    return report


def count_ended(sweep: Sweep) -> int:
    """Return how many trials have finished or failed, in all processes."""
    return sum(trial.state.is_finished() for trial in sweep.trials().values())


def show_results(sweep: Sweep) -> None:
    """Print the trials, the means over folds or seeds, the best flags, and the next
    command.

    Trials with the same values are a group. Only the fold or the seed differs within a
    group, and groups are compared by their means.

    Raise UserError if no trial has finished.
    """
    compared = [flag for flag in sweep.searches if flag not in REPEATS]
    groups: dict[Any, list[FrozenTrial]] = {}
    for trial in sweep.trials().values():
        if trial.state == TrialState.COMPLETE:
            values = tuple(trial.params[flag] for flag in compared)
            groups.setdefault(values, []).append(trial)
    best = []
    if compared:
        best = best_of(sweep, groups.values())
    print_trials(sweep, best)
    if not groups:
        output = relative_to_cwd(sweep.folder / "trial_000" / "output.txt")
        raise UserError(f"no trial finished: see {output}")
    if len(compared) < len(sweep.searches):
        print_means(sweep, groups.values(), compared)
    if best:
        chosen = {flag: best[0].params[flag] for flag in compared}
        if "data.fold" in sweep.searches:
            chosen["data.num_folds"] = "null"
        print(f"Best flags: {shlex.join([*sweep.flags, *as_flags(chosen)])}")
    names = [sweep.folder.name]
    if sweep.folder.parent != PROJECT.logs:
        names.append(
            f"--trainer.default_root_dir={relative_to_cwd(sweep.folder.parent)}"
        )
    command = f"python scripts/runs.py {shlex.join(names)} --plot curves.png"
    print(f"Tests and curves: {command}")


def print_trials(sweep: Sweep, best: list[FrozenTrial]) -> None:
    """Print a table with a row for each trial: its values, its best value of the
    monitored metric, and its state.

    best: Trials that are marked as the best.
    """
    rows = []
    for name, trial in sweep.trials().items():
        mark = STATES[trial.state].removeprefix("finished")
        if trial in best:
            mark = "best"
        row: Row = {"": mark, "trial": name}
        if sweep.monitor:
            row[sweep.monitor] = trial.value
        rows.append(row | trial.params | {"state": end_of(sweep, name)})
    print_table(rows)


def print_means(
    sweep: Sweep, groups: Iterable[list[FrozenTrial]], flags: list[str]
) -> None:
    """Print mean, standard deviation and standard error of each test metric of each
    group. A metric with a single value has no row.

    The standard deviation has the divisor n - 1, and the standard error is the standard
    deviation divided by the root of n. The training sets of folds overlap, so the true
    error of a mean over folds may be larger (Bengio and Grandvalet, 2004: No unbiased
    estimator of the variance of k-fold cross-validation).

    groups: Finished trials that differ in the fold or the seed only.
    flags: The flags that have the same values within a group.
    """
    rows = []
    for trials in groups:
        folders = [sweep.folder / trial.user_attrs["folder"] for trial in trials]
        tests = [read_json(folder / "version_0" / "metrics.json") for folder in folders]
        for name in tests[0]:
            numbers = [test[name] for test in tests if test.get(name) is not None]
            is_metric = name.startswith("test/") and name != "test/num_samples"
            if is_metric and len(numbers) > 1:
                row = {flag: trials[0].params[flag] for flag in flags}
                row |= {"metric": name, "n": len(numbers), "mean": fmean(numbers)}
                row["spread"] = stdev(numbers)
                row["standard error"] = row["spread"] / len(numbers) ** 0.5
                rows.append(row)
    print_table(rows)
