"""Means with their spread, and differences with their interval."""

import math

import pytest
from scipy import stats

from lightbase.commands.seeds import difference, spread

FIRST = {1: 0.50, 2: 0.60, 3: 0.55}
SECOND = {1: 0.52, 2: 0.63, 3: 0.58}


def test_the_interval_of_a_mean_is_students() -> None:
    values = [0.966, 0.971, 0.966, 0.960, 0.965]
    total = spread(values)
    low, high = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    assert (total.low, total.high) == pytest.approx((low, high))
    assert total.text("seeds").startswith("0.9656 ± 0.003912 (5 seeds), 95 % conf")
    assert math.isnan(spread([0.5]).deviation)


@pytest.mark.parametrize(
    ("metric", "values", "expected"),
    [
        ("test/acc", [0.90, 0.99], (0.3732, 1)),
        ("best val/top5", [0.01, 0.10], (0, 0.6268)),
        ("test/mae", [0.01, 0.10], (0, 0.6268)),
        ("test/kappa", [0.01, 0.10], (-0.5168, 0.6268)),  # nobody knows
    ],
)
def test_an_interval_stays_within_what_a_metric_can_be(metric, values, expected):
    total = spread(values, metric)
    assert (total.low, total.high) == pytest.approx(expected, rel=1e-3)


def test_runs_of_equal_seeds_are_compared_in_pairs() -> None:
    paired = difference(FIRST, SECOND)
    values = [[runs[seed] for seed in FIRST] for runs in (SECOND, FIRST)]
    expected = stats.ttest_rel(*values).confidence_interval(0.95)
    assert (paired.low, paired.high) == pytest.approx(tuple(expected))
    assert paired.text().startswith("+0.02667, 95 % confidence interval +0.01232")


def test_runs_of_other_seeds_are_compared_by_welch() -> None:
    others = {4: 0.52, 5: 0.63, 6: 0.58, 7: 0.9}
    welch = difference(FIRST, others)
    # by hand: variances 0.0025 / 3 and 0.02815833333 / 4, of 3.68 degrees of freedom
    freedom = (0.0025 / 3 + 0.02815833333 / 4) ** 2
    freedom /= (0.0025 / 3) ** 2 / 2 + (0.02815833333 / 4) ** 2 / 3
    radius = stats.t.ppf(0.975, freedom) * math.sqrt(0.0025 / 3 + 0.02815833333 / 4)
    assert (welch.low, welch.high) == pytest.approx((0.1075 - radius, 0.1075 + radius))
    assert welch.method == "Welch"
    equal = difference({1: 0.5, 2: 0.5}, {3: 0.6, 4: 0.6})
    assert (equal.low, equal.high) == pytest.approx((0.1, 0.1))
