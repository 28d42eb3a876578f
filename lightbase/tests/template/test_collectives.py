"""What the processes of a training exchange, counted as benchmarks/collectives.py does.
docs/scale.md has the table."""

import json
import os

import pytest
from pages import REPO, text_of
from ranks import on_ranks

BENCHMARKS = str(REPO / "benchmarks")
FLAGS = ("--config", str(REPO / "configs/small_net.yaml"))
GRADIENTS = ["allreduce", (10 * 5 + 5 + 5 * 2 + 2) * 4]  # of the net 10-5-2, in float32


@pytest.fixture
def count(monkeypatch, tmp_path):
    """A function that returns the collectives of rank 0: {phase: [[name, bytes]]}."""
    text_of("benchmarks/collectives.py")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((BENCHMARKS, str(REPO))))

    def count(num_ranks, *flags):
        root = ("--trainer.default_root_dir", tmp_path)
        result = on_ranks(
            tmp_path, num_ranks, "collectives.record", *FLAGS, *root, *flags
        )
        assert not any(result.statuses), result.outputs
        return json.loads(result.outputs[0].splitlines()[-1])

    return count


@pytest.mark.slow
def test_a_step_exchanges_gradients_and_nothing_else(count):
    found = {num_ranks: count(num_ranks) for num_ranks in (2, 4)}
    for phases in found.values():
        assert phases["a training step"] == [GRADIENTS]
        # whether a signal came, and whether last.ckpt is due: two int64
        assert phases["every tenth step"] == [GRADIENTS, ["allreduce", 16]]
    names = [
        {phase: [name for name, _ in calls] for phase, calls in phases.items()}
        for phases in found.values()
    ]
    assert names[0] == names[1]
    page = text_of("docs/scale.md")
    del names[0]["the other steps together"]
    for phase, calls in names[0].items():
        assert f"\n| {phase} | {len(calls)} | " in page


def test_a_stream_asks_before_each_batch_whether_all_have_one(count):
    flags = ("--data", "streams.Streams", "--data.batch_size", "16")
    found = count(2, *flags)
    assert found["a training step"] == [GRADIENTS, ["allreduce", 8]]
