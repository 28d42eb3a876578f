"""The advice at the end of a training: what each rule sees."""

from types import SimpleNamespace
from typing import Any

import pytest

from lightbase.extras.step_timer import PHASES, RULES, StepTimer, advice


def advised(busy_shares: Any = (), **shares: float) -> str:
    """The advice after a training whose phases had these shares."""
    timer = StepTimer()
    timer.shares = dict.fromkeys(PHASES, 0.0) | shares
    trainer = SimpleNamespace(callbacks=[timer])
    return advice(trainer, busy_shares)


@pytest.mark.parametrize(
    ("rule", "shares"),
    [
        # the most urgent rule counts
        ("data_loading", {"data_loading": 0.25, "forward": 0.7}),
        ("transfer_transforms", {"transfer_transforms": 0.4, "logging": 0.4}),
        ("logging", {"logging": 0.4, "other": 0.6}),
        ("overhead", {"optimizer": 0.3, "other": 0.2, "forward": 0.5}),
        ("network", {"forward": 0.3, "backward": 0.5}),
    ],
)
def test_a_rule_sees_its_part_of_the_time(rule: str, shares: Any) -> None:
    (text,) = [text for part, _, text in RULES if part == rule]
    before, _, after = text.partition("{:.0%}")
    shown = advised(**shares)
    assert shown.startswith(before)
    assert shown.endswith(after)


def test_the_load_of_the_gpus_says_more_than_the_phases() -> None:
    shares = {"optimizer": 0.5, "other": 0.4}
    assert advised([0.9, 0.5], **shares).startswith("The GPU was idle 50% of the time")
    assert "took 90% of a step" in advised([0.9, 0.8], **shares)


def test_without_a_rule_or_without_times_there_is_no_flag() -> None:
    assert "No part of a step stands out" in advised(forward=0.3, other=0.2)
    assert advice(SimpleNamespace(callbacks=[StepTimer()]), []) == ""
