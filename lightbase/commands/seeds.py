"""`train.py --seeds 5`: one experiment with several seeds, the mean of repeated runs,
and the difference of two settings. The run of seed 3 is NAME/seed_3.

The intervals of `spread` and `difference` are Student's and hold for independent runs,
such as runs that differ in the seed only. For folds they are too narrow (Bengio and
Grandvalet, "No unbiased estimator of the variance of k-fold cross-validation", 2004).
runs.py uses them without torch.
"""

import argparse
import json
import math
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lightbase.config.errors import UserError, first_line, say
from lightbase.config.files import Values, as_text, relative_to_cwd, write_whole
from lightbase.config.yaml_files import (
    SAME_TRAINING_KEYS,
    better_by_name,
    flatten,
    read_config,
)
from lightbase.run.folder import check_same_settings, newest_version
from lightbase.run.results import numbers_of, read_run
from lightbase.run.signals import Stopped

NOT_COMPARED = (*SAME_TRAINING_KEYS, "seed_everything")
"""Settings in which the runs of one command differ."""


def split_seeds(args: Sequence[str]) -> tuple[list[int], bool, list[str]]:
    """Return the seeds of --seeds, if any, whether each has its own split
    (--data.split_seed seed), and the other arguments."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--seeds", nargs="?", const="")
    options, others = parser.parse_known_args(args)
    if options.seeds is None:
        return [], False, others
    parser.add_argument("--data.split_seed", dest="split_seed")
    options, others = parser.parse_known_args(args)
    has_own_splits = options.split_seed == "seed"
    if options.split_seed and not has_own_splits:
        others.append(f"--data.split_seed={options.split_seed}")
    return read_seeds(options.seeds), has_own_splits, others


def read_seeds(text: str) -> list[int]:
    """Return the seeds that --seeds names: 1 to N for a single number N, or the numbers
    of a list such as 1,2,3."""
    try:
        seeds = [int(part) for part in text.split(",")]
    except ValueError:
        seeds = []
    if len(seeds) == 1:
        seeds = [*range(1, seeds[0] + 1)]
    if len(seeds) < 2 or len({*seeds}) < len(seeds) or min(seeds) < 0:
        raise UserError(
            f"--seeds {text!r} names no seeds",
            "give how many, such as 5, or a list such as 1,2,3",
            2,
        )
    return seeds


def train_seeds(
    root: Path,
    config: Values,
    args: list[str],
    seeds: list[int],
    has_own_splits: bool,
    train: Callable[[list[str]], Any],
) -> Values:
    """Train an experiment with each seed, and print the mean of each metric with its
    spread. Return {metric: {n, mean, deviation, low, high}}.

    An error ends the run of its seed only. A signal ends all.

    root: The folder of all runs.
    config: The settings that each run has to have, earlier ones of this name, too.
    has_own_splits: Whether data.split_seed is the seed of each run.
    train: A function that trains a run by arguments of train.py, such as `args`.
    """
    settings = compared_settings(config)
    commands = {}
    for seed in seeds:
        name = f"{config['name']}/seed_{seed}"
        words = [*args, f"--seed_everything={seed}"]
        if has_own_splits:
            words.append(f"--data.split_seed={seed}")
            settings["data.split_seed"] = seed
        run = newest_version(root / name)
        if (run / "config.yaml").is_file():
            before = compared_settings(read_config(run / "config.yaml"))
            check_same_settings(run, before, settings)
            if is_complete(run, config["test"]):
                continue
            words = [f"--trainer.default_root_dir={root}", "--ckpt_path=last"]
            words.append(f"--test={config['test']}")
        commands[seed] = [*words, f"--name={name}"]
    failures = {}
    for seed, words in commands.items():
        say(f"Seed {seed}, one of {len(seeds)}: {config['name']}/seed_{seed}")
        try:
            train(words)
        except Stopped as stopped:
            stopped.hint = "; the same command continues"
            raise
        except Exception as error:
            if not isinstance(error, UserError):
                traceback.print_exc()
            failures[seed] = first_line(error)
            say(f"Seed {seed} failed: {error}")
    spreads = summarize(root / config["name"], seeds, failures)
    if failures:
        raise UserError(
            f"{len(failures)} of {len(seeds)} seeds failed: "
            f"{', '.join(map(str, failures))}",
            "the means are of the others only",
        )
    return spreads


def is_complete(run: Path, with_test: bool) -> bool:
    """Return whether a run has ended, and with `with_test` has been tested, too."""
    file = run / "metrics.json"
    return file.is_file() and (not with_test or "test/" in file.read_text())


def compared_settings(config: Any) -> Values:
    settings = flatten(config)
    return {key: settings[key] for key in settings if key not in NOT_COMPARED}


def summarize(folder: Path, seeds: list[int], failures: dict[int, str]) -> Values:
    """Print the mean and the spread of each metric, and write them to seeds.json in the
    folder ROOT/NAME. failures: {seed: the first line of the error}."""
    runs = {
        seed: read_run(folder, newest_version(folder / f"seed_{seed}"))
        for seed in seeds
        if seed not in failures
    }
    values = numbers_of(runs)
    spreads = {}
    for metric, by_seed in values.items():
        total = spread([*by_seed.values()], metric)
        say(f"{metric} {total.text('seeds')}")
        spreads[metric] = total._asdict()
    content = {"metrics": spreads, "values": values, "failures": failures}
    folder.mkdir(parents=True, exist_ok=True)  # all runs may have failed
    file = folder / "seeds.json"
    write_whole(file, json.dumps(content, indent=2) + "\n")
    say(f"Results: {relative_to_cwd(file)}")
    return spreads


QUANTILE = 0.975
"""Of Student's distribution: 2.5 % lie beyond each end of an interval."""


