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
    metrics = json.loads(capsys.readouterr().out.splitlines()[-1])
    constant = metrics.pop("test/acc_largest_class")
    assert metrics.keys() == {"test/acc", "test/loss", "test/num_samples"}
    assert constant == trained_metrics["test/acc_largest_class"]
    assert metrics.items() <= trained_metrics.items()
    assert sorted(folder.rglob("*")) == before
    assert not list(tmp_path.iterdir())


def test_evaluate_takes_flags_of_data_and_trainer_only(trained, ckpt, capsys):
    _, metrics = trained()
    flags = ["--data.batch_size", "7", "--trainer.precision", "64-true"]
    again = evaluate([*ckpt, *flags])
    assert again["test/loss"] == pytest.approx(metrics["test/loss"], rel=1e-5)
    error = fails(capsys, 2, lambda: evaluate([*ckpt, "--model.lr", "1"]))
    assert "--model.lr" in error


class Draws(Classifier):
    """Draws random numbers in its test, as a VAE or a BootStrapper does."""

    def test_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        numbers = {"test/0": torch.rand(()), "test/1": np.random.rand()}
        self.log_dict(numbers | {"test/2": random.random()})


def test_evaluate_draws_the_random_numbers_of_the_training(train, tmp_path):
    flags = "--model test_evaluate.Draws --data small.Augmented --trainer.max_epochs 1"
    metrics = train(flags)
    again = evaluate(best_of(tmp_path))
    assert len(again) == 3
    assert again.items() <= metrics.items()
