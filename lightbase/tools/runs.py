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
import fnmatch
import io
import json
import math
import os
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from lightbase.cli.command_line import checked
from lightbase.cli.script import ScriptParser, output_file, short_errors
from lightbase.errors import UserError, did_you_mean
from lightbase.folder import PLACE, PROJECT, better_by_name, flatten, is_running, short, write_whole
from lightbase.ranks import printable
from lightbase.tools.tables import as_csv, as_table

# No torch here: the table appears at once.
LOADER = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader
FORMATS = (".png", ".pdf", ".svg")
MAX_CELL = 32  # letters of a setting in a terminal
Row = dict[str, Any]
Curves = dict[tuple[str, str], tuple[list[int], list[float]]]
"""By measure and stage, ("loss", "val"): steps and values."""


@dataclass
class RunInfo:
    """What a run has written into its folder.

    version: None for a trial of a sweep that has no run, because it failed before its first epoch.
    status: finished, stopped or running; of a trial also pruned or failed.
    best: The best value of the metric `monitor`, None before the first validation.
    metrics: The results of the test.
    settings: By flag; empty if the run has not written its config.
    searched: The flags of a trial and their values.
    reason: Why a trial failed.
    """

    folder: Path
    name: str
    version: int | None
    status: str
    epochs: float | None
    seconds: float | None
    monitor: str
    mode: str
    best: float | None
    metrics: dict[str, float]
    settings: dict[str, Any]
    searched: dict[str, Any]
    reason: str

    @property
    def path(self) -> str:
        return self.name if self.version is None else f"{self.name}/version_{self.version}"

    @property
    def best_checkpoint(self) -> Path:
        return self.folder / "checkpoints" / "best.ckpt"


def find_runs(root: Path, names: Sequence[str]) -> list[RunInfo]:
    """Read the runs below `root` that one of the names selects, or all, in the order of their
    names. Raises UserError for a name that selects none."""
    if not root.is_dir() and root != PROJECT.logs:  # the first training makes logs/
        raise UserError(f"--trainer.default_root_dir {root}: there is no such folder", 2)
    paths = sorted(run_paths(root), key=natural)
    patterns = [as_name(name, root) for name in names]
    for pattern in patterns:
        if not any(selects(pattern, path) for path in paths):
            folders = list(dict.fromkeys(re.sub(r"/version_\d+$", "", path) for path in paths))
            near = did_you_mean(pattern, folders)
            near = near or f"; there is {', '.join(folders[:10]) or 'none at all'}"
            raise UserError(f"{pattern}: no run below {short(root)} has this name{near}", 2)
    if patterns:
        paths = [path for path in paths if any(selects(name, path) for name in patterns)]
    return [read_run(root, path) for path in paths]


def run_paths(root: Path) -> list[str]:
    """NAME/version_N of each run below `root`, and NAME of each trial that has no run."""
    paths = []
    for parent, folders, files in os.walk(root):
        folder = Path(parent)
        versions = [name for name in folders if re.fullmatch(r"version_\d+", name)]
        folders[:] = [name for name in folders if name not in versions]
        runs = [folder / name for name in versions if is_run(folder / name)]
        if "trial.json" in files and not runs:
            runs = [folder]
        paths += [run.relative_to(root).as_posix() for run in runs if run.parent != root]
    return paths


def is_run(folder: Path) -> bool:
    """Whether a training has begun in the folder. Links are not followed."""
    has_begun = (folder / "config.yaml").is_file() or (folder / ".lock").exists()
    return has_begun and not folder.is_symlink()


def as_name(text: str, root: Path) -> str:
    """NAME for a path that a shell completes: logs/mnist_mlp/version_0/."""
    path = Path(text).absolute()
    is_below = path.is_dir() and root.absolute() in path.parents
    return (path.relative_to(root.absolute()) if is_below else Path(text)).as_posix()


def selects(pattern: str, path: str) -> bool:
    """Whether a name or pattern means the run: by NAME/version_N, NAME, or a folder above."""
    if path == pattern or path.startswith(f"{pattern}/"):
        return True
    return any(fnmatch.fnmatchcase(text, pattern) for text in (path, path.rpartition("/")[0]))


def natural(text: str) -> list[tuple[int, str]]:
    """A key that sorts trial_2 before trial_10."""
    parts = re.split(r"(\d+)", text)
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]


