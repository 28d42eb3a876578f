"""Runs side by side: their progress, their results, and the settings in which they
differ."""

import csv
import fnmatch
import io
import json
import logging
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from lightbase.commands.arguments import ScriptParser, output_file
from lightbase.commands.script import short_errors
from lightbase.core.command_line import checked
from lightbase.core.errors import UserError, did_you_mean, printable
from lightbase.core.folder import (
    LARGEST_TEXT,
    PLACE,
    PROJECT,
    better_by_name,
    check_readable,
    flatten,
    is_running,
    short,
    versions,
    write_whole,
)

# No torch here, and matplotlib and TensorBoard for --plot only: the table appears at
# once.
LOADER = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader
Row = dict[str, Any]


class RunInfo(NamedTuple):
    """What a run has written into its folder."""

    folder: Path
    path: str  # NAME/version_N
    progress: Row  # `best` is the best value of the metric `monitor`
    results: Row  # the first columns of the table
    settings: Row  # by flag


def find_runs(root: Path, names: Sequence[str]) -> list[RunInfo]:
    """The runs that one of the names selects, or all. Raises UserError for a name
    without a run."""
    paths = []
    for parent, folders, _ in os.walk(root):
        numbered = versions(Path(parent)).values()
        folders[:] = sorted(set(folders) - {folder.name for folder in numbered})
        for run in numbered:  # other programs have such folders, too
            if any(
                (run / name).exists()
                for name in ("progress.json", "environment.txt", ".lock")
            ):
                paths.append(run.relative_to(root).as_posix())
    selected = set()
    for name in names or ["*"]:
        matching = {
            path for path in paths if fnmatch.fnmatchcase(f"{path}/", f"{name}/*")
        }
        if not matching:
            near = did_you_mean(name, [path.rpartition("/")[0] for path in paths])
            what = (
                f" is named {name}{near}"
                if names
                else ": python scripts/train.py trains one"
            )
            raise UserError(f"no run below {short(root)}{what}", status=2)
        selected |= matching
    return [read_run(root, path) for path in paths if path in selected]


def read_run(root: Path, path: str) -> RunInfo:
    """path: NAME/version_N."""
    folder = root / path
    name, _, version = path.rpartition("version_")
    status = (
        "running" if is_running(folder) else "stopped"
    )  # first: it may be ending now
    config = read_file(
        folder / "config.yaml", lambda text: checked(yaml.load(text, LOADER))
    )
    progress = read_file(folder / "progress.json", json.loads)
    result = read_file(folder / "metrics.json", json.loads)
    if result and status == "stopped":
        status = "finished"
    latest = progress | result
    results: Row = {"name": name.rstrip("/"), "version": int(version), "status": status}
    seconds = latest.get("train_seconds")
    results |= {
        "epochs": latest.get("epochs"),
        "minutes": seconds and round(seconds / 60, 2),
    }
    if "monitor" in progress:
        results[f"best {progress['monitor']}"] = progress.get("best")
    tested = sorted(key for key in result if key.startswith("test/"))
    results |= {key: result[key] for key in tested if key != "test/num_samples"}
    settings = {
        key: value for key, value in flatten(config).items() if key not in PLACE
    }
    return RunInfo(folder, path, progress, results, settings)


def read_file(path: Path, load: Callable[[str], Any]) -> dict[str, Any]:
    """Empty for a missing file, and with a note for a damaged one."""
    try:
        check_readable(path, LARGEST_TEXT)
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
    """best.ckpt of the run with the best validation, never by the test. Raises
    UserError."""
    measured = [run for run in runs if run.progress.get("best") is not None]
    goals = sorted({"{monitor} ({mode})".format_map(run.progress) for run in measured})
    if len(goals) != 1:
        metrics = " and ".join(goals) or "no value of any"
        raise UserError(
            f"--best needs runs with one monitored metric; these have {metrics}",
            status=2,
        )
    choose = max if measured[0].progress["mode"] == "max" else min
    best = choose(measured, key=lambda run: run.progress["best"])
    return best.folder / "checkpoints" / "best.ckpt"


def as_rows(runs: Sequence[RunInfo]) -> list[Row]:
    """Rows with the same columns; None where a run has no value."""
    columns = dict.fromkeys([name for run in runs for name in run.results])
    rows = [run.settings | run.results for run in runs]
    return [
        {name: row.get(name) for name in [*columns, *setting_columns(runs)]}
        for row in rows
    ]


def setting_columns(runs: Sequence[RunInfo]) -> list[str]:
    """The settings in which runs differ, those that all have first, of them model and
    data."""
    configs = [run.settings for run in runs if run.settings]
    keys = dict.fromkeys(key for config in configs for key in config)
    columns = [
        key for key in keys if len({repr(config.get(key)) for config in configs}) > 1
    ]
    columns.sort(key=lambda key: not key.startswith(("model", "data")))
    return sorted(columns, key=lambda key: any(key not in config for config in configs))


def sorted_rows(runs: Sequence[RunInfo], column: str) -> list[Row]:
    """Rows by a column: the best metric or the smallest value first, runs without a
    value last."""
    rows = as_rows(runs)
    if column not in rows[0]:
        raise UserError(
            f"--sort {column}: the columns are {', '.join(rows[0])}", status=2
        )

    def key(row: Row) -> Any:
        value = row[column]
        return (0, value) if isinstance(value, int | float) else (1, str(value))

    rows.sort(key=key, reverse=better_by_name(column) == "max")
    return sorted(rows, key=lambda row: row[column] is None)


