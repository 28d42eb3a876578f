"""Your training steps learn in a short training, and a checkpoint repeats its test."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lightbase
from lightbase.commands.script import run_command

# your step may call self.log, which warns without a Trainer
pytestmark = pytest.mark.filterwarnings("ignore:You are trying to .self.log")
FLAGS = (
    "--model.optimizer Adam --model.lr 0.02 --trainer.max_epochs 3 "
    "--trainer.accelerator cpu --trainer.log_every_n_steps 10 "
    "--figures_every_n_epochs 0 --device_monitor false --name short"
)


def train(folder: Path, flags: str) -> dict[str, float]:
    """Return the result of a training in `folder` whose checkpoint gives it again."""
    root = ["--trainer.default_root_dir", str(folder)]
    result = lightbase.main([*flags.split(), *FLAGS.split(), *root])
    best = folder / "short" / "version_0" / "checkpoints" / "best.ckpt"
    # samples.py is not in your package
    flags = "--trainer.accelerator cpu --trust_checkpoint true"
    words = ["--ckpt_path", str(best), *flags.split()]
    again = run_command("commands.evaluate", words)
    tested = {name: result[name] for name in result if name.startswith("test/")}
    assert again == tested
    return result


@pytest.mark.usefixtures("classifier")
def test_the_classifier_learns(tmp_path: Path) -> None:
    flags = "--model project.classifier.Classifier --data samples.Points"
    flags += " --model.net torch.nn.Linear --model.net.in_features 10"
    flags += " --model.net.out_features 2 --model.criterion torch.nn.CrossEntropyLoss"
    result = train(tmp_path, flags)
    assert result["test/acc"] > 0.9  # chance is 0.5


@pytest.mark.usefixtures("regressor")
def test_the_regressor_learns(tmp_path: Path) -> None:
    flags = "--model project.regressor.Regressor --data samples.Numbers"
    flags += " --model.net torch.nn.Linear --model.net.in_features 10"
    flags += " --model.net.out_features 1 --data.batch_size 10"
    result = train(tmp_path, flags)
    assert result["test/mae"] < 0.8  # 1.7 without learning


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_loss_is_in_float32_or_float64(
    dtype: torch.dtype, classifier: Any, regressor: Any
) -> None:
    wide_dtype = torch.promote_types(dtype, torch.float32)
    inputs = torch.ones(2, 3, dtype=dtype)
    net = nn.Linear(3, 2, dtype=dtype)
    model = classifier(net, nn.CrossEntropyLoss(), num_classes=2)
    loss = model.training_step((inputs, torch.tensor([0, 1])), 0)
    assert loss.dtype == wide_dtype
    targets = torch.ones(2, 2, dtype=wide_dtype)
    assert regressor(net).training_step((inputs, targets), 0).dtype == wide_dtype
