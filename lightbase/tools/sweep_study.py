"""The study of a sweep, Optuna's, in SQLite: it has each trial's number, values and state."""

import contextlib
import errno
import json
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import optuna
from numpy.random import SeedSequence
from sqlalchemy.exc import SQLAlchemyError

from lightbase.cli.config import write_config
from lightbase.cli.training_cli import TrainingCLI
from lightbase.errors import UserError, first_line
from lightbase.folder import PLACE, flatten, short
from lightbase.run.selection import Selection
from lightbase.tools.sweep_search import Dimension, combinations

STARTUP = 5  # trials that are not pruned
CANNOT_WRITE = 3  # exit status of a worker that has met a full disk
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)


def cannot_write(error: BaseException | None) -> bool:
    """Whether a full disk is behind it, or a study that SQLite cannot write."""
    while error:
        if isinstance(error, SQLAlchemyError) or (
            isinstance(error, OSError) and error.errno in FULL
        ):
            return True
        error = error.__cause__ or error.__context__
    return False


@contextlib.contextmanager
def study_errors(folder: Path) -> Iterator[None]:
    """SQLite's refusal to read or write the study of a sweep, such as on a full disk, as
    UserError."""
    try:
        yield
    except (SQLAlchemyError, optuna.exceptions.StorageInternalError) as error:
        reason: Exception = error
        while isinstance(reason.__cause__, Exception):
            reason = reason.__cause__
        what = f"{short(folder / 'study.db')} cannot be read or written: {first_line(reason)}"
        raise UserError(f"{what}\nmend that, then give the same command, which goes on") from error


def storage_of(file: Path) -> optuna.storages.RDBStorage:
    def connect() -> sqlite3.Connection:
        # two processes that write wait for each other
        return sqlite3.connect(file, timeout=60, check_same_thread=False)

    # a path may have ?, % and {, which mean something in a URL
    return optuna.storages.RDBStorage("sqlite:///study.db", engine_kwargs={"creator": connect})


def open_study(file: Path, pruner: optuna.pruners.BasePruner | None = None) -> optuna.Study:
    storage = storage_of(file)
    return optuna.load_study(
        study_name=None, storage=storage, pruner=pruner or optuna.pruners.NopPruner()
    )


def sampler(seed: int, number: int) -> optuna.samplers.BaseSampler:
    """Of one trial: its values follow from its number and the trials before it, so that a sweep
    that was killed finds what one finds that nobody touched."""
    return optuna.samplers.TPESampler(seed=int(SeedSequence([seed, number]).generate_state(1)[0]))


def begin(
    folder: Path,
    cli: TrainingCLI,
    dimensions: Sequence[Dimension],
    selection: Selection | None,
    num_trials: int | None,
) -> int:
    """Make the study, whole or not at all, or see that the one that is there is of the same search
    and flags; put the trials of a grid into it. Returns how many trials there are to be."""
    now = {
        key: value
        for key, value in flatten(write_config(cli.parser, cli.config)[0]).items()
        if key not in PLACE
    }
    now = json.loads(json.dumps(now))
    search = {found.flag: [str(found.distribution), *found.texts] for found in dimensions}
    file, staged = folder / "study.db", folder / ".study.db.part"
    if not file.exists():
        staged.unlink(missing_ok=True)
        storage = storage_of(staged)
        direction: Any = "maximize" if selection and selection.mode == "max" else "minimize"
        study = optuna.create_study(study_name=folder.name, storage=storage, direction=direction)
        study.set_user_attr("config", now)
        study.set_user_attr("search", search)
        storage.remove_session()
        storage.engine.dispose()
        staged.replace(file)
    try:
        study = open_study(file)
        searched, configured = study.user_attrs["search"], study.user_attrs["config"]
    except (ValueError, KeyError) as error:
        raise UserError(
            f"{short(file)} is no study of sweep.py; move it away, or give another --name"
        ) from error
    way_out = f"\ngive the same, or another --name; {short(folder)} holds the trials"
    if searched != search:
        said = ", ".join(f"{flag} {' '.join(values[1:])}" for flag, values in searched.items())
        raise UserError(f"--search: this sweep was begun with {said}{way_out}", 2)
    for key in configured | now:
        if configured.get(key) != now.get(key):
            raise UserError(
                f"--{key} {now.get(key)}: this sweep was begun with {configured.get(key)}{way_out}",
                2,
            )
    there = len(study.get_trials(deepcopy=False))
    if not all(found.is_list for found in dimensions):
        return max(there, num_trials or 0)
    grid = combinations(dimensions)[:num_trials]
    for params in grid[there:]:
        study.enqueue_trial(params)
    return max(there, len(grid))
