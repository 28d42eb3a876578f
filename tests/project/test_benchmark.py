"""The benchmark: its contestants train on the same images, and its clock counts their steps."""

import argparse
import importlib
from types import SimpleNamespace
from typing import Any

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
    monkeypatch.syspath_prepend(str(REPO / "benchmarks"))
    return importlib.import_module("benchmark")


@pytest.fixture
def contestants(benchmark: Any) -> Any:
    return importlib.import_module("contestants")


@pytest.mark.slow
# Lightning's advice for the stock contestants, which are short here
@pytest.mark.filterwarnings("ignore:The number of training batches", "ignore:.*many workers")
def test_it_compares(benchmark: Any, capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--parts mnist --rounds 2 --steps 50 --accelerator cpu"
    benchmark.main(flags.split())
    steps, loader = capsys.readouterr().out.split("| mnist: ")[1:]
    for name in ("tutorial", "stock, 0 w", "plain module", "raw", "ours", "ours / raw"):
        assert f"\n| {name} | " in steps
    assert float(loader.split("| ours / torchvision | ")[1].split()[0]) > 1


def test_the_clock_leaves_out_what_an_epoch_costs_once(contestants, monkeypatch):
    now = 1.0
    monkeypatch.setattr(contestants, "time", SimpleNamespace(perf_counter=lambda: now))
    clock = contestants.StepClock()
    for i in range(1, 11):
        now += 0.005
        clock.after_call(i, i == 10)
    now += 1
    assert clock.step_ms == pytest.approx(5)


@pytest.mark.parametrize("name", ["mnist", "cifar"])
def test_all_contestants_train_on_the_same_images(contestants: Any, name: str) -> None:
    reference = contestants.Reference(name, 2, "cpu")
    loader = reference.torchvision_loader()
    theirs = torch.cat([x for x, _ in loader]).flatten(1).sort(0).values
    images = reference.data.normalize(reference.images).flatten(1).sort(0).values
    torch.testing.assert_close(images, theirs)


def test_each_contestant_takes_flags_that_train_py_takes(benchmark, contestants, monkeypatch):
    """As on a GPU, with stand-ins for the training and for torch.compile."""
    modes: list[str] = []
    monkeypatch.setattr("torch.nn.Module.compile", lambda self, mode: modes.append(mode))
    experiments: list[list[str]] = []
    monkeypatch.setattr(contestants, "run_train", experiments.append)
    reference = contestants.Reference("mnist", 3, "cpu")
    for name, contestant in benchmark.contestants("gpu").items():
        if name.startswith(("ours", "plain", "raw")):
            contestant(reference)
    assert modes == ["reduce-overhead"]
    for experiment in experiments:
        contestants.train.parse(experiment)


@pytest.mark.slow
def test_seconds_to_the_first_step(benchmark: Any) -> None:
    rows = benchmark.launch("launch", argparse.Namespace(rounds=1))
    assert [len(rows[name]) for name in ("plain script", "ours")] == [1, 1]


def test_a_table(benchmark: Any) -> None:
    rows = {"ours": [1.187, 1.13, 12.5], "images": [53917.0, 1e6], "ours / raw": [1.155]}
    assert benchmark.markdown_table("ms", rows).splitlines() == [
        "| ms |  |",
        "|---|---|",
        "| ours | 1.19 (1.13 to 12.5) |",
        "| images | 527,000 (53,900 to 1,000,000) |",
        "| ours / raw | 1.16 |",
    ]
