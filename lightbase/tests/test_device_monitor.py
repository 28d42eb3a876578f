"""Curves of the devices: of the process."""

import psutil
import pytest
from written import curves

from lightbase.watch import device_monitor


@pytest.fixture
def watched(train, tmp_path, monkeypatch):
    """Return a function that trains with a monitor, and returns the points of all
    curves. There are points on all log steps."""

    def run(flags: str = "--num_threads 1") -> dict[str, list[tuple[int, float]]]:
        monkeypatch.setattr(device_monitor, "INTERVAL_S", 0.0)
        train("--device_monitor true --trainer.max_epochs 1", flags)
        return curves(tmp_path / "tiny" / "version_0")

    return run


def test_cpu_and_memory_of_the_process_are_curves(watched):
    found = watched()
    steps, busy = zip(*found["watch/device/cpu_percent"], strict=True)
    assert steps == (4, 9, 14)  # log steps
    assert 0 < sum(busy) / len(busy) < 300  # of a core, in steps of 10 ms
    memory = psutil.Process().memory_info().rss / 2**30
    _, last = found["watch/device/memory_gib"][-1]
    assert last == pytest.approx(memory, rel=0.2)