class Spread(NamedTuple):
    """The mean of a number over repeated runs, their standard deviation, with the
    divisor n - 1, and the 95 % confidence interval of the mean. NaN for a single run.
    """

    n: int
    mean: float
    deviation: float
    low: float
    high: float

    def text(self, runs: str = "runs") -> str:
        if self.n == 1:
            return f"{as_text(self.mean)} (1 of the {runs})"
        text = f"{as_text(self.mean)} ± {as_text(self.deviation)} ({self.n} {runs})"
        interval = f"{as_text(self.low)} to {as_text(self.high)}"
        return f"{text}, 95 % confidence interval of the mean {interval}"


class Difference(NamedTuple):
    """The mean of a second setting minus that of a first, and its 95 % confidence
    interval. method: "paired by seed" or "Welch"."""

    value: float
    low: float
    high: float
    method: str

    def text(self) -> str:
        interval = f"95 % confidence interval {self.low:+.4g} to {self.high:+.4g}"
        return f"{self.value:+.4g}, {interval} ({self.method})"


def spread(values: Sequence[float], metric: str = "") -> Spread:
    """Return the mean and the spread of at least one value.

    metric: The name of the metric. If it is known, the interval is not below 0, and of
        a metric whose largest value is best not above 1, unless a value is.
    """
    n = len(values)
    mean = float(np.mean(values))
    if n == 1:
        return Spread(n, mean, math.nan, math.nan, math.nan)
    from scipy import stats  # train.py starts without it

    deviation = float(np.std(values, ddof=1))
    radius = deviation / math.sqrt(n) * float(stats.t.ppf(QUANTILE, n - 1))
    low, high = mean - radius, mean + radius
    mode = better_by_name(metric)
    if mode and min(values) >= 0 and not metric.endswith("r2"):
        low = max(low, 0.0)
    if mode == "max" and max(values) <= 1:
        high = min(high, 1.0)
    return Spread(n, mean, deviation, low, high)


def difference(first: dict[int, float], second: dict[int, float]) -> Difference:
    """Return the difference of two settings: in pairs if both have the same seeds,
    otherwise with the interval of Welch, "The generalization of Student's problem when
    several different population variances are involved", 1947.

    first, second: {seed: value} of at least two runs.
    """
    if first.keys() == second.keys():
        pairs = spread([second[seed] - first[seed] for seed in first])
        return Difference(pairs.mean, pairs.low, pairs.high, "paired by seed")
    values = [np.array([*group.values()]) for group in (second, first)]
    value = float(values[0].mean() - values[1].mean())
    low = high = value
    if np.ptp(values[0]) + np.ptp(values[1]) > 0:  # else the runs of each are equal
        from scipy import stats

        test = stats.ttest_ind(*values, equal_var=False)
        low, high = map(float, test.confidence_interval(0.95))
    return Difference(value, low, high, "Welch")
