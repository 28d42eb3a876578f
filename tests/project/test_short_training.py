"""Your training steps learn in a short training, and a checkpoint repeats its test."""

from pathlib import Path

import pytest
import torch
from pages import PACKAGE

import lightbase
from lightbase.commands import evaluate

FLAGS = (
    "--model.optimizer Adam --model.lr 0.02 --trainer.max_epochs 3 --trainer.accelerator cpu "
    "--trainer.log_every_n_steps 10 --figures_every_n_epochs 0 --device_monitor false "
    "--trainer.default_root_dir {folder} --name short"
)


def train(folder: Path, model: str) -> dict[str, float]:
    flags = f"{model} {FLAGS}".format(folder=folder)
    result = lightbase.main(flags.split())
    best = folder / "short" / "version_0" / "checkpoints" / "best.ckpt"
    # small.Numbers is no code of yours
    flags = "--trainer.accelerator cpu --trust_checkpoint true"
    again = evaluate.main(["--ckpt_path", str(best), *flags.split()])
    assert again == {
        name: value for name, value in result.items() if name.startswith("test/")
    }
    return result


def test_the_classifier_learns(tmp_path: Path) -> None:
    pytest.importorskip("project.classifier")
    pytest.importorskip("project.data.features")
    net = "--model.net torch.nn.Linear --model.net.in_features 10 --model.net.out_features 2"
    data = "--data project.data.features.Features --data.num_samples 1000"
    result = train(tmp_path, f"--model project.classifier.Classifier {net} {data}")
    assert result["test/acc"] > 0.9  # chance is 0.5


def test_the_regressor_learns(tmp_path: Path) -> None:
    pytest.importorskip("project.regressor")
    net = "--model.net torch.nn.Linear --model.net.in_features 10 --model.net.out_features 1"
    data = "--data small.Numbers --data.batch_size 10"
    result = train(tmp_path, f"--model project.regressor.Regressor {net} {data}")
    assert result["test/mae"] < 0.8  # 1.7 without learning


@pytest.mark.parametrize("name", ["Classifier", "Regressor"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_loss_is_in_float32_or_float64(name: str, dtype: torch.dtype) -> None:
    module = pytest.importorskip(f"{PACKAGE}.{name.lower()}")
    net = torch.nn.Linear(3, 2).to(dtype)
    dtype = torch.promote_types(dtype, torch.float32)
    targets = (
        torch.tensor([0, 1]) if name == "Classifier" else torch.ones(2, 2, dtype=dtype)
    )
    model = getattr(module, name)(
        net, **({"num_classes": 2} if name == "Classifier" else {})
    )
    loss = model.training_step((torch.ones(2, 3, dtype=net.weight.dtype), targets), 0)
    assert loss.dtype == dtype
