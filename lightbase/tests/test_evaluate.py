"""evaluate.py: the numbers of the training again."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from example.classifier import Classifier
from paths import Trained, fails, script
from written import checkpoint_file

from lightbase.run.fit import NO_TEST

evaluate = script("evaluate").main


@pytest.fixture
def ckpt(trained: Trained) -> list[str]:
    """The flag that names the checkpoint of a run, which no test changes."""
    return ["--ckpt_path", str(checkpoint_file(trained()[0]))]


def best_of(root: Path, name: str = "tiny") -> list[str]:
    """As ckpt, of a run that the test has trained."""
    return ["--ckpt_path", str(checkpoint_file(root / name / "version_0"))]


def test_it_returns_the_numbers_of_the_training_from_any_folder_and_writes_nothing(
    trained, ckpt, tmp_path, monkeypatch, capsys
):
    folder, trained_metrics = trained()
    before = sorted(folder.rglob("*"))
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    evaluate(ckpt)
    *_, header, _, row, _, last = capsys.readouterr().out.splitlines()
    metrics = json.loads(last)
    assert metrics.keys() == {"test/acc", "test/loss", "test/num_samples"}
    assert metrics.items() <= trained_metrics.items()
    assert header.split() == ["metric", "value"]
    assert row.split() == ["test/acc", f"{metrics['test/acc']:.4g}"]
    assert len(str(metrics["test/loss"])) <= 12, "float32 holds no more digits"
    assert sorted(folder.rglob("*")) == before
    assert not list(tmp_path.iterdir())


def test_evaluate_takes_flags_of_data_and_trainer_only(trained, ckpt, capsys):
    _, metrics = trained()
    flags = ["--data.batch_size", "7", "--trainer.precision", "64-true"]
    again = evaluate([*ckpt, *flags])
    assert again["test/loss"] == pytest.approx(metrics["test/loss"], rel=1e-5)
    limited = evaluate([*ckpt, "--trainer.limit_test_batches", "1"])
    assert limited["test/num_samples"] == 16
    for flag, text in (
        ("--model.lr", "--model.lr"),
        ("--data.batchsize", "batch_size?"),
    ):
        command = [*ckpt, flag, "1"]
        error = fails(capsys, 2, lambda command=command: evaluate(command))
        assert text in error


class Draws(Classifier):
    """Draws random numbers in its test, as a VAE or a BootStrapper does."""

    def test_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        numbers = {"test/0": torch.rand(()), "test/1": np.random.rand()}
        self.log_dict(numbers | {"test/2": random.random()})


class Silent(Classifier):
    def test_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        pass


def test_evaluate_draws_the_random_numbers_of_the_training(train, tmp_path):
    flags = "--model test_evaluate.Draws --data small.Augmented --trainer.max_epochs 1"
    metrics = train(flags)
    again = evaluate(best_of(tmp_path))
    assert len(again) == 3
    assert again.items() <= metrics.items()


def test_a_test_that_logs_nothing_says_so(train, tmp_path, capsys):
    train("--model test_evaluate.Silent --trainer.max_epochs 1")
    assert f"\n{NO_TEST}\n" in capsys.readouterr().out
    assert fails(capsys, 1, lambda: evaluate(best_of(tmp_path))) == f"error: {NO_TEST}"
