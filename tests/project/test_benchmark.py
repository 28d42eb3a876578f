"""The benchmark: its contestants train on the same images, and its clock counts their steps."""

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pages import REPO

NEEDED = [
    *("benchmarks/benchmark.py", "configs/mnist_mlp.yaml", "configs/cifar10_cnn.yaml"),
    "project/data/synthetic.py",
]
pytestmark = pytest.mark.skipif(
    not all((REPO / path).exists() for path in NEEDED),
    reason="the benchmark, or a file that it needs, is deleted",
)


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(REPO / "benchmarks"))
    return importlib.import_module("benchmark")


@pytest.mark.slow
# Lightning's advice for the stock contestants, which are short here
@pytest.mark.filterwarnings("ignore:The number of training batches", "ignore:.*many workers")
def test_it_compares(benchmark: Any, capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--parts mnist --rounds 2 --steps 50 --accelerator cpu"
    benchmark.main(flags.split())
    steps, loader = capsys.readouterr().out.split("| mnist: ")[1:]
    for name in ("tutorial", "stock, 0 w", "raw", "ours"):
        assert f"\n| {name} | " in steps
    line = next(line for line in loader.splitlines() if line.startswith("| torchvision | "))
    assert float(line.split()[-2]) < 1


def test_the_clock_leaves_out_what_an_epoch_costs_once(benchmark, monkeypatch):
    now = 1.0
    monkeypatch.setattr(benchmark, "time", SimpleNamespace(perf_counter=lambda: now))
    clock = benchmark.StepClock()
    for i in range(1, 11):
        now += 0.005
        clock.after_call(i, i == 10)
    now += 1
    assert clock.step_ms == pytest.approx(5)


@pytest.mark.parametrize("name", ["mnist", "cifar"])
def test_all_contestants_train_on_the_same_images(benchmark: Any, name: str) -> None:
    reference = benchmark.Reference(name, 2, "cpu")
    theirs = torch.cat([x for x, _ in reference.torchvision_loader()])
    images = reference.data.normalize(reference.images)
    torch.testing.assert_close(images.flatten(1).sort(0).values, theirs.flatten(1).sort(0).values)


def test_each_contestant_takes_flags_that_train_py_takes(benchmark, monkeypatch):
    """As on a GPU, with stand-ins for the training and for torch.compile."""
    modes: list[str] = []
    monkeypatch.setattr("torch.nn.Module.compile", lambda self, mode: modes.append(mode))
    experiments: list[list[str]] = []
    monkeypatch.setattr(benchmark.train, "main", experiments.append)
    reference = benchmark.Reference("mnist", 3, "cpu")
    benchmark.StepClock().marks = [(0.0, 1), (1.0, 2)]
    for name, contestant in benchmark.contestants("gpu").items():
        if name.startswith(("ours", "raw")):
            contestant(reference)
    assert modes == ["reduce-overhead"]
    assert len(experiments) == 6
    for experiment in experiments:
        benchmark.train.parse(experiment)
