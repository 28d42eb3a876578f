"""Runs side by side: how far they are, what they reached, and the settings in which they differ.

python scripts/runs.py
python scripts/runs.py mnist_mlp "sweep/*" --sort test/acc
python scripts/runs.py mnist_mlp --csv runs.csv
python scripts/runs.py mnist_mlp mnist_cnn --plot curves.png
python scripts/evaluate.py --ckpt_path $(python scripts/runs.py --best mnist_mlp)

NAME is that of train.py's --name, or NAME/version_N, a folder of runs or a pattern; all runs
without one. finished: the run is tested. stopped: it is not, and no process trains it. best: of the
metric by which best.ckpt is chosen.
"""

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightbase.cli.script import ScriptParser, output_file, short_errors
from lightbase.errors import UserError, did_you_mean
from lightbase.folder import PROJECT, better_by_name, short, write_whole
from lightbase.ranks import printable
from lightbase.tools.found_runs import FoundRun, best_checkpoint, find_runs, natural
from lightbase.tools.learning_curves import draw_curves
from lightbase.tools.tables import as_csv, as_table, count

FORMATS = (".png", ".pdf", ".svg")
CELL = 32  # letters of a setting in a terminal


def main(args: Sequence[str] | None = None) -> None:
    parser = ScriptParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="which runs; all unless given")
    parser.add_argument(
        "--trainer.default_root_dir",
        dest="root",
        type=Path,
        default=PROJECT.logs,
        help="as of train.py",
    )
    parser.add_argument("--sort", metavar="COLUMN", help="by it, of metrics the best first")
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--best", action="store_true", help="print the path of the best checkpoint, by validation"
    )
    what.add_argument(
        "--csv",
        nargs="?",
        const=True,
        type=csv_file,
        metavar="FILE",
        help="the table, with all digits",
    )
    what.add_argument(
        "--plot", type=output_file, metavar="FILE", help="learning curves, as png, pdf or svg"
    )
    with short_errors():
        known = parser.parse_args(args)
        if known.plot and known.plot.suffix.lower() not in FORMATS:
            raise UserError(f"--plot {known.plot}: a file ends with {', '.join(FORMATS)}", 2)
        found = find_runs(known.root, known.names)
        for problem in found.problems:
            print(f"Note: {printable(problem)}", file=sys.stderr)
        runs = found.runs
        if not runs and (known.best or known.plot):
            raise UserError(f"no runs below {short(known.root)}")
        if not runs:
            print(f"No runs below {short(known.root)}", file=sys.stderr)
        rows = as_rows(runs)
        if known.sort and runs:
            runs, rows = sort(runs, rows, known.sort)
        if known.best:
            print(short(best_checkpoint(runs)))
        elif known.plot:
            draw_curves(runs, known.plot)
        elif known.csv:
            write_csv(rows, None if known.csv is True else known.csv)
        elif rows:
            show(rows)


def as_rows(runs: Sequence[FoundRun]) -> list[dict[str, Any]]:
    """By column, the same ones in each row; None where a run has no value."""
    settings = [run.settings for run in runs if run.settings]
    keys = list(dict.fromkeys(key for one in settings for key in one))
    differ = [key for key in keys if any(one.get(key) != settings[0].get(key) for one in settings)]
    differ.sort(key=lambda key: not key.startswith(("model", "data")))  # these first
    best = sorted({f"best {run.monitor}" for run in runs if run.best is not None})
    tests = sorted({name for run in runs for name in run.metrics})
    rows = []
    for run in runs:
        row = {"name": run.name, "version": run.version, "status": run.status, "epochs": run.epochs}
        row |= {name: run.best if name == f"best {run.monitor}" else None for name in best}
        row |= {name: run.metrics.get(name) for name in tests}
        row["minutes"] = None if run.seconds is None else run.seconds / 60
        rows.append(row | {key: run.settings.get(key) for key in differ})
    return rows


def sort(
    runs: Sequence[FoundRun], rows: Sequence[dict[str, Any]], asked: str
) -> tuple[list[FoundRun], list[Any]]:
    """Both by a column: its name, or the end of it (lr for model.lr) or its first word (best), if
    no other has it."""
    columns = list(rows[0])
    ends = tuple(f"{mark}{asked}" for mark in "./ ")
    fitting = [name for name in columns if name.endswith(ends) or name.startswith(f"{asked} ")]
    if asked in columns:
        fitting = [asked]
    if len(fitting) != 1:
        way_out = f"is it {' or '.join(fitting)}?" if fitting else f"there is {', '.join(columns)}"
        raise UserError(
            f"--sort {asked}: no column of these runs{did_you_mean(asked, columns)}\n{way_out}", 2
        )
    (column,) = fitting
    modes = {f"best {run.monitor}": run.mode for run in runs} | {
        f"test/{run.monitor.partition('/')[2]}": run.mode for run in runs if run.best is not None
    }
    mode = modes.get(column) or (better_by_name(column) if column.startswith("test/") else None)

    def key(pair: tuple[FoundRun, dict[str, Any]]) -> Any:
        value = pair[1][column]
        is_number = isinstance(value, int | float)
        return (0, value, []) if is_number else (1, 0, natural(str(value)))

    pairs = list(zip(runs, rows, strict=True))
    with_value = sorted(
        (pair for pair in pairs if pair[1][column] is not None), key=key, reverse=mode == "max"
    )
    pairs = with_value + [pair for pair in pairs if pair[1][column] is None]
    return [run for run, _ in pairs], [row for _, row in pairs]


def show(rows: Sequence[dict[str, Any]]) -> None:
    """A table; in a terminal that it is too wide for as several, each with name and version."""
    columns = list(rows[0])
    cells = {name: [name, *(as_text(row[name], name) for row in rows)] for name in columns}
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    if width:
        short_cells = {name: [shorten(cell) for cell in column] for name, column in cells.items()}
        cells = short_cells | {"name": cells["name"]}
    blocks = [columns[:2]]
    for name in columns[2:]:
        used = sum(max(map(len, cells[other])) + 2 for other in [*blocks[-1], name]) - 2
        if width and used > width and len(blocks[-1]) > 2:
            blocks.append(columns[:2])
        blocks[-1] = [*blocks[-1], name]
    for i, block in enumerate(blocks):
        lines = as_table(list(zip(*(cells[name] for name in block), strict=True)))
        print("\n".join(["", *lines] if i else lines))


def as_text(value: Any, column: str) -> str:
    """Metrics with four digits, as train.py shows them; settings as they are."""
    if value is None:
        return "-"
    if column == "minutes":
        return f"{value:.2f}"
    is_metric = column.startswith(("best ", "test/"))
    return (
        str(value)
        if not is_metric
        else f"{value:.4f}"
        if 1e-3 <= abs(value) < 1e6
        else f"{value:.4g}"
    )


def shorten(cell: str) -> str:
    return cell if len(cell) <= CELL else f"…{cell[1 - CELL :]}"


def csv_file(text: str) -> Path:
    if Path(text).suffix != ".csv" and not text.startswith("/dev/"):
        raise argparse.ArgumentTypeError(
            f"{text}: a file ends with .csv here; the name of a run stands before --csv"
        )
    return output_file(text)


def write_csv(rows: Sequence[dict[str, Any]], file: Path | None) -> None:
    """None prints."""
    lines = [list(rows[0]), *(list(row.values()) for row in rows)] if rows else []
    if file is None:
        print(as_csv(lines).replace("\r\n", "\n"), end="")
    else:
        write_whole(file, as_csv(lines))
        print(f"{count(len(rows), 'run')} in {file}")
