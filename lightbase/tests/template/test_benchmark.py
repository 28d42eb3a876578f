"""The benchmark: its contestants train on the same images, and its clock counts their
steps."""

import importlib
from typing import Any

import pytest
import torch
from pages import REPO, text_of

NEEDED = ["benchmarks/benchmark.py", "configs/mnist_mlp.yaml"]
NEEDED += ["configs/cifar10_cnn.yaml", "project/data/synthetic.py"]


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    for path in NEEDED:
        text_of(path)
    monkeypatch.syspath_prepend(str(REPO / "benchmarks"))
    return importlib.import_module("benchmark")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*many workers")
def test_it_compares(
    benchmark: Any, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    benchmark.main(["--parts", "mnist", "--rounds", "2", "--steps", "50"])
    shown = capsys.readouterr().out
    for name in ("tutorial", "raw", "ours"):
        assert f"\n| {name} | " in shown


@pytest.mark.parametrize("name", ["mnist", "cifar"])
def test_all_contestants_train_on_the_same_images(benchmark: Any, name: str) -> None:
    reference = benchmark.Reference(name, 2)
    samples = benchmark.SingleImages(reference.images, reference.targets)
    theirs = torch.stack([x for x, _ in samples])
    images = reference.data.normalize(reference.images)
    torch.testing.assert_close(
        images.flatten(1).sort(0).values, theirs.flatten(1).sort(0).values
    )
