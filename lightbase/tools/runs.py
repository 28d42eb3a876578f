"""Runs side by side: their progress, their results, and the settings in which they differ.

python scripts/runs.py
python scripts/runs.py mnist_mlp "sweep/*" --sort test/acc
python scripts/runs.py mnist_mlp --csv runs.csv
python scripts/runs.py mnist_mlp mnist_cnn --plot curves.png
python scripts/evaluate.py --ckpt_path $(python scripts/runs.py --best mnist_mlp)

NAME is the --name of train.py or sweep.py, NAME/version_N, a folder of runs, or a pattern. Without
a NAME the table has all runs. See docs/runs.md.
"""

import argparse
import csv
import fnmatch
import io
import json
import math
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from lightbase.cli.command_line import checked
from lightbase.cli.script import ScriptParser, output_file, short_errors
from lightbase.errors import UserError, did_you_mean
from lightbase.folder import PLACE, PROJECT, better_by_name, flatten, is_running, short, versions
from lightbase.ranks import printable, say

# No torch here: the table appears at once.
LOADER = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader
Row = dict[str, Any]
Curves = dict[tuple[str, str], tuple[list[int], list[float]]]
"""By measure and stage, ("loss", "val"): steps and values."""


class RunInfo(NamedTuple):
    """What a run has written into its folder.

    path: NAME/version_N; NAME for a trial of a sweep that failed before its first epoch.
    best: The best value of the metric `monitor`, None before the first validation.
    results: The first columns of the table.
    settings: By flag; empty if the run has not written its config.
    searched: The flags of a trial and their values.
    """

    folder: Path
    path: str
    monitor: str
    mode: str
    best: float | None
    results: Row
    settings: Row
    searched: Row


def find_runs(root: Path, names: Sequence[str]) -> list[RunInfo]:
    """Read the runs below `root` that one of the names selects, or all. Raises UserError for a name
    that selects none."""
    paths = run_paths(root)
    if not paths:
        raise UserError(f"no runs below {short(root)}")
    for name in names:
        if not any(selects(name, path) for path in paths):
            near = did_you_mean(name, [re.sub(r"/version_\d+$", "", path) for path in paths])
            raise UserError(f"{name}: no run below {short(root)} has this name{near}", 2)
    selected = [path for path in paths if any(selects(name, path) for name in names or ["*"])]
    return [read_run(root, path) for path in selected]


def run_paths(root: Path) -> list[str]:
    """NAME/version_N of each run below `root`, and NAME of each trial that has no run."""
    paths = []
    for parent, folders, files in os.walk(root):
        numbered = list(versions(Path(parent)).values())
        folders[:] = sorted(set(folders) - {folder.name for folder in numbered})
        runs = [
            folder
            for folder in numbered
            if (folder / "config.yaml").is_file() or (folder / ".lock").exists()
        ]
        if "trial.json" in files and not runs:
            runs = [Path(parent)]
        paths += [run.relative_to(root).as_posix() for run in runs]
    return paths


def selects(pattern: str, path: str) -> bool:
    """Whether a name or pattern means the run: by NAME/version_N, NAME, or a folder above."""
    return fnmatch.fnmatchcase(path, pattern) or fnmatch.fnmatchcase(path, f"{pattern}/*")


def read_run(root: Path, path: str) -> RunInfo:
    """path: NAME/version_N, or the NAME of a trial without a run."""
    folder = root / path
    name, _, version = path.rpartition("/version_")
    trial_folder = folder.parent if name else folder
    trial = read_file(trial_folder / "trial.json", json.loads)
    # the locks first: the run may be ending now
    if is_running(folder) or (trial and is_running(trial_folder)):
        status = "running"
    elif trial.get("state") == "failed":
        status = "failed"
    else:
        status = "finished" if (folder / "metrics.json").exists() else "stopped"
    config = read_file(folder / "config.yaml", lambda text: checked(yaml.load(text, LOADER)))
    progress = read_file(folder / "progress.json", json.loads)
    result = read_file(folder / "metrics.json", json.loads)
    monitor, seconds = progress.get("monitor"), finite((progress | result).get("train_seconds"))
    results: Row = {"name": name or path, "version": int(version) if name else None}
    results |= {"status": status, "epochs": finite((progress | result).get("epochs"))}
    results["minutes"] = None if seconds is None else seconds / 60
    if monitor is not None:
        results[f"best {monitor}"] = finite(progress.get("best"))
    for key in sorted(result):
        if key.startswith("test/") and key != "test/num_samples":
            results[key] = finite(result[key])
    if trial.get("reason"):
        results["reason"] = trial["reason"]
    return RunInfo(
        folder=folder,
        path=path,
        monitor=str(monitor),
        mode=str(progress.get("mode")),
        best=results.get(f"best {monitor}"),
        results=results,
        settings={key: value for key, value in flatten(config).items() if key not in PLACE},
        searched=trial.get("values", {}),
    )


