"""Your training steps learn in a short training, and a checkpoint repeats its test."""

from pathlib import Path

import pytest

import lightbase
from lightbase.tools import evaluate

FLAGS = (
    "--model.optimizer Adam --model.lr 0.02 --trainer.max_epochs 3 --trainer.accelerator cpu "
    "--trainer.log_every_n_steps 10 --figures_every_n_epochs 0 --device_monitor false "
    "--trainer.default_root_dir {folder} --name short"
)


def train(folder: Path, model: str) -> dict[str, float]:
    flags = f"{model} {FLAGS}".format(folder=folder)
    result = lightbase.main(flags.split())
    best = folder / "short" / "version_0" / "checkpoints" / "best.ckpt"
    again = evaluate.main(["--ckpt_path", str(best), "--trainer.accelerator", "cpu"])
    assert again == {name: value for name, value in result.items() if name.startswith("test/")}
    return result


def test_the_classifier_learns(tmp_path: Path) -> None:
    pytest.importorskip("project.classifier")
    net = "--model.net torch.nn.Linear --model.net.in_features 10 --model.net.out_features 2"
    data = "--data lightbase.Features --data.num_samples 1000"
    result = train(tmp_path, f"--model project.classifier.Classifier {net} {data}")
    assert result["test/acc"] > 0.9  # chance is 0.5


def test_the_regressor_learns(tmp_path: Path) -> None:
    pytest.importorskip("project.regressor")
    net = "--model.net torch.nn.Linear --model.net.in_features 10 --model.net.out_features 1"
    data = "--data small.Numbers --data.batch_size 10"
    result = train(tmp_path, f"--model project.regressor.Regressor {net} {data}")
    assert result["test/mae"] < 0.8  # 1.7 without learning
