"""Runs side by side: their progress, their results, and the settings in which they
differ.

torch is not imported, and matplotlib and TensorBoard are for --plot only, so the table
appears at once. Read `main` first. It reads the folders of the runs (`find_runs`,
`read_run`), makes a row for each run (`as_rows`), and then prints the rows or writes a
file.
"""

import fnmatch
import io
import itertools
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
from lightbase.core.config_files import checked
from lightbase.core.errors import UserError, did_you_mean, printable
from lightbase.core.files import read_text, relative_to_cwd, write_whole
from lightbase.core.folder import is_running, versions
from lightbase.core.names import RUN_LOCATION_KEYS, better_by_name, flatten
from lightbase.core.project import PROJECT
from lightbase.core.tables import as_csv, as_table

LOADER = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader
RUN_FILES = ("progress.json", "environment.txt", ".lock")  # one of them is in each run
Row = dict[str, Any]


class RunInfo(NamedTuple):
    """What a run has written into its folder. Parts that it has not written are empty.

    path: NAME/version_N.
    progress: The content of progress.json; `best` is the best value of `monitor`.
    results: The first columns of the table, from name to the test metrics.
    settings: The config by flag, without the flags that say where the run is.
    """

    folder: Path
    path: str
    progress: Row
    results: Row
    settings: Row


def find_runs(root: Path, names: Sequence[str]) -> list[RunInfo]:
    """Return the runs that one of the names selects, or all. They have the order of
    `run_paths`.

    root: The folder of all runs.
    names: NAME, NAME/version_N, a folder of runs, or a pattern such as "sweep/*".
    Raise UserError for a name without a run.
    """
    paths = run_paths(root)
    selected = set()
    for name in names or ["*"]:
        # the slashes let a name select whole folders: net selects net/version_0, and
        # not net2/version_0
        matching = [
            path for path in paths if fnmatch.fnmatchcase(f"{path}/", f"{name}/*")
        ]
        if not matching:
            near = did_you_mean(name, [path.rpartition("/")[0] for path in paths])
            reason = f" is named {name}{near}"
            if not names:
                reason = ": python scripts/train.py trains one"
            raise UserError(f"no run below {relative_to_cwd(root)}{reason}", status=2)
        selected.update(matching)
    return [read_run(root, path) for path in paths if path in selected]


def run_paths(root: Path) -> list[str]:
    """Return NAME/version_N of all runs below a folder, sorted by NAME, oldest first.
    Folders of other programs are left out.

    root: The folder of all runs. NAME may have several parts, as in sweep/trial_000.
    """
    paths = []
    for parent, folders, _ in os.walk(root):
        for run in versions(Path(parent)).values():
            if run.name in folders:
                folders.remove(run.name)
            # other programs have folders version_N, too
            if any((run / name).exists() for name in RUN_FILES):
                paths.append(run.relative_to(root).as_posix())
        folders.sort()
    return paths


def read_run(root: Path, path: str) -> RunInfo:
    """Read the files of a run. Missing and damaged files are empty.

    A run is finished if it has metrics.json and no process trains it. `epochs` and
    `minutes` are from metrics.json if it is there, and from progress.json before.

    root: The folder of all runs.
    path: NAME/version_N.
    """
    folder = root / path
    # before the files are read: the run may be ending now
    status = "running" if is_running(folder) else "stopped"
    config = read_file(folder / "config.yaml", read_yaml)
    progress = read_file(folder / "progress.json", json.loads)
    metrics = read_file(folder / "metrics.json", json.loads)
    if metrics and status == "stopped":
        status = "finished"
    name, _, version = path.rpartition("/version_")
    results: Row = {"name": name, "version": int(version), "status": status}
    latest = {"epochs": None, "train_seconds": None} | progress | metrics
    results["epochs"] = latest["epochs"]
    results["minutes"] = latest["train_seconds"]
    if results["minutes"] is not None:
        results["minutes"] = round(results["minutes"] / 60, 2)
    if "monitor" in progress:
        results[f"best {progress['monitor']}"] = progress.get("best")
    for key in sorted(metrics):
        if key.startswith("test/") and key != "test/num_samples":
            results[key] = metrics[key]
    settings = flatten(config)
    for key in RUN_LOCATION_KEYS:
        settings.pop(key, None)
    return RunInfo(folder, path, progress, results, settings)


def read_yaml(text: str) -> Any:
    """Return the content of a YAML file, without building objects.

    Raise YAMLError if it is not valid, and ValueError if it is nested too deep or has
    too many values.
    """
    return checked(yaml.load(text, LOADER))


def read_file(path: Path, load: Callable[[str], Any]) -> Row:
    """Return the content of a file. It is empty for a missing file and, after a note,
    for a damaged one.

    path: The file.
    load: The function that reads the text. It raises ValueError or YAMLError for a
        damaged text.
    """
    try:
        content = load(read_text(path))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, yaml.YAMLError, RecursionError):
        content = None
    if isinstance(content, dict):
        return content
    print(f"Note: {printable(relative_to_cwd(path))} is damaged", file=sys.stderr)
    return {}