def read_file(path: Path, load: Callable[[str], Any]) -> dict[str, Any]:
    """Empty for a missing file, and with a note for a damaged one."""
    try:
        content = load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, yaml.YAMLError, RecursionError):
        content = None
    if isinstance(content, dict):
        return {str(key): value for key, value in content.items()}
    print(f"Note: {printable(short(path))} is damaged", file=sys.stderr)
    return {}


def finite(value: Any) -> float | None:
    """None for anything but a finite number."""
    return value if isinstance(value, int | float) and math.isfinite(value) else None


def best_checkpoint(runs: Sequence[RunInfo]) -> Path:
    """best.ckpt of the run with the best validation, never by the test. Raises UserError."""
    measured = [run for run in runs if run.best is not None]
    goals = sorted({f"{run.monitor} ({run.mode})" for run in measured})
    if len(goals) > 1:
        metrics = " and ".join(goals)
        raise UserError(f"--best: these runs have {metrics}: name runs with one of them", 2)
    if not measured and len(runs) > 1:
        raise UserError("--best: no run has a value of a monitored metric; name a single run")
    measured = measured or list(runs)
    choose = max if measured[0].mode == "max" else min
    best = choose(measured, key=lambda run: run.best or 0.0)
    file = best.folder / "checkpoints" / "best.ckpt"
    if not file.is_file():
        raise UserError(f"--best: {short(best.folder)} is the best, but has no best.ckpt")
    return file


def as_rows(runs: Sequence[RunInfo]) -> list[Row]:
    """Rows with the same columns, the reason last; None where a run has no value."""
    results = [name for run in runs for name in run.results]
    columns = sorted([*results, *setting_columns(runs)], key=lambda name: name == "reason")
    rows = [run.searched | run.settings | run.results for run in runs]
    return [{name: row.get(name) for name in columns} for row in rows]


def setting_columns(runs: Sequence[RunInfo]) -> list[str]:
    """The settings in which runs differ, those of the model and the data first, and the flags that
    a sweep has searched."""
    configs = [run.settings for run in runs if run.settings]
    searched = {key for run in runs for key in run.searched}
    keys = dict.fromkeys(key for run in runs for key in [*run.settings, *run.searched])
    differing = {key for key in keys if len({repr(config.get(key)) for config in configs}) > 1}
    columns = [key for key in keys if key in searched | differing]
    return sorted(columns, key=lambda key: not key.startswith(("model", "data")))


def sorted_rows(runs: Sequence[RunInfo], name: str) -> list[Row]:
    """Rows by a column: the best metric or the smallest value first, runs without a value last.

    name: The column, its last part (lr for model.lr) or its first word (best). Raises UserError if
        no column, or several, have this name.
    """
    rows = as_rows(runs)
    ends = (f".{name}", f"/{name}", f" {name}")
    near = [key for key in rows[0] if key.endswith(ends) or key.startswith(f"{name} ")]
    columns = [name] if name in rows[0] else near
    if len(columns) != 1:
        raise UserError(f"--sort {name}: which column? {', '.join(near or rows[0])}", 2)
    column = columns[0]
    modes: dict[str, str] = {}
    for run in runs:
        test = f"test/{run.monitor.partition('/')[2]}"
        modes |= {f"best {run.monitor}": run.mode, test: run.mode}
    mode = modes.get(column) or better_by_name(column)

    def key(row: Row) -> Any:
        value = row[column]
        return (0, value) if isinstance(value, int | float) else (1, str(value))

    with_value = [row for row in rows if row[column] is not None]
    without = [row for row in rows if row[column] is None]
    return sorted(with_value, key=key, reverse=mode == "max") + without


def as_text(value: Any, column: str) -> str:
    """Metrics with four digits, as train.py prints them; settings as they are."""
    if value is None:
        return "-"
    if column == "minutes":
        return f"{value:.2f}"
    if column.startswith(("best ", "test/")):
        return f"{value:.4f}" if 1e-3 <= abs(value) < 1e6 else f"{value:.4g}"
    return str(value)


def as_csv(rows: Sequence[Sequence[object]]) -> str:
    """rows: The names of the columns first. None is an empty cell."""
    text = io.StringIO()
    cells = [["" if cell is None else for_spreadsheet(str(cell)) for cell in row] for row in rows]
    csv.writer(text, lineterminator="\n").writerows(cells)
    return text.getvalue()