def read_run(root: Path, path: str) -> RunInfo:
    """path: NAME/version_N, or the NAME of a trial without a run."""
    folder = root / path
    name, _, version = path.rpartition("/version_")
    trial_folder = folder.parent if name else folder
    trial = read_file(trial_folder / "trial.json", json.loads)
    status = status_of(folder, trial_folder, trial)
    config = read_file(folder / "config.yaml", lambda text: checked(yaml.load(text, LOADER)))
    progress = read_file(folder / "progress.json", json.loads)
    result = read_file(folder / "metrics.json", json.loads)
    has_best = {"monitor", "mode"} <= progress.keys()
    tests = {key: finite(value) for key, value in result.items() if key.startswith("test/")}
    tests.pop("test/num_samples", None)
    return RunInfo(
        folder=folder,
        name=name or path,
        version=int(version) if name else None,
        status=status,
        epochs=finite((progress | result).get("epochs")),
        seconds=finite((progress | result).get("train_seconds")),
        monitor=str(progress.get("monitor")),
        mode=str(progress.get("mode")),
        best=finite(progress.get("best")) if has_best else None,
        metrics={key: value for key, value in tests.items() if value is not None},
        settings={key: value for key, value in flatten(config).items() if key not in PLACE},
        searched=trial.get("values", {}),
        reason=str(trial.get("reason", "")),
    )


def status_of(folder: Path, trial_folder: Path, trial: dict[str, Any]) -> str:
    """As of `RunInfo`. trial: The content of trial.json, empty for other runs."""
    # the locks first: the run may be ending now
    if is_running(folder) or (trial and is_running(trial_folder)):
        return "running"
    if trial.get("state") in ("failed", "pruned"):
        return str(trial["state"])
    return "finished" if (folder / "metrics.json").exists() else "stopped"


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
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number and math.isfinite(value) else None


def best_checkpoint(runs: Sequence[RunInfo]) -> Path:
    """best.ckpt of the run with the best validation, never by the test. Raises UserError."""
    measured = [run for run in runs if run.best is not None]
    goals = sorted({(run.monitor, run.mode) for run in measured})
    if len(runs) == 1:
        best = runs[0]
    elif len(goals) > 1:
        metrics = " and ".join(f"{monitor} ({mode})" for monitor, mode in goals)
        raise UserError(f"--best: these runs have {metrics}: name runs with one of them", 2)
    elif not measured:
        raise UserError("--best: no run has a value of a monitored metric; name a single run")
    else:
        choose = max if goals[0][1] == "max" else min
        best = choose(measured, key=lambda run: run.best or 0.0)
    if not best.best_checkpoint.is_file():
        raise UserError(f"--best: {short(best.folder)} is the best, but has no best.ckpt")
    return best.best_checkpoint


def as_rows(runs: Sequence[RunInfo]) -> list[Row]:
    """Rows with the same columns; None where a run has no value."""
    best_columns = sorted({f"best {run.monitor}" for run in runs if run.best is not None})
    tests = sorted({name for run in runs for name in run.metrics})
    settings = setting_columns(runs)
    has_reason = any(run.reason for run in runs)
    rows = []
    for run in runs:
        row: Row = {"name": run.name, "version": run.version}
        row |= {"status": run.status, "epochs": run.epochs}
        for column in best_columns:
            row[column] = run.best if column == f"best {run.monitor}" else None
        for name in tests:
            row[name] = run.metrics.get(name)
        row["minutes"] = None if run.seconds is None else run.seconds / 60
        for key in settings:
            row[key] = run.settings.get(key, run.searched.get(key))
        if has_reason:
            row["reason"] = run.reason or None
        rows.append(row)
    return rows


def setting_columns(runs: Sequence[RunInfo]) -> list[str]:
    """The settings in which runs differ, those of the model and the data first, and the flags that
    a sweep has searched."""
    configs = [run.settings for run in runs if run.settings]
    searched = [key for run in runs for key in run.searched]
    keys = dict.fromkeys([*(key for config in configs for key in config), *searched])
    columns = [
        key
        for key in keys
        if key in searched or any(config.get(key) != configs[0].get(key) for config in configs)
    ]
    return sorted(columns, key=lambda key: not key.startswith(("model", "data")))


def sort_runs(runs: list[RunInfo], name: str) -> list[RunInfo]:
    """Sort by a column: the best metric or the smallest value first, runs without a value last.
    Raises UserError if no column, or several, have this name."""
    rows = as_rows(runs)
    column = find_column(list(rows[0]), name)
    modes: dict[str, str] = {}
    for run in runs:
        metric = run.monitor.partition("/")[2]
        modes |= {f"best {run.monitor}": run.mode, f"test/{metric}": run.mode}
    mode = modes.get(column)
    if mode is None and column.startswith("test/"):
        mode = better_by_name(column)

    def key(index: int) -> Any:
        value = rows[index][column]
        is_number = isinstance(value, int | float)
        return (0, value, []) if is_number else (1, 0, natural(str(value)))

    with_value = [i for i, row in enumerate(rows) if row[column] is not None]
    without = [i for i, row in enumerate(rows) if row[column] is None]
    order = sorted(with_value, key=key, reverse=mode == "max") + without
    return [runs[i] for i in order]


def find_column(columns: list[str], name: str) -> str:
    """The column with this name, or with this last part (lr for model.lr) or first word (best)."""
    if name in columns:
        return name
    ends = (f".{name}", f"/{name}", f" {name}")
    near = [key for key in columns if key.endswith(ends) or key.startswith(f"{name} ")]
    if len(near) == 1:
        return near[0]
    way_out = f"is it {' or '.join(near)}?" if near else f"there is {', '.join(columns)}"
    hint = did_you_mean(name, columns)
    raise UserError(f"--sort {name}: no column of these runs{hint}\n{way_out}", 2)


