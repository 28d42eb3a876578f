"""What a run has written into its folder, read for tables and comparisons.

Read `find_runs` first. torch is not imported here.
"""

import json
import math
import sys
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from lightbase.config.errors import UserError, first_line
from lightbase.config.files import relative_to_cwd
from lightbase.config.yaml_files import flatten, plain_yaml
from lightbase.run.folder import is_running

DAMAGES = (
    OSError,
    ValueError,
    TypeError,
    KeyError,
    OverflowError,
    RecursionError,
    yaml.YAMLError,
)
"""What reading a damaged file raises. Its values may have any type."""

Row = dict[str, Any]


class RunInfo(NamedTuple):
    """What a run has written into its folder. Parts that it has not written are empty.

    progress: The content of progress.json; `best` is the best value of `monitor`.
    results: The first columns of the table, from name to the best value, or to the test
        metrics.
    settings: The config by flag.
    """

    folder: Path
    progress: Row
    results: Row
    settings: Row


Runs = list[RunInfo]


def find_runs(root: Path, names: list[str], with_test: bool = True) -> Runs:
    """Return the runs that one of the names selects, or all. They are sorted by NAME,
    oldest first. Folders of other programs are left out.

    root: The folder of all runs.
    names: NAME, NAME/version_N, a folder of runs, or a pattern such as "sweep/*". NAME
        may have several parts, as in sweep/trial_000.
    with_test: Whether the results of the runs have the test metrics.
    Raise UserError for a name without a run.
    """
    folders: set[Path] = set()
    for name in names or ["*"]:
        # each run has this file; "./" allows an absolute path, which is not found
        files = list(root.glob(f"./{name}/**/progress.json"))
        if not files:
            raise UserError(
                f"there is no run {name} below {relative_to_cwd(root)}",
                "python scripts/train.py trains one",
                2,
            )
        folders.update(file.parent for file in files)
    # version_10 comes after version_2
    in_order = sorted(folders, key=lambda run: (run.parent, len(run.name), run.name))
    return [read_run(root, folder, with_test) for folder in in_order]


def read_run(root: Path, folder: Path, with_test: bool = True) -> RunInfo:
    """Read the files of a run below `root`. A run with a damaged file is reported, and
    has no values.

    A run is finished if it has metrics.json and no process trains it. `epochs` and
    `minutes` are from metrics.json if it is there, and from progress.json before.
    """
    results: Row = {
        "name": folder.parent.relative_to(root).as_posix(),
        "version": folder.name.removeprefix("version_"),
        # before the files are read: the run may be ending now
        "status": "running" if is_running(folder) else "stopped",
    }
    try:
        settings = flatten(read_file(folder / "config.yaml"))
        progress = read_file(folder / "progress.json")
        metrics = read_file(folder / "metrics.json")
        latest = progress | metrics
        measured: Row = {}
        if "train_seconds" in latest:
            measured = {
                "epochs": latest["epochs"],
                "minutes": round(latest["train_seconds"] / 60, 2),
            }
        if "best" in progress:
            measured["best " + progress["monitor"]] = progress["best"]
        for key in sorted(metrics):
            if with_test and key.startswith("test/") and key != "test/num_samples":
                measured[key] = metrics[key]
        # they must be numbers; a metric that was NaN is null
        math.fsum(value for value in measured.values() if value is not None)
    except DAMAGES as error:
        problem = f"{relative_to_cwd(folder)} has a damaged file: {first_line(error)}"
        print(f"Note: {problem}", file=sys.stderr)
        return RunInfo(folder, {}, results, {})
    if results["status"] == "stopped":
        if metrics:
            results["status"] = "finished"
        elif "failed" in progress:
            results["status"] = "failed"
            measured["failed"] = progress["failed"]
    return RunInfo(folder, progress, results | measured, settings)


def read_file(path: Path) -> Row:
    """Return the content of a JSON or YAML file, without building objects. It is empty
    if there is no file."""
    if not path.exists():
        return {}
    text = path.read_text("utf-8")
    if path.suffix == ".json":
        return dict(json.loads(text))
    return dict(plain_yaml(text))


def numbers_of(runs: dict[Any, RunInfo]) -> dict[str, dict[Any, float]]:
    """Return {metric: {key: number}}: the best value of the monitored metric, and the
    test metrics. A metric that was infinite is NaN.

    runs: The runs by any key, such as the seed.
    """
    numbers: dict[str, dict[Any, float]] = {}
    for key, run in runs.items():
        for name, value in run.results.items():
            if name.startswith(("best ", "test/")):
                number = float("nan" if value is None else value)
                numbers.setdefault(name, {})[key] = number
    return numbers
