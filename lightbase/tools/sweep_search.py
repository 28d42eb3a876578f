"""What sweep.py searches: FLAG=a,b,c, FLAG=1..9 or FLAG=log:1e-4..1e-1."""

import contextlib
import itertools
import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)

from lightbase.errors import UserError

RANGE = re.compile(r"(log:)?([^,\[{\s]+?)\.\.([^,\[{\s]+)")
FIXED = (
    *(
        "name",
        "ckpt_path",
        "trainer.default_root_dir",
        "trainer.fast_dev_run",
        "print_config",
        "help",
    ),
    *("monitor", "monitor_mode"),
)
"""What sweep.py itself sets, what leaves no run, and what trials are compared by."""


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
        return (
            self.texts[known.choices.index(value)]
            if isinstance(known, CategoricalDistribution)
            else repr(value)
        )


def dimension(search: str) -> Dimension:
    """Of FLAG=log:1e-4..1e-1, FLAG=16..512 or FLAG=a,b,c. Raises UserError."""
    flag, _, spec = search.partition("=")
    flag, spec = one_name(flag.strip()), spec.strip()
    if not flag or not spec:
        raise UserError(
            f"--search {search!r}: give FLAG=a,b,c, FLAG=1..9 or FLAG=log:1e-4..1e-1", 2
        )
    if flag in FIXED:
        raise UserError(f"--search {search}: {flag} cannot be searched", 2)
    found = RANGE.fullmatch(spec)
    low, high = (number(found[2]), number(found[3])) if found else (None, None)
    if found and low is not None and high is not None:
        if not low < high or (found[1] and low <= 0):
            raise UserError(
                f"--search {search}: the first end must be "
                f"smaller{', and over 0' * bool(found[1])}",
                2,
            )
        kind: Any = (
            IntDistribution if isinstance(low, int) and isinstance(high, int) else FloatDistribution
        )
        return Dimension(flag, kind(low, high, log=bool(found[1])), [repr(low), repr(high)])
    if spec.startswith("log:"):
        raise UserError(
            f"--search {search}: log: wants two numbers, log:1e-4..1e-1 for instance", 2
        )
    texts = split_list(spec)
    choices = [plain_value(text) for text in texts]
    if "" in texts or len(set(map(repr, choices))) < len(texts):
        raise UserError(f"--search {search}: a value is missing, or stands twice", 2)
    if len(set(choices)) < len(texts):  # 1, 1.0 and true, which Optuna would take for one
        choices = [*texts]
    return Dimension(flag, CategoricalDistribution(choices), texts)


def one_name(flag: str) -> str:
    """Of a flag that jsonargparse takes by several: lr of the model is --model.lr and
    --model.init_args.lr."""
    return flag.removeprefix("--").replace(".init_args.", ".").removesuffix(".class_path")


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
        found.distribution.choices
        for found in dimensions
        if isinstance(found.distribution, CategoricalDistribution)
    ]
    flags = [found.flag for found in dimensions]
    return [dict(zip(flags, values, strict=True)) for values in itertools.product(*choices)]


def suggest(trial: optuna.Trial, found: Dimension) -> Any:
    known: Any = found.distribution
    if isinstance(known, CategoricalDistribution):
        return trial.suggest_categorical(found.flag, known.choices)
    suggested = trial.suggest_int if isinstance(known, IntDistribution) else trial.suggest_float
    return suggested(found.flag, known.low, known.high, log=known.log)
