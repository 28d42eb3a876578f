"""The benchmark: its contestants train on the same images, and its clock counts their
steps."""

import importlib

import pytest
import torch
from pages import REPO, text_of


@pytest.fixture
def benchmark(monkeypatch):
    for name in ("configs/mnist_mlp.yaml", "project/data/synthetic.py"):
        text_of(name)
    monkeypatch.syspath_prepend(str(REPO / "benchmarks"))
    return importlib.import_module("benchmark")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*many workers")
def test_it_compares(benchmark, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    benchmark.main(["--parts", "mnist", "--rounds", "2", "--steps", "50"])
    shown = capsys.readouterr().out
    for name in ("tutorial", "plain Lightning", "raw", "ours"):
        assert f"\n| {name} | " in shown


def test_all_contestants_train_on_the_same_images(benchmark):
    _, _, data = benchmark.load("mnist", 2, "logs")
    images, targets = data.load("train")
    theirs = torch.stack([x for x, _ in benchmark.SingleImages(images, targets)])
    torch.testing.assert_close(theirs, data.normalize(images))
