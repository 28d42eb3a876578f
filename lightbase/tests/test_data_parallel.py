"""The strategy dp, compared with one GPU."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from example.classifier import Classifier
from example.data.synthetic import SyntheticImages
from example.models.mlp import MLP
from lightning import Trainer, seed_everything
from paths import TINY

from lightbase.commands.train import parse, register_strategies
from lightbase.compat import quiet_lightning
from lightbase.config.errors import UserError
from lightbase.run.devices import DataParallelStrategy
from lightbase.run.fit import make_trainer

# one GPU stands in for three where there are not so many
GPUS = [torch.device("cuda", i % max(1, torch.cuda.device_count())) for i in range(3)]
DATA: dict[str, Any] = {
    # 79 training samples in batches of 10 and one of 9; 21 for validation: 10, 10, 1
    "image_shape": (3, 4, 4),
    "num_classes": 4,
    "num_train": 100,
    "val_fraction": 0.21,
    "batch_size": 10,
    "drop_last": False,
    "num_test": 37,
    "noise": 0.1,
}


@pytest.fixture(autouse=True)
def known_warnings() -> None:
    quiet_lightning()


def fit(
    folder: Path, devices: Sequence[torch.device], model: Any, **options: Any
) -> Trainer:
    """Train on these devices by dp."""
    strategy = DataParallelStrategy()
    strategy.parallel_devices = devices
    given: dict[str, Any] = {
        "max_epochs": 2,
        "default_root_dir": folder,
        "devices": 1,
        "accelerator": devices[0].type.replace("cuda", "gpu"),
        "strategy": strategy,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = Trainer(**given | options)
    trainer.fit(model, SyntheticImages(**DATA))
    return trainer


def compared(folder: Path, make: Any, **options: Any) -> list[Any]:
    """Train the same module on one GPU and by dp; return (trainer, module) of both."""
    both = []
    for devices in (GPUS[:1], GPUS):
        seed_everything(1, verbose=False)
        model = make()
        both.append((fit(folder, devices, model, **options), model))
    return both


OPTIONS: list[dict[str, Any]] = [
    {"accumulate_grad_batches": 3},
    {"gradient_clip_val": 0.05},
    {"precision": "16-mixed"},
]


@pytest.mark.gpu
@pytest.mark.parametrize("options", OPTIONS)
def test_gpus_train_test_and_predict_as_one(tmp_path, options):
    def make() -> Classifier:
        net = MLP(sizes=[48, 8, 4])
        return Classifier(net, lr=0.02, optimizer_args={"momentum": 0.9})

    (one, plain), (several, split) = compared(tmp_path, make, **options)
    close = {"rtol": 1e-4, "atol": 1e-5}
    if "precision" in options:
        close = {"rtol": 0.02, "atol": 5e-3}
    assert one.global_step == several.global_step
    torch.testing.assert_close(split.state_dict(), plain.state_dict(), **close)
    data = SyntheticImages(**DATA)
    (result,) = several.test(split, data, verbose=False)
    (expected,) = one.test(plain, data, verbose=False)
    assert result == pytest.approx(expected, rel=close["rtol"])
    assert result["test/num_samples"] == 37
    predicted, wanted = several.predict(split, data), one.predict(plain, data)
    torch.testing.assert_close(torch.cat(predicted), torch.cat(wanted), **close)


def test_a_compiled_network_is_not_split_and_the_flag_takes_dp(tmp_path, monkeypatch):
    compiled = Classifier(MLP(sizes=[48, 8, 4]), lr=0.1, compile_net="eager")
    with pytest.raises(UserError, match=r"split a compiled network: leave model"):
        fit(tmp_path, [torch.device("cpu")] * 2, compiled)
    args = ["--config", TINY, "--trainer.default_root_dir", str(tmp_path)]
    register_strategies()
    # as if there were GPUs
    monkeypatch.setattr("lightbase.run.fit.check_devices", lambda *_: None)
    parsed = parse([*args, "--trainer.strategy", "dp"])
    strategy = make_trainer(parsed[0], [], logger=False).strategy
    assert isinstance(strategy, DataParallelStrategy)
