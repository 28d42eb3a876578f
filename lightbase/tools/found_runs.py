"""The runs below a folder of logs, read from what they have written: no torch, so that a table is
there at once."""

import fnmatch
import json
import math
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from lightbase.errors import UserError, did_you_mean
from lightbase.folder import PLACE, PROJECT, flatten, is_running, short

LOADER = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader


@dataclass
class FoundRun:
    """best: of the metric `monitor`, of which more or less is better by `mode`; None before the
    first validation.

    metrics: of the test. settings: by the names of flags; empty where the run has not written them
    down.
    """

    folder: Path
    name: str
    version: int
    status: str  # finished, stopped or running
    epochs: float | None
    seconds: float | None
    monitor: str
    mode: str
    best: float | None
    metrics: dict[str, float]
    settings: dict[str, Any]

    @property
    def path(self) -> str:
        return f"{self.name}/version_{self.version}"

    @property
    def best_checkpoint(self) -> Path:
        return self.folder / "checkpoints" / "best.ckpt"


@dataclass
class Found:
    """The runs of the names that were asked for, and what is wrong with files and folders beside
    and in them."""

    runs: list[FoundRun] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def read(self, folder: Path, name: str) -> FoundRun:
        version = int(folder.name.removeprefix("version_"))
        # in this order: it may just be ending
        status = (
            "running"
            if is_running(folder)
            else "finished"
            if (folder / "metrics.json").exists()
            else "stopped"
        )
        config = self.content(folder / "config.yaml", lambda text: yaml.load(text, LOADER))
        now, end = (
            self.content(folder / file, json.loads) for file in ("progress.json", "metrics.json")
        )
        epochs, seconds = (number((now | end).get(key)) for key in ("epochs", "train_seconds"))
        goal = str(now.get("monitor")), str(now.get("mode"))
        best = number(now.get("best")) if {"monitor", "mode"} <= now.keys() else None
        metrics = {key: number(value) for key, value in end.items()}
        tests = {
            key: value
            for key, value in metrics.items()
            if key.startswith("test/") and value is not None
        }
        tests.pop("test/num_samples", None)
        settings = (
            {key: value for key, value in flatten(config).items() if key not in PLACE}
            if config
            else {}
        )
        return FoundRun(
            folder, name, version, status, epochs, seconds, *goal, best, tests, settings
        )

    def content(self, path: Path, load: Callable[[str], Any]) -> dict[str, Any]:
        """Of a file that may be missing or damaged: empty then."""
        try:
            found = load(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, yaml.YAMLError, RecursionError):
            found = None
        if not isinstance(found, dict):
            self.problems.append(f"{short(path)} is damaged")
            return {}
        return {str(key): value for key, value in found.items()}


def find_runs(root: Path, names: Sequence[str]) -> Found:
    """The runs below `root` in the order of their names and versions. Links are not followed.

    names: NAME, NAME/version_N, a folder of runs or a pattern; all runs where there are none.
    Raises UserError for one that fits no run.
    """
    if not root.is_dir() and root != PROJECT.logs:  # which the first training makes
        raise UserError(f"--trainer.default_root_dir {root}: there is no such folder", 2)
    folders, strange = [], []
    for parent, subfolders, _ in os.walk(root):
        for name in [*subfolders]:
            folder = Path(parent, name)
            is_version = name.removeprefix("version_").isdecimal()
            if folder.is_symlink():
                strange.append((folder, "is a link, which is not followed"))
            elif is_version and Path(parent) != root:
                subfolders.remove(name)
                if (folder / "config.yaml").is_file() or (folder / ".lock").exists():
                    folders.append(folder)
                else:
                    strange.append((folder, "has no config.yaml: no run of train.py"))
    wanted = [as_name(name, root) for name in names]
    paths = {
        folder: folder.relative_to(root).as_posix()
        for folder in [*folders, *(folder for folder, _ in strange)]
    }
    for name in wanted:
        if not any(fits(paths[folder], name) for folder in folders):
            known = sorted({paths[folder].rpartition("/")[0] for folder in folders})
            near = (
                did_you_mean(name, known) or f"; there is {', '.join(known[:10]) or 'none at all'}"
            )
            raise UserError(f"{name}: no run below {short(root)} has this name{near}", 2)
    found = Found()
    for folder in sorted(folders, key=lambda folder: natural(paths[folder])):
        if not wanted or any(fits(paths[folder], name) for name in wanted):
            found.runs.append(found.read(folder, paths[folder].rpartition("/")[0]))
    left_out = [
        item for item in strange if not wanted or any(fits(paths[item[0]], name) for name in wanted)
    ]
    found.problems += [f"{short(folder)} {what}" for folder, what in left_out]
    return found


def best_checkpoint(runs: Sequence[FoundRun]) -> Path:
    """Never by the test, on which nothing is selected."""
    measured = [run for run in runs if run.best is not None]
    if len(runs) == 1 and runs[0].best_checkpoint.is_file():
        return runs[0].best_checkpoint
    goals = sorted({(run.monitor, run.mode) for run in measured})
    if len(goals) > 1:
        known = " and ".join(f"{monitor} ({mode})" for monitor, mode in goals)
        raise UserError(
            f"--best: these runs go by {known}, which do not compare: name runs that go by one", 2
        )
    if not measured:
        raise UserError(
            "--best: none of these runs has a value of a monitored metric; name a single one"
        )
    best = (max if goals[0][1] == "max" else min)(measured, key=lambda run: run.best or 0.0)
    if not best.best_checkpoint.is_file():
        raise UserError(
            f"--best: {short(best.folder)} is the best, {best.monitor} {best.best}, but has "
            "no best.ckpt"
        )
    return best.best_checkpoint


def as_name(text: str, root: Path) -> str:
    """Also of what a shell completes: logs/mnist_mlp/version_0/."""
    path = Path(text).absolute()
    is_below = path.is_dir() and path.is_relative_to(root.absolute()) and path != root.absolute()
    return (path.relative_to(root.absolute()) if is_below else Path(text)).as_posix()


def fits(path: str, name: str) -> bool:
    """Whether NAME/version_N is meant."""
    inner = (path, path.rpartition("/")[0])
    return (
        path == name
        or path.startswith(f"{name}/")
        or any(fnmatch.fnmatchcase(text, name) for text in inner)
    )


def natural(text: str) -> list[tuple[int, str]]:
    """A key to sort by: trial_2 before trial_10."""
    return [
        (int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", text)
    ]


def number(value: Any) -> float | None:
    """None for what is no finite number."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number and math.isfinite(value) else None
