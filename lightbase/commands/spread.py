"""A number with its spread: the mean over repeated runs, and the difference of two
settings.

The intervals are Student's and hold for independent runs, such as runs that differ in
the seed only. For folds they are too narrow, because folds share most of their training
samples (Bengio and Grandvalet, "No unbiased estimator of the variance of k-fold
cross-validation", 2004).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from lightbase.config.names import better_by_name
from lightbase.config.tables import as_text

QUANTILE = 0.975
"""Of Student's distribution: 2.5 % lie beyond each end of an interval."""


@dataclass(frozen=True)
class Spread:
    """The mean of a number over repeated runs.

    n: The number of runs.
    mean: Their mean.
    deviation: Their standard deviation, with the divisor n - 1. NaN for a single run.
    low, high: The 95 % confidence interval of the mean. NaN for a single run.
    """

    n: int
    mean: float
    deviation: float
    low: float
    high: float

    def text(self, runs: str = "runs") -> str:
        """Return `0.9654 ± 0.002508 (5 runs), 95 % confidence interval of the mean
        0.9623 to 0.9685`.

        runs: What the runs differ in, such as "seeds".
        """
        if self.n == 1:
            return f"{as_text(self.mean)} (1 of the {runs})"
        text = f"{as_text(self.mean)} ± {as_text(self.deviation)} ({self.n} {runs})"
        interval = f"{as_text(self.low)} to {as_text(self.high)}"
        return f"{text}, 95 % confidence interval of the mean {interval}"


@dataclass(frozen=True)
class Difference:
    """The difference of two settings: the mean of the second minus that of the first.

    low, high: The 95 % confidence interval of the difference of the means.
    is_paired: Whether runs of equal seeds were compared one by one.
    """

    value: float
    low: float
    high: float
    is_paired: bool

    def text(self) -> str:
        """Return `+0.0041, 95 % confidence interval +0.0012 to +0.007 (paired by
        seed)`."""
        method = "paired by seed" if self.is_paired else "Welch"
        interval = f"95 % confidence interval {self.low:+.4g} to {self.high:+.4g}"
        return f"{self.value:+.4g}, {interval} ({method})"


def spread(values: Sequence[float], metric: str = "") -> Spread:
    """Return the mean and the spread of at least one value.

    metric: The name of the metric. If it is known, the interval is not below 0, and of
        a metric whose largest value is best not above 1, unless a value is.
    """
    n = len(values)
    mean = float(np.mean(values))
    if n == 1:
        return Spread(n, mean, math.nan, math.nan, math.nan)
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
    """Return the difference of two settings.

    If both have the same seeds, runs of equal seeds are compared in pairs. Otherwise
    the interval is that of Welch, "The generalization of Student's problem when several
    different population variances are involved", 1947.

    first, second: {seed: value} of at least two runs.
    """
    if first.keys() == second.keys():
        pairs = spread([second[seed] - first[seed] for seed in first])
        return Difference(pairs.mean, pairs.low, pairs.high, is_paired=True)
    values = [np.array([*group.values()]) for group in (second, first)]
    value = float(values[0].mean() - values[1].mean())
    low = high = value
    if np.ptp(values[0]) + np.ptp(values[1]) > 0:  # else the runs of each are equal
        test = stats.ttest_ind(*values, equal_var=False)
        low, high = map(float, test.confidence_interval(0.95))
    return Difference(value, low, high, is_paired=False)