def best_checkpoint(runs: Sequence[RunInfo]) -> Path:
    """Return best.ckpt of the run with the best validation, never by the test.

    Runs without a best value, such as new ones, are left out.

    Raise UserError if the runs do not have one monitored metric.
    """
    measured = [run for run in runs if run.progress.get("best") is not None]
    goals = {"{monitor} ({mode})".format_map(run.progress) for run in measured}
    if len(goals) != 1:
        metrics = " and ".join(sorted(goals)) or "no value of any"
        problem = f"--best needs runs with one monitored metric; these have {metrics}"
        raise UserError(problem, status=2)
    choose: Any = min
    if measured[0].progress["mode"] == "max":
        choose = max
    best = choose(measured, key=lambda run: run.progress["best"])
    checkpoint: Path = best.folder / "checkpoints" / "best.ckpt"
    return checkpoint


def as_rows(runs: Sequence[RunInfo]) -> list[Row]:
    """Return a row for each run. All rows have the same columns: first the results,
    then the settings in which the runs differ. A run has None where it has no value."""
    results = dict.fromkeys(itertools.chain(*(run.results for run in runs)))
    columns = [*results, *setting_columns(runs)]
    rows = []
    for run in runs:
        values = run.settings | run.results
        rows.append({column: values.get(column) for column in columns})
    return rows


def setting_columns(runs: Sequence[RunInfo]) -> list[str]:
    """Return the settings in which runs differ. Settings that all runs have come first,
    and among them settings of the model and the data.

    A run without a config, such as a damaged one, is left out of the comparison.
    """
    configs = [run.settings for run in runs if run.settings]
    sort_keys: Row = {}  # False comes before True
    for key in dict.fromkeys(itertools.chain(*configs)):
        if len({repr(config.get(key)) for config in configs}) > 1:
            is_missing = any(key not in config for config in configs)
            sort_keys[key] = (is_missing, not key.startswith(("model", "data")))
    return sorted(sort_keys, key=sort_keys.__getitem__)


def sort_rows(rows: list[Row], column: str) -> list[Row]:
    """Return rows by a column: the best metric or the smallest value first, rows
    without a value last.

    rows: At least one.
    column: The name of a column, as the table shows it.
    Raise UserError for an unknown column.
    """
    if column not in rows[0]:
        columns = ", ".join(rows[0])
        raise UserError(f"--sort {column}: the columns are {columns}", status=2)

    def place(row: Row) -> Any:
        """Return a key for sorting. It keeps numbers and texts apart, because Python
        cannot compare them."""
        value = row[column]
        if isinstance(value, int | float):
            return (0, value)
        return (1, str(value))

    rows = sorted(rows, key=place, reverse=better_by_name(column) == "max")
    return sorted(rows, key=lambda row: row[column] is None)


def as_text(value: Any, column: str = "") -> str:
    """Return a cell for people: metrics with four decimals, classes without their
    module, at most 50 characters.

    value: None becomes "-". A float that is no metric has four significant digits, and
        so has a very small or large metric.
    column: The name of the column. The name of a metric has a slash.
    """
    if value is None:
        return "-"
    if isinstance(value, float):
        if "/" in column and 1e-3 <= abs(value) < 1e4:
            return f"{value:.4f}"
        return f"{value:.4g}"
    text = re.sub(r"^[\w.]+\.(?=[A-Z]\w*$)", "", str(value))
    if len(text) > 50:
        return f"{text[:49]}…"
    return text


def print_table(rows: Sequence[Row]) -> None:
    """Print rows with the same columns. In a narrow terminal, columns are left out
    that are equal in all rows, and then columns from the right. The first column stays,
    and a last line names the missing ones.

    rows: The values by column. Without rows nothing is printed.
    """
    if not rows:
        return
    first, *others = rows[0]
    columns = {}
    for column in (first, *others):
        columns[column] = [as_text(row[column], column) for row in rows]
    width = sys.maxsize
    if sys.stdout.isatty():
        width = os.get_terminal_size().columns
    equal = []
    for column in others:
        if len(rows) > 1 and len(set(columns[column])) == 1:
            equal.append(column)
    for column in [*equal, *reversed(others)]:
        if max(map(len, table_lines(columns))) > width:
            columns.pop(column, None)
    print("\n".join(table_lines(columns)))
    missing = ", ".join(column for column in others if column not in columns)
    if missing:
        print(f"More columns with | less -S: {missing}"[:width])


def table_lines(columns: dict[str, list[str]]) -> list[str]:
    """Return the lines of a table, with the names of the columns in the first one.

    columns: The cells by the name of the column.
    """
    return as_table([list(columns), *zip(*columns.values(), strict=True)])


