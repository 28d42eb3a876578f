"""What sweep.py searches: FLAG=a,b,c or FLAG=log:1e-4..1e-1, and the study, Optuna's, in which its trials stand."""

import contextlib
import itertools
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import optuna
from numpy.random import SeedSequence
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

from project.base.errors import UserError
from project.engine.cli import TrainingCLI
from project.engine.config import flatten, write_config
from project.engine.restart import PLACE
from project.engine.run import short
from project.engine.selection import Selection

STARTUP = 5  # trials that are not pruned
RANGE = re.compile(r"(log:)?([^,\[{\s]+?)\.\.([^,\[{\s]+)")
FIXED = ("name", "ckpt_path", "trainer.default_root_dir", "trainer.fast_dev_run", "print_config", "help")
"""What sweep.py itself sets, or what leaves no run."""


class Dimension(NamedTuple):
    """A flag that is searched. texts: what it is given for each choice; of a range, its ends."""

    flag: str
    distribution: BaseDistribution
    texts: list[str]

    @property
    def is_list(self) -> bool:
        return isinstance(self.distribution, CategoricalDistribution)

    def text(self, value: Any) -> str:
        """The value as it is typed."""
        known = self.distribution
        return self.texts[known.choices.index(value)] if isinstance(known, CategoricalDistribution) else repr(value)


def dimension(search: str) -> Dimension:
    """Of FLAG=log:1e-4..1e-1, FLAG=16..512 or FLAG=a,b,c. Raises UserError."""
    flag, _, spec = search.partition("=")
    flag, spec = flag.strip().removeprefix("--"), spec.strip()
    if not flag or not spec:
        raise UserError(f"--search {search!r}: give FLAG=a,b,c, FLAG=1..9 or FLAG=log:1e-4..1e-1", 2)
    if flag in FIXED:
        raise UserError(f"--search {search}: {flag} cannot be searched", 2)
    found = RANGE.fullmatch(spec)
    low, high = (number(found[2]), number(found[3])) if found else (None, None)
    if found and low is not None and high is not None:
        if not low < high or (found[1] and low <= 0):
            raise UserError(f"--search {search}: the first end must be smaller{', and over 0' * bool(found[1])}", 2)
        kind: Any = IntDistribution if isinstance(low, int) and isinstance(high, int) else FloatDistribution
        return Dimension(flag, kind(low, high, log=bool(found[1])), [repr(low), repr(high)])
    if spec.startswith("log:"):
        raise UserError(f"--search {search}: log: wants two numbers, log:1e-4..1e-1 for instance", 2)
    texts = split_list(spec)
    choices = [plain_value(text) for text in texts]
    if "" in texts or len(set(map(repr, choices))) < len(texts):
        raise UserError(f"--search {search}: a value is missing, or stands twice", 2)
    return Dimension(flag, CategoricalDistribution(choices), texts)


def number(text: str) -> int | float | None:
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text) if math.isfinite(float(text)) else None
    return None


def plain_value(text: str) -> Any:
    """As Optuna stores it: a number, true, false or null; all else as text."""
    found = number(text)
    return {"true": True, "false": False, "null": None}.get(text, text) if found is None else found


def split_list(spec: str) -> list[str]:
    """At the commas that stand in no brackets or quotes."""
    found, depth, quote = [""], 0, ""
    for letter in spec:
        if quote or letter in "\"'":
            quote = "" if letter == quote else quote or letter
        depth += 0 if quote else (letter in "[{(") - (letter in "]})")
        if letter == "," and not depth and not quote:
            found.append("")
        else:
            found[-1] += letter
    return [text.strip() for text in found]


def combinations(dimensions: Sequence[Dimension]) -> list[dict[str, Any]]:
    """Of lists alone, each once."""
    choices = [
        found.distribution.choices for found in dimensions if isinstance(found.distribution, CategoricalDistribution)
    ]
    flags = [found.flag for found in dimensions]
    return [dict(zip(flags, values, strict=True)) for values in itertools.product(*choices)]


def suggest(trial: optuna.Trial, found: Dimension) -> Any:
    known: Any = found.distribution
    if isinstance(known, CategoricalDistribution):
        return trial.suggest_categorical(found.flag, known.choices)
    suggested = trial.suggest_int if isinstance(known, IntDistribution) else trial.suggest_float
    return suggested(found.flag, known.low, known.high, log=known.log)


def open_study(file: Path, pruner: optuna.pruners.BasePruner | None = None) -> optuna.Study:
    # two processes that write wait for each other
    storage = optuna.storages.RDBStorage(f"sqlite:///{file}", engine_kwargs={"connect_args": {"timeout": 60}})
    return optuna.load_study(study_name=None, storage=storage, pruner=pruner or optuna.pruners.NopPruner())


def sampler(seed: int, number: int) -> optuna.samplers.BaseSampler:
    """Of one trial: its values follow from its number and the trials before it, so that a sweep that was killed finds
    what one finds that nobody touched."""
    return optuna.samplers.TPESampler(seed=int(SeedSequence([seed, number]).generate_state(1)[0]))


def begin(
    folder: Path, cli: TrainingCLI, dimensions: Sequence[Dimension], selection: Selection | None, num_trials: int | None
) -> int:
    """Make the study, whole or not at all, or see that the one that is there is of the same search and flags; put the
    trials of a grid into it. Returns how many trials there are to be."""
    now = {key: value for key, value in flatten(write_config(cli.parser, cli.config)[0]).items() if key not in PLACE}
    now = json.loads(json.dumps(now))
    search = {found.flag: [str(found.distribution), *found.texts] for found in dimensions}
    file, staged = folder / "study.db", folder / ".study.db.part"
    if not file.exists():
        staged.unlink(missing_ok=True)
        storage = optuna.storages.RDBStorage(f"sqlite:///{staged}")
        direction: Any = "maximize" if selection and selection.mode == "max" else "minimize"
        study = optuna.create_study(study_name=folder.name, storage=storage, direction=direction)
        study.set_user_attr("config", now)
        study.set_user_attr("search", search)
        storage.remove_session()
        storage.engine.dispose()
        staged.replace(file)
    study = open_study(file)
    way_out = f"\ngive the same, or another --name; {short(folder)} holds the trials"
    if (was := study.user_attrs["search"]) != search:
        said = ", ".join(f"{flag} {' '.join(values[1:])}" for flag, values in was.items())
        raise UserError(f"--search: this sweep was begun with {said}{way_out}", 2)
    was = study.user_attrs["config"]
    for key in was | now:
        if was.get(key) != now.get(key):
            raise UserError(f"--{key} {now.get(key)}: this sweep was begun with {was.get(key)}{way_out}", 2)
    there = len(study.get_trials(deepcopy=False))
    if not all(found.is_list for found in dimensions):
        return max(there, num_trials or 0)
    grid = combinations(dimensions)[:num_trials]
    for params in grid[there:]:
        study.enqueue_trial(params)
    return max(there, len(grid))
