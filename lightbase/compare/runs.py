"""Runs side by side: their progress, their results, and the settings in which they
differ.

Read `run` first. torch is not imported, and matplotlib and TensorBoard only for --plot,
so the table appears at once.
"""

import io
import logging
import math
import os
import re
import sys
from argparse import Namespace
from itertools import chain
from pathlib import Path
from typing import Any

from lightbase.config.errors import UserError
from lightbase.config.files import (
    as_csv,
    as_table,
    as_text,
    relative_to_cwd,
    write_whole,
)
from lightbase.config.yaml_files import SAME_TRAINING_KEYS, better_by_name
from lightbase.run.results import Row, RunInfo, Runs, find_runs, numbers_of

REPEATED = ("seed_everything", "data.split_seed", "data.fold")
"""Settings in which the runs of one setting may differ. Runs with the same values of
all three are the same training."""

NOT_GROUPED = (*SAME_TRAINING_KEYS, *REPEATED)

CHOSEN_BY_TEST = (
    "Note: the best of several test numbers is too good; choose by a column `best ...`"
)

Rows = list[Row]


def position(row: Row, column: str, mode: str | None) -> float:
    """Return a number that sorts rows by a column, with mode "max" the largest first.
    Rows without a number are last."""
    value = row.get(column)
    if not isinstance(value, int | float):
        return math.inf
    if mode == "max":
        return -value
    return value


def best_checkpoint(runs: Runs) -> Path:
    """Return best.ckpt of the run with the best validation. Runs without one do not
    count. Raise UserError if the runs do not have one monitored metric."""
    measured = [run for run in runs if "best" in run.progress]
    metrics = {run.progress["monitor"]: run.progress["mode"] for run in measured}
    if len(metrics) != 1:
        names = " and ".join(sorted(metrics)) or "no value of any"
        raise UserError(
            f"--best needs runs with one monitored metric; these have {names}", status=2
        )
    (mode,) = metrics.values()
    best = min(measured, key=lambda run: position(run.progress, "best", mode))
    return best.folder / "checkpoints" / "best.ckpt"


def as_rows(runs: Runs) -> Rows:
    """Return a row for each run, all with the same columns: the results, the settings
    in which the runs differ, and the errors of runs that failed."""
    columns: Row = {}
    for run in runs:
        columns |= run.results
    configs = [run.settings for run in runs if run.settings]
    for key in dict.fromkeys(chain(*configs)):
        num_values = len({repr(config.get(key)) for config in configs})
        if num_values > 1 and key not in SAME_TRAINING_KEYS:
            columns[key] = None
    if "failed" in columns:
        columns["failed"] = columns.pop("failed")  # last, because it is long
    rows = []
    for run in runs:
        values = run.settings | run.results
        rows.append({column: values.get(column) for column in columns})
    return rows


def setting_of(run: RunInfo) -> Row:
    return {x: run.settings[x] for x in run.settings if x not in NOT_GROUPED}


def as_groups(runs: Runs) -> Rows:
    """Return a row for each setting: the number `n` of its runs, how many are not
    finished, and the mean and the standard deviation of each metric of the finished
    ones."""
    from lightbase.commands.seeds import spread  # scipy takes a second

    means = []
    for group in groups_of(runs):
        finished = [x for x in group if x.results["status"] == "finished"]
        names = [run.results["name"] for run in group]
        # runs of --seeds are NAME/seed_1, NAME/seed_2, ...
        row: Row = {"name": os.path.commonpath(names) or names[0], "n": len(group)}
        row["unfinished"] = len(group) - len(finished)
        for name, values in numbers_of(dict(enumerate(finished))).items():
            total = spread([*values.values()])
            row |= {name: total.mean, f"± {name}": total.deviation}
        means.append(group[0]._replace(results=row, settings=setting_of(group[0])))
    return as_rows(means)


def groups_of(runs: Runs) -> list[Runs]:
    """Return the runs of each setting. Of several runs of one training, such as two
    starts with one seed, the newest finished one counts."""
    groups: dict[str, dict[str, RunInfo]] = {}
    for run in sorted(runs, key=lambda run: run.results["status"] == "finished"):
        training: Any = [run.settings.get(name) for name in REPEATED]
        if training[0] is None:
            training = run.folder
        groups.setdefault(repr(setting_of(run)), {})[str(training)] = run
    return [[*group.values()] for group in groups.values()]