def as_text(value: Any, column: str = "") -> str:
    """A cell for people: metrics with four decimals, classes without their module,
    short texts."""
    if isinstance(value, float):
        has_decimals = "/" in column and 1e-3 <= abs(value) < 1e4
        return f"{value:.4f}" if has_decimals else f"{value:.4g}"
    text = re.sub(r"^[\w.]+\.(?=[A-Z]\w*$)", "", "-" if value is None else str(value))
    return text if len(text) <= 50 else f"{text[:49]}…"


def as_csv(rows: Sequence[Sequence[object]]) -> str:
    """rows: The names of the columns first. None is an empty cell."""
    text = io.StringIO()
    cells = [
        ["" if cell is None else printable(str(cell)) for cell in row] for row in rows
    ]
    csv.writer(text, lineterminator="\n").writerows(cells)
    return text.getvalue()


def as_table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines with aligned columns. rows: The names of the columns first, so one row at
    least."""
    rows = [tuple(map(printable, row)) for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    cells = [
        [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        for row in rows
    ]
    return ["  ".join(row).rstrip() for row in cells]


def as_lines(rows: Sequence[Row]) -> list[str]:
    """The table. A terminal without room gets no columns that are equal in all rows,
    and then none from the right."""
    width = os.get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize
    columns = {name: [as_text(row[name], name) for row in rows] for name in rows[0]}
    _, *others = columns
    equal = [name for name in others if len(set(columns[name])) == 1 < len(rows)]
    for name in [*equal, *reversed(others)]:
        lines = as_table([list(columns), *zip(*columns.values(), strict=True)])
        if max(map(len, lines)) <= width:
            break
        columns.pop(name, None)
    missing = ", ".join(name for name in others if name not in columns)
    return (
        [*lines, f"More columns with | less -S: {missing}"[:width]]
        if missing
        else lines
    )


def draw_curves(runs: Sequence[RunInfo], file: Path) -> None:
    """Draw a chart for each metric. Raises UserError if there are no curves."""
    import matplotlib
    from matplotlib.figure import Figure
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logging.getLogger("tensorboard").setLevel(
        logging.ERROR
    )  # it warns of points before a resume
    curves: dict[
        tuple[str, str], list[Any]
    ] = {}  # by metric and stage: run, steps and values
    # TensorBoard would wait for a pipe
    runs = [
        run for run in runs if all(map(Path.is_file, run.folder.glob("*tfevents*")))
    ]
    for i, run in enumerate(runs):
        events = EventAccumulator(
            str(run.folder), size_guidance={"scalars": 0}
        ).Reload()
        for tag in events.Tags()["scalars"]:
            # train_loss is common, too; val_acc/cat is of a class
            if match := re.fullmatch(r"(train|val)(?:/|_(?!.*/))(.+)", tag):
                points = events.Scalars(tag)
                curve = (i, [x.step for x in points], [x.value for x in points])
                curves.setdefault((match[2], match[1]), []).append(curve)
    metrics = sorted({metric for metric, _ in curves})
    if not metrics or file.suffix not in (".png", ".pdf", ".svg"):
        needs = "runs with curves train/ or val/ in TensorBoard's files"
        raise UserError(
            f"--plot {file} needs {needs},", "and a file .png, .pdf or .svg", 2
        )
    figure = Figure(
        (9, 3 * len(metrics) + 0.2 * len(runs)), dpi=100, layout="constrained"
    )
    grid: Any = figure.subplots(len(metrics), squeeze=False, sharex=True)
    colors = matplotlib.colormaps["turbo"].resampled(len(runs) + 1)
    for metric, axes in zip(metrics, grid[:, 0], strict=True):
        axes.set(ylabel=metric, xlabel="step", ymargin=0.3)
        for stage, style in (("val", ".-"), ("train", "--")):
            for i, steps, values in curves.get((metric, stage), []):
                axes.plot(steps, values, style, color=colors(i))
            if (
                axes.dataLim.width > 0
            ):  # fits val: the first values of train/loss may be large
                axes.set_ylim(axes.get_ylim())
    for i, run in enumerate(runs):
        settings = [
            f"{x} {as_text(run.settings.get(x))}" for x in setting_columns(runs)[:3]
        ]
        grid[0, 0].plot(
            [], [], color=colors(i), label=printable(", ".join([run.path, *settings]))
        )
    figure.legend(title="solid: val, dashed: train", loc="outside upper left")
    buffer = io.BytesIO()
    figure.savefig(buffer, format=file.suffix[1:])
    write_whole(file, buffer.getbuffer())
    print(f"Curves of {len(runs)} runs: {short(file)}")


def main(args: Sequence[str] | None = None) -> None:
    parser = ScriptParser("runs")
    add = parser.add_argument
    add("names", nargs="*", metavar="NAME", help="which runs; all unless given")
    root = "--trainer.default_root_dir"
    add(root, dest="root", type=Path, default=PROJECT.logs, help="as of train.py")
    add("--sort", metavar="COLUMN", help="by this column, of metrics the best first")
    add(
        "--plot",
        type=output_file,
        metavar="FILE",
        help="draw the curves, as .png, .pdf or .svg",
    )
    add = parser.add_mutually_exclusive_group().add_argument
    add(
        "--best",
        action="store_true",
        help="print the path of the best checkpoint, by validation",
    )
    add(
        "--csv",
        type=output_file,
        metavar="FILE",
        help="write the table, with all digits",
    )
    with short_errors():
        options = parser.parse_args(args)
        runs = find_runs(options.root, options.names)
        rows = sorted_rows(runs, options.sort) if options.sort else as_rows(runs)
        if options.plot:
            draw_curves(runs, options.plot)
        if options.best:
            print(printable(short(best_checkpoint(runs))))
        elif options.csv:
            text = as_csv([list(rows[0]), *(list(row.values()) for row in rows)])
            write_whole(options.csv, text)
            print(f"{len(rows)} runs in {options.csv}")
        else:
            print("\n".join(as_lines(rows)))
