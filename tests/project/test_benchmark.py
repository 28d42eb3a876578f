"""The benchmark runs, measures what it says, and finds a slow contestant slow."""

import argparse
import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from pages import REPO

BENCHMARKS = REPO / "benchmarks"
CONFIGS = [REPO / "configs" / f"{name}.yaml" for name in ("mnist_mlp", "cifar10_cnn")]
pytestmark = pytest.mark.skipif(
    not all(path.exists() for path in (BENCHMARKS / "benchmark.py", *CONFIGS)),
    reason="the benchmark, or a config that it trains, is deleted",
)


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    module = importlib.import_module("benchmark")
    module.quiet_lightning()
    return module


@pytest.mark.slow
# Lightning's, rightly, to the plain module: it logs where none of 60 batches is logged, and has no
# validation
@pytest.mark.filterwarnings(
    "ignore:The number of training batches", "ignore:You passed in a `val_dataloader`"
)
def test_it_compares(benchmark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 1)  # fewer loaders to compare with
    options = argparse.Namespace(data_dir=None, steps=50, rounds=2, accelerator="cpu")
    found = benchmark.compare("mnist", options)
    assert {
        "tutorial",
        "plain module",
        "own step",
        "raw",
        "ours",
        "ours, one step a call",
    } < found.keys()
    found.pop("ours / raw")
    for row in found.values():
        assert 0 < row["min"] <= row["median"] <= row["max"]
    assert found["ours"]["/ ours"] == 1
    assert found["tutorial"]["median"] > found["raw"]["median"]


@pytest.mark.slow
def test_ours_makes_the_steps_of_its_yaml_in_one_call_and_the_clock_counts_them_all(
    benchmark: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    benchmark.run_train(benchmark.Reference("mnist", 130, "cpu").flags, "--trainer.max_epochs 2")
    assert "One step at a time" not in capsys.readouterr().out
    assert [num_steps for _, num_steps in benchmark.StepClock.newest.marks] == [20, 130, 150, 260]


@pytest.mark.slow
def test_the_loader_of_ours_is_the_faster_one(benchmark: Any) -> None:
    found = benchmark.loader("cifar", argparse.Namespace(data_dir=None, rounds=1))
    assert found["ours, plain / torchvision, plain"]["median"] > 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mnist", "cifar"])
def test_all_contestants_train_on_the_same_images(benchmark: Any, name: str) -> None:
    reference = benchmark.Reference(name, 2, "cpu")
    theirs = torch.cat([x for x, _ in reference.loader()]).flatten(1).sort(0).values
    torch.testing.assert_close(
        reference.normalize(reference.samples.inputs).flatten(1).sort(0).values, theirs
    )


def test_real_images_are_read_where_their_folder_is_given(benchmark: Any, mnist_dir: Path) -> None:
    reference = benchmark.Reference("mnist", 100, "cpu", mnist_dir)
    assert reference.num_batches == 300 // 64
    assert benchmark.raw(reference, 1) > 0


def test_the_clock_counts_steps_and_leaves_out_what_lies_between_epochs(
    benchmark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = iter(np.cumsum(([0.005] * 10 + [0.1]) * 2))
    monkeypatch.setattr("contestants.time", SimpleNamespace(perf_counter=lambda: now))
    clock = benchmark.StepClock()
    for _ in range(2):
        for i in range(1, 11):
            now = next(seconds)
            clock.tick(i, i == 10)
        next(seconds)
    assert clock.step_ms == pytest.approx(5)
    assert clock.epoch_seconds == pytest.approx(0.15)


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:The number of training batches"
)  # fewer than one in log_every_n_steps
def test_the_part_for_folders(
    benchmark: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    benchmark.NUM_FILES = 800  # more batches than one call trains
    output = tmp_path / "speed.json"
    benchmark.main(
        ["--parts", "folder", "--rounds", "1", "--json", str(output), "--accelerator", "cpu"]
    )
    results = json.loads(output.read_text())
    assert results["environment"]["python"] == sys.version.split()[0]
    assert results["folder: images/s"]["loader / decoding alone"]["median"] > 0
    assert "decoding alone" in capsys.readouterr().out


@pytest.mark.slow
def test_each_contestant_on_a_gpu_takes_flags_that_train_py_takes(
    benchmark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a stand-in: the loops run on the CPU, torch.compile is told what it would compile."""
    compiled: list[str] = []
    flags: list[str] = []
    monkeypatch.setattr("torch.nn.Module.compile", lambda self, mode: compiled.append(mode))
    monkeypatch.setattr(
        "contestants.run_train", lambda experiment, more: flags.append(more) or {"step_ms": 1.0}
    )
    reference = benchmark.Reference("mnist", 3, "cpu")
    competing = benchmark.contestants("gpu", {0: 1.0, 2: 2.0})
    assert {
        "tutorial, 2 w",
        "stock, 0 w",
        "raw, compiled",
        "ours, compiled",
        "ours, not resident",
    } < competing.keys()
    assert competing["raw, compiled"](reference, 1) > 0
    assert compiled == ["reduce-overhead"]
    for name in competing:
        if name.startswith("ours"):
            competing[name](reference, 1)
    for more in flags:
        benchmark.run.parse([*reference.flags, *more.split()])
    assert any(
        "--model.compile_mode reduce-overhead --trainer.precision bf16-mixed" in more
        for more in flags
    )


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_run_has_its_data_in_memory_once(benchmark: Any) -> None:
    found = benchmark.memory("memory", argparse.Namespace(memory_batches=2500))  # 114 MiB more
    assert 0.9 < found["per byte of them"]["median"] < 1.2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:You passed in a `val_dataloader`")
@pytest.mark.filterwarnings("ignore:The number of training batches")
@pytest.mark.parametrize("data", ["PlainData", "Generated"])
def test_a_plain_module_trains_in_one_call_as_many_steps_as_it_is_told(
    benchmark: Any, data: str, capsys: pytest.CaptureFixture[str]
) -> None:
    reference = benchmark.Reference("mnist", 40, "cpu")
    benchmark.plain(reference, 1, data, "--steps_per_execution 20")
    assert "One step at a time" not in capsys.readouterr().out
    assert [num_steps for _, num_steps in benchmark.StepClock.newest.marks] == [20, 40]


def test_tables_for_a_page(benchmark: Any) -> None:
    rows = {
        "ours": {"median": 1.187, "min": 1.13, "max": 12.5, "images/s": 53917.0},
        "ours / raw": {"median": 1.155},
    }
    assert benchmark.markdown_table("ms", rows).splitlines() == [
        *("| ms |  | images/s |", "|---|---|---|"),
        *("| ours | 1.19 (1.13 to 12.5) | 53,900 |", "| ours / raw | 1.16 |  |"),
    ]