def read_curves(run: RunInfo) -> dict[tuple[str, str], Any]:
    """Return the curves in TensorBoard's files, {(metric, stage): (steps, values)}, for
    the stages train and val.

    The curves of single classes, such as val_acc/cat, are left out.
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    # it warns of points before a resume
    logging.getLogger("tensorboard").setLevel(logging.ERROR)
    curves = {}
    events = EventAccumulator(str(run.folder), {"scalars": 0}).Reload()  # 0: all points
    for tag in events.Tags()["scalars"]:
        # train_loss is common, too; val_acc/cat is of a class
        match = re.fullmatch(r"(train|val)(?:/|_(?!.*/))(.+)", tag)
        if match:
            points = events.Scalars(tag)
            steps = [point.step for point in points]
            values = [point.value for point in points]
            curves[match[2], match[1]] = (steps, values)
    return curves


def draw_curves(runs: Sequence[RunInfo], file: Path) -> None:
    """Draw a chart for each metric, with a color for each run.

    A run is left out if one of its TensorBoard files is not a regular file. The legend
    has the first three settings in which the runs differ.

    file: A path that ends with .png, .pdf or .svg. An existing file is replaced.
    Raise UserError if there are no curves, or if the path ends otherwise.
    """
    import matplotlib
    from matplotlib.figure import Figure

    # TensorBoard would wait for a pipe
    runs = [
        run for run in runs if all(map(Path.is_file, run.folder.glob("*tfevents*")))
    ]
    curves = [read_curves(run) for run in runs]
    metrics = sorted({metric for metric, _ in itertools.chain(*curves)})
    if not metrics or file.suffix not in (".png", ".pdf", ".svg"):
        raise UserError(
            f"--plot {file} needs runs with curves train/ or val/ in TensorBoard's "
            "files,",
            "and a file .png, .pdf or .svg",
            2,
        )
    size = (9, 3 * len(metrics) + 0.2 * len(runs))
    figure = Figure(size, dpi=100, layout="constrained")
    charts = figure.subplots(len(metrics), squeeze=False, sharex=True)[:, 0]
    colors = matplotlib.colormaps["turbo"].resampled(len(runs) + 1)
    for metric, axes in zip(metrics, charts, strict=True):
        axes.set(ylabel=metric, xlabel="step", ymargin=0.3)
        for stage, style in (("val", ".-"), ("train", "--")):
            for number, run_curves in enumerate(curves):
                if (metric, stage) in run_curves:
                    steps, values = run_curves[metric, stage]
                    axes.plot(steps, values, style, color=colors(number))
            # the axis fits val: the first values of train/loss may be large
            if axes.dataLim.width > 0:
                axes.set_ylim(axes.get_ylim())
    columns = setting_columns(runs)[:3]
    for number, run in enumerate(runs):
        settings = [f"{key} {as_text(run.settings.get(key))}" for key in columns]
        label = printable(", ".join([run.path, *settings]))
        charts[0].plot([], [], color=colors(number), label=label)
    figure.legend(title="solid: val, dashed: train", loc="outside upper left")
    buffer = io.BytesIO()
    figure.savefig(buffer, format=file.suffix[1:])
    write_whole(file, buffer.getbuffer())
    print(f"Curves of {len(runs)} runs: {relative_to_cwd(file)}")


def make_parser() -> ScriptParser:
    """Return the parser of runs.py. It is not in arguments.py, because this file can be
    imported without torch. --best and --csv exclude each other."""
    parser = ScriptParser("runs")
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="which runs; all unless given"
    )
    parser.add_argument(
        "--trainer.default_root_dir",
        dest="root",
        type=Path,
        default=PROJECT.logs,
        help="as of train.py",
    )
    parser.add_argument(
        "--sort", metavar="COLUMN", help="by this column, of metrics the best first"
    )
    parser.add_argument(
        "--plot",
        type=output_file,
        metavar="FILE",
        help="draw the curves, as .png, .pdf or .svg",
    )
    either = parser.add_mutually_exclusive_group()
    either.add_argument(
        "--best",
        action="store_true",
        help="print the path of the best checkpoint, by validation",
    )
    either.add_argument(
        "--csv",
        type=output_file,
        metavar="FILE",
        help="write the table, with all digits",
    )
    return parser


def main(args: Sequence[str] | None = None) -> None:
    """Print the table, or the path of the best checkpoint, or write files.

    args: The arguments of the script. None means the arguments of the command line.
    A user's mistake prints two lines and raises SystemExit. In a notebook it raises
    UserError.
    """
    parser = make_parser()
    with short_errors():
        options = parser.parse_args(args)
        runs = find_runs(options.root, options.names)
        rows = as_rows(runs)
        if options.sort:
            rows = sort_rows(rows, options.sort)
        if options.plot:
            draw_curves(runs, options.plot)
        if options.best:
            print(printable(relative_to_cwd(best_checkpoint(runs))))
        elif options.csv:
            cells = [list(row.values()) for row in rows]
            text = as_csv([list(rows[0]), *cells])
            write_whole(options.csv, text)
            print(f"{len(rows)} runs in {options.csv}")
        else:
            print_table(rows)