def compare(root: Path, names: list[str], with_test: bool) -> None:
    """Print the difference of two settings for each metric, with its interval. Raise
    UserError unless there are two names, with at least two finished runs each."""
    from lightbase.commands.seeds import difference, spread

    if len(names) != 2:
        raise UserError("--compare takes two names", "give NAME NAME", 2)
    first, second = (numbers_by_seed(root, name, with_test) for name in names)
    for metric in sorted(first.keys() & second.keys()):
        old, new = first[metric], second[metric]
        print(f"{metric} of {names[0]}: {spread([*old.values()], metric).text()}")
        print(f"{metric} of {names[1]}: {spread([*new.values()], metric).text()}")
        print(f"{metric}, second minus first: {difference(old, new).text()}")


def numbers_by_seed(
    root: Path, name: str, with_test: bool
) -> dict[str, dict[int, float]]:
    """Return {metric: {seed: number}} of the finished runs of a name. Raise UserError
    if they are not of one setting with two or more seeds."""
    runs = find_runs(root, [name], with_test)
    groups = groups_of([run for run in runs if run.results["status"] == "finished"])
    by_seed = {run.settings["seed_everything"]: run for run in chain(*groups)}
    if len(groups) != 1 or len(by_seed) < max(2, len(groups[0])):
        raise UserError(
            f"--compare {name} needs two or more finished runs of one setting, with "
            "different seeds",
            f"runs.py {name} shows their settings; train.py --seeds 5 trains such runs",
            2,
        )
    return numbers_of(by_seed)


def short_text(value: Any) -> str:
    """Return a cell for people, with classes without their module."""
    return re.sub(r"^[\w.]+\.(?=[A-Z]\w*$)", "", as_text(value))


def print_table(rows: Rows) -> None:
    cells = [map(short_text, row.values()) for row in rows]
    print("\n".join(as_table([[*rows[0]], *map(list, cells)])))


def read_curves(folder: Path) -> dict[str, Any]:
    """Return the curves of training and validation in TensorBoard's files, {name:
    points with `step` and `value`}, without those of single classes."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    # it warns of points before a resume
    logging.getLogger("tensorboard").setLevel(logging.ERROR)
    events = EventAccumulator(str(folder), {"scalars": 0}).Reload()  # 0: all points
    curves = {}
    for name in events.Tags()["scalars"]:
        # train_loss is common, too
        if re.match(r"(train|val)(/|_[^/]+$)", name):
            curves[name] = events.Scalars(name)
    return curves


def draw_curves(runs: Runs, file: Path) -> None:
    """Draw a chart for each curve of training and validation, with a color for each
    run. Raise UserError if there are no curves."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    curves = [read_curves(run.folder) for run in runs]
    names = sorted(set(chain(*curves)))
    if not names:
        raise UserError(
            f"--plot {file} needs runs with curves in TensorBoard's files", status=2
        )
    num_columns = math.isqrt(len(names))
    num_rows = math.ceil(len(names) / num_columns)
    height = 3 * num_rows + 0.2 * len(runs)  # with the legend
    figure = Figure((9 * num_columns, height), layout="constrained")
    colors = colormaps["turbo"].resampled(len(runs) + 1)
    for number, name in enumerate(names, 1):
        axes = figure.add_subplot(num_rows, num_columns, number)
        axes.set(xlabel="step", ylabel=name)
        for index, run_curves in enumerate(curves):
            points = run_curves.get(name, [])
            steps = [point.step for point in points]
            values = [point.value for point in points]
            axes.plot(steps, values, ".-", color=colors(index))
    figure.legend(
        axes.lines,
        [relative_to_cwd(run.folder) for run in runs],
        loc="outside upper left",
    )
    image = io.BytesIO()
    figure.savefig(image, format=file.suffix[1:])
    write_whole(file, image.getbuffer())
    print(f"Curves: {relative_to_cwd(file)}")


def run(options: Namespace) -> None:
    """Print the table, or the path of the best checkpoint, or write files."""
    sorts_by_test = "test/" in str(options.sort)
    with_test = options.test or sorts_by_test
    if options.compare:
        compare(options.root, options.names, with_test)
        return
    runs = find_runs(options.root, options.names, with_test)
    rows = as_groups(runs) if options.group else as_rows(runs)
    if sorts_by_test:
        print(CHOSEN_BY_TEST, file=sys.stderr)
    if options.sort:
        mode = better_by_name(options.sort)
        rows.sort(key=lambda row: position(row, options.sort, mode))
    if options.sort not in (None, *rows[0]):
        columns = ", ".join(rows[0])
        raise UserError(f"--sort {options.sort}: the columns are {columns}", status=2)
    if options.plot:
        draw_curves(runs, options.plot)
    if options.csv:
        cells = [list(row.values()) for row in rows]
        write_whole(options.csv, as_csv([list(rows[0]), *cells]))
        print(f"{len(rows)} runs in {options.csv}")
    if options.best:
        print(relative_to_cwd(best_checkpoint(runs)))
    elif not options.csv:
        print_table(rows)