def print_table(rows: Sequence[Row]) -> None:
    """Print a table, or several below each other in a terminal that is too narrow."""
    columns = list(rows[0])
    cells = {name: [name, *(as_text(row[name], name) for row in rows)] for name in columns}
    if not sys.stdout.isatty():
        print("\n".join(as_table(list(zip(*cells.values(), strict=True)))))
        return
    for name in {*columns} - {"name", "reason"}:
        cells[name] = [shorten(cell) for cell in cells[name]]
    widths = {name: max(map(len, cells[name])) + 2 for name in columns}
    blocks = [columns[:2]]  # each has name and version
    for name in columns[2:]:
        width = sum(widths[column] for column in [*blocks[-1], name]) - 2
        if width > shutil.get_terminal_size().columns and len(blocks[-1]) > 2:
            blocks.append(columns[:2])
        blocks[-1] = [*blocks[-1], name]
    tables = [
        as_table(list(zip(*(cells[name] for name in block), strict=True))) for block in blocks
    ]
    print("\n\n".join("\n".join(table) for table in tables))


def as_text(value: Any, column: str) -> str:
    """Metrics with four digits, as train.py prints them; settings as they are."""
    if value is None:
        return "-"
    if column == "minutes":
        return f"{value:.2f}"
    if column.startswith(("best ", "test/")):
        return f"{value:.4f}" if 1e-3 <= abs(value) < 1e6 else f"{value:.4g}"
    return str(value)


def shorten(cell: str) -> str:
    """Keep the end, which has the name of a class or a file."""
    return cell if len(cell) <= MAX_CELL else f"…{cell[1 - MAX_CELL :]}"


def write_csv(rows: Sequence[Row], file: Path | None) -> None:
    """Write all digits into the file, or print them."""
    text = as_csv([list(rows[0]), *(list(row.values()) for row in rows)]) if rows else ""
    if file is None:
        print(text.replace("\r\n", "\n"), end="")
    else:
        write_whole(file, text)
        print(f"{len(rows)} runs in {file}")


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
    palette = "tab10" if len(curves) <= 10 else "turbo"  # turbo has a shade for each of many
    colors = matplotlib.colormaps[palette].resampled(max(10, len(curves)))
    lines = {}
    for measure, row in zip(measures, grid, strict=True):
        for stage, axes in zip(("train", "val"), row, strict=True):
            axes.set_title(f"{stage}/{measure}", fontsize=9)
            for i, (path, one_run) in enumerate(curves.items()):
                x, y = one_run.get((measure, stage), ([], []))
                marker = "." if len(x) < 20 else None
                (lines[path],) = axes.plot(x, y, color=colors(i), linewidth=1.2, marker=marker)
    for axes in grid[-1]:
        axes.set_xlabel("step")
    legend = figure.legend(
        list(lines.values()), list(lines), loc="outside right upper", frameon=False, fontsize=8
    )
    for text in legend.get_texts():
        text.set_parse_math(False)  # a name may have two $
    buffer = io.BytesIO()
    figure.savefig(buffer, format=file.suffix[1:].lower())
    write_whole(file, buffer.getbuffer())
    print(f"Learning curves of {len(curves)} runs: {file}")
    if missing:
        print(f"Without curves: {', '.join(missing)}")


def csv_file(text: str) -> Path:
    """For add_argument(type=...)."""
    if Path(text).suffix != ".csv" and not text.startswith("/dev/"):
        message = f"{text}: a file ends with .csv here; the name of a run comes before --csv"
        raise argparse.ArgumentTypeError(message)
    return output_file(text)


def plot_file(text: str) -> Path:
    """For add_argument(type=...)."""
    if Path(text).suffix.lower() not in FORMATS:
        raise argparse.ArgumentTypeError(f"{text}: a file ends with {', '.join(FORMATS)}")
    return output_file(text)


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
    add("--csv", nargs="?", const=True, type=csv_file, metavar="FILE", help=table)
    add("--plot", type=plot_file, metavar="FILE", help="learning curves, as png, pdf or svg")
    with short_errors():
        options = parser.parse_args(args)
        runs = find_runs(options.root, options.names)
        if not runs and (options.best or options.plot):
            raise UserError(f"no runs below {short(options.root)}")
        if not runs:
            print(f"No runs below {short(options.root)}", file=sys.stderr)
            return
        if options.sort:
            runs = sort_runs(runs, options.sort)
        if options.best:
            print(short(best_checkpoint(runs)))
        elif options.plot:
            draw_curves(runs, options.plot)
        elif options.csv:
            write_csv(as_rows(runs), None if options.csv is True else options.csv)
        else:
            print_table(as_rows(runs))
