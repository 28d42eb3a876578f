"""Runs side by side: their progress, their results, and the settings in which they differ."""

import csv
import fnmatch
import io
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from lightbase.cli.arguments import ScriptParser, output_file
from lightbase.cli.command_line import checked
from lightbase.cli.script import short_errors
from lightbase.errors import UserError, printable
from lightbase.folder import PLACE, PROJECT, better_by_name, flatten, is_running, short, versions

# No torch here: the table appears at once.
LOADER = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader
Row = dict[str, Any]


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
    """The runs that one of the names selects, or all. Raises UserError for a name without a run."""
    paths, selected = run_paths(root), set()
    for name in names or ["*"]:
        matching = {path for path in paths if fnmatch.fnmatchcase(f"{path}/", f"{name}/*")}
        if not matching:
            raise UserError(f"no run below {short(root)} is named {name}", 2)
        selected |= matching
    return [read_run(root, path) for path in paths if path in selected]


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
    latest = progress | result
    monitor, seconds = progress.get("monitor"), latest.get("train_seconds")
    results: Row = {"name": name or path, "version": int(version) if name else None}
    results |= {"status": status, "epochs": latest.get("epochs")}
    results["minutes"] = None if seconds is None else seconds / 60
    if monitor is not None:
        results[f"best {monitor}"] = progress.get("best")
    tested = sorted(key for key in result if key.startswith("test/"))
    results |= {key: result[key] for key in tested if key != "test/num_samples"}
    if trial.get("reason"):
        results["reason"] = trial["reason"]
    return RunInfo(
        folder=folder,
        path=path,
        monitor=str(monitor),
        mode=str(progress.get("mode")),
        best=progress.get("best"),
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
        return content
    print(f"Note: {printable(short(path))} is damaged", file=sys.stderr)
    return {}


def best_checkpoint(runs: Sequence[RunInfo]) -> Path:
    """best.ckpt of the run with the best validation, never by the test. Raises UserError."""
    measured = [run for run in runs if run.best is not None]
    goals = sorted({f"{run.monitor} ({run.mode})" for run in measured})
    if len(goals) != 1:
        metrics = " and ".join(goals) or "no value of any"
        raise UserError(f"--best needs runs with one monitored metric; these have {metrics}", 2)
    choose = max if measured[0].mode == "max" else min
    best = choose(measured, key=lambda run: run.best or 0.0)
    return best.folder / "checkpoints" / "best.ckpt"


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


def sorted_rows(runs: Sequence[RunInfo], column: str) -> list[Row]:
    """Rows by a column: the best metric or the smallest value first, runs without a value last."""
    rows = as_rows(runs)
    if column not in rows[0]:
        raise UserError(f"--sort {column}: the columns are {', '.join(rows[0])}", 2)

    def key(row: Row) -> Any:
        value = row[column]
        return (0, value) if isinstance(value, int | float) else (1, str(value))

    with_value = [row for row in rows if row[column] is not None]
    without = [row for row in rows if row[column] is None]
    return sorted(with_value, key=key, reverse=better_by_name(column) == "max") + without


def as_text(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def as_csv(rows: Sequence[Sequence[object]]) -> str:
    """rows: The names of the columns first. None is an empty cell."""
    text = io.StringIO()
    cells = [["" if cell is None else printable(str(cell)) for cell in row] for row in rows]
    csv.writer(text, lineterminator="\n").writerows(cells)
    return text.getvalue()


def as_table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines with aligned columns. rows: The names of the columns first, so one row at least."""
    rows = [tuple(map(printable, row)) for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    cells = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in rows]
    return ["  ".join(row).rstrip() for row in cells]


def main(args: Sequence[str] | None = None) -> None:
    parser = ScriptParser("runs")
    add = parser.add_argument
    add("names", nargs="*", metavar="NAME", help="which runs; all unless given")
    root = "--trainer.default_root_dir"
    add(root, dest="root", type=Path, default=PROJECT.logs, help="as of train.py")
    add("--sort", metavar="COLUMN", help="by this column, of metrics the best first")
    add = parser.add_mutually_exclusive_group().add_argument
    add("--best", action="store_true", help="print the path of the best checkpoint, by validation")
    add("--csv", type=output_file, metavar="FILE", help="write the table, with all digits")
    with short_errors():
        options = parser.parse_args(args)
        runs = find_runs(options.root, options.names)
        rows = sorted_rows(runs, options.sort) if options.sort else as_rows(runs)
        if options.best:
            print(printable(short(best_checkpoint(runs))))
        elif options.csv:
            text = as_csv([list(rows[0]), *(list(row.values()) for row in rows)])
            options.csv.write_text(text, encoding="utf-8")
            print(f"{len(rows)} runs in {options.csv}")
        else:
            cells = [[as_text(value) for value in row.values()] for row in rows]
            print("\n".join(as_table([list(rows[0]), *cells])))