def as_table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines with aligned columns. rows: The names of the columns first, so one row at least."""
    rows = [tuple(map(printable, row)) for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    cells = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in rows]
    return ["  ".join(row).rstrip() for row in cells]


def for_spreadsheet(cell: str) -> str:
    """A cell without control characters that a spreadsheet opens as text, not as a formula. Numbers
    stay."""
    is_formula = re.match(r"[=@]|[+-](?![\d.]+(e[+-]?\d+)?$|inf$)", cell)
    return f"'{printable(cell)}" if is_formula else printable(cell)


def read_curves(folder: Path) -> Curves:
    """The curves of train/ and val/ in the event files of a run. TensorBoard's reader leaves out
    the points that a resume has written again."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    if not any(folder.glob("events.out.tfevents.*")):
        return {}
    kinds = dict.fromkeys(("images", "histograms", "compressedHistograms", "audio", "tensors"), 1)
    events = EventAccumulator(str(folder), size_guidance={**kinds, "scalars": 0}).Reload()
    curves: Curves = {}
    for tag in events.Tags()["scalars"]:
        if match := re.fullmatch(r"(train|val)[/_](.+)", tag):  # train_loss is common, too
            points = events.Scalars(tag)
            steps, values = [point.step for point in points], [point.value for point in points]
            curves[match[2], match[1]] = steps, values
    return curves


def draw_curves(runs: Sequence[RunInfo], file: Path) -> None:
    """Draw a row for each measure, training beside validation, the loss first."""
    curves = {run.path: read_curves(run.folder) for run in runs}
    missing = [path for path in curves if not curves[path]]
    curves = {path: curves[path] for path in curves if curves[path]}
    if not curves:
        names = ", ".join(missing[:5])
        raise UserError(f"--plot: no event file of {names} has a curve of train/ or val/")
    import matplotlib
    from matplotlib.figure import Figure

    measures = sorted({measure for one_run in curves.values() for measure, _ in one_run})
    measures.sort(key=lambda measure: measure != "loss")
    height = max(2.6 * len(measures), 0.2 * len(curves) + 0.6)
    figure = Figure((11, height), dpi=100, layout="constrained")
    grid: Any = figure.subplots(len(measures), 2, squeeze=False, sharey="row", sharex=True)
    colors = matplotlib.colormaps["turbo"].resampled(len(curves))
    for measure, row in zip(measures, grid, strict=True):
        for stage, axes in zip(("train", "val"), row, strict=True):
            axes.set(title=f"{stage}/{measure}", xlabel="step")
            for i, (path, one_run) in enumerate(curves.items()):
                steps, values = one_run.get((measure, stage), ([], []))
                axes.plot(steps, values, color=colors(i), marker=".", label=printable(path))
    figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside right upper")
    figure.savefig(file)
    print(f"Learning curves of {len(curves)} runs: {file}")
    if missing:
        say(f"Without curves: {', '.join(missing)}")


def file_ending(*endings: str) -> Callable[[str], Path]:
    """For add_argument(type=...): a path with one of these endings."""

    def check(text: str) -> Path:
        if not text.endswith(endings):
            raise argparse.ArgumentTypeError(f"{text}: a file ends with {' or '.join(endings)}")
        return output_file(text)

    return check


def main(args: Sequence[str] | None = None) -> None:
    parser = ScriptParser(description=__doc__)
    add = parser.add_argument
    add("names", nargs="*", metavar="NAME", help="which runs; all unless given")
    root = "--trainer.default_root_dir"
    add(root, dest="root", type=Path, default=PROJECT.logs, help="as of train.py")
    add("--sort", metavar="COLUMN", help="by this column, of metrics the best first")
    add = parser.add_mutually_exclusive_group().add_argument
    path = "print the path of the best checkpoint, by validation"
    add("--best", action="store_true", help=path)
    table = "the table, with all digits; printed without a FILE"
    add("--csv", nargs="?", const=Path(), type=file_ending(".csv"), metavar="FILE", help=table)
    picture = "learning curves, as png, pdf or svg"
    add("--plot", type=file_ending(".png", ".pdf", ".svg"), metavar="FILE", help=picture)
    with short_errors():
        options = parser.parse_args(args)
        runs = find_runs(options.root, options.names)
        if options.best:
            say(short(best_checkpoint(runs)))
            return
        if options.plot:
            draw_curves(runs, options.plot)
            return
        rows = sorted_rows(runs, options.sort) if options.sort else as_rows(runs)
        if options.csv is None:
            cells = [[as_text(value, name) for name, value in row.items()] for row in rows]
            print("\n".join(as_table([list(rows[0]), *cells])))
            return
        text = as_csv([list(rows[0]), *(list(row.values()) for row in rows)])
        if options.csv == Path():
            print(text, end="")
        else:
            options.csv.write_text(text, encoding="utf-8")
            print(f"{len(rows)} runs in {options.csv}")
