"""The benchmark runs, measures what it says, and finds a slow contestant slow."""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import REPO
from test_scripts import script


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(REPO / "scripts"))
    module = script("benchmark")
    monkeypatch.setitem(sys.modules, "benchmark", module)  # train.py imports its callback and its data by this name
    module.quiet_lightning()
    return module


def test_it_compares_and_writes_json(benchmark: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = benchmark.compare("mnist", "cpu", argparse.Namespace(data_dir=None, steps=60, rounds=2))
    assert {"tutorial", "raw", "ours", "ours, 1 step a call"} < found.keys()
    for row in found.values():
        assert 0 < row["min"] <= row["median"] <= row["max"]
    assert found["ours"]["contestant / ours"] == 1
    assert found["tutorial"]["median"] > found["raw"]["median"]


def test_the_clock_counts_steps_and_leaves_out_what_lies_between_epochs(benchmark: Any) -> None:
    clock = benchmark.Clock("cpu")
    for _ in range(2):
        for i in range(1, 11):
            time.sleep(0.005)
            clock.tick(i, i == 1, i == 10)
        time.sleep(0.1)
    assert clock.num_steps == 2 * 9
    assert clock.step_ms == pytest.approx(5.2, abs=0.6)
    assert clock.epoch_ms == pytest.approx(100, abs=5)


def test_the_part_for_folders(benchmark: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    benchmark.NUM_FILES = 800  # more batches than one call trains
    output = tmp_path / "speed.json"
    benchmark.main(["--parts", "folder", "--rounds", "1", "--json", str(output), "--accelerator", "cpu"])
    results = json.loads(output.read_text())
    assert results["environment"]["python"] == sys.version.split()[0]
    assert results["image folder, images/s"]["loader / decoding alone"]["median"] > 0
    assert "decoding alone" in capsys.readouterr().out
