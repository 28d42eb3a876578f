"""The strategy dp, compared with one GPU."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from example.classifier import Classifier
from example.data.synthetic import SyntheticImages
from example.models.mlp import MLP
from lightning import LightningModule, Trainer, seed_everything
from paths import TINY
from torch import Tensor, nn

from lightbase.commands.extras import register_strategies
from lightbase.commands.train import parse
from lightbase.core.build import make_trainer
from lightbase.core.compat import quiet_lightning
from lightbase.core.errors import UserError
from lightbase.extras.data_parallel import DataParallelStrategy

# one GPU stands in for three where there are not so many
GPUS = [torch.device("cuda", i % max(1, torch.cuda.device_count())) for i in range(3)]
ALONE = GPUS[:1]
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


@pytest.fixture(autouse=True)
def known_warnings() -> None:
    quiet_lightning()


class Watched(nn.Module):
    """A network that notes the sizes of the batches that its forward gets."""

    def __init__(self) -> None:
        super().__init__()
        self.net = MLP(sizes=[48, 8, 4])
        self.sizes: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.sizes.append(len(x))
        return self.net(x)


def data() -> SyntheticImages:
    """79 training samples in batches of 10 and one of 9; 21 for validation: 10, 10 and
    1."""
    sizes = {"image_shape": (3, 4, 4), "num_classes": 4, "num_train": 100}
    options = {"val_fraction": 0.21, "batch_size": 10, "drop_last": False}
    return SyntheticImages(**sizes, **options, num_test=37, noise=0.1)


def fit(
    folder: Path,
    devices: Sequence[torch.device],
    model: Any = None,
    **options: Any,
) -> tuple[Trainer, Any, SyntheticImages]:
    """Train on these devices by dp."""
    strategy = DataParallelStrategy()
    strategy.parallel_devices = devices
    accelerator = devices[0].type.replace("cuda", "gpu")
    quiet = ("logger", "enable_progress_bar", "enable_model_summary")
    given: dict[str, Any] = {"max_epochs": 2, "default_root_dir": folder}
    given |= {"devices": 1, "accelerator": accelerator, "strategy": strategy}
    trainer = Trainer(**dict.fromkeys(quiet, False) | given | options)
    if model is None:
        seed_everything(1, verbose=False)
        net = MLP(sizes=[48, 8, 4])
        model = Classifier(net, lr=0.02, optimizer_args={"momentum": 0.9})
    samples = data()
    trainer.fit(model, samples)
    return trainer, model, samples


OPTIONS: list[dict[str, Any]] = [
    {},
    {"accumulate_grad_batches": 3},
    {"gradient_clip_val": 0.05},
    {"precision": "bf16-mixed"},
    {"precision": "16-mixed"},
]


@pytest.mark.gpu
@pytest.mark.parametrize("options", OPTIONS)
def test_gpus_train_test_and_predict_as_one(tmp_path, options):
    one, plain, samples = fit(tmp_path, ALONE, **options)
    several, split, _ = fit(tmp_path, GPUS, **options)
    close, rel = CLOSE, 1e-4
    if "precision" in options:
        close, rel = {"rtol": 0.02, "atol": 5e-3}, 0.02

    assert one.global_step == several.global_step
    torch.testing.assert_close(split.state_dict(), plain.state_dict(), **close)
    (result,) = several.test(split, samples, verbose=False)
    (expected,) = one.test(plain, samples, verbose=False)
    assert result == pytest.approx(expected, rel=rel)
    assert result["test/num_samples"] == 37
    predicted, wanted = several.predict(split, samples), one.predict(plain, samples)
    torch.testing.assert_close(torch.cat(predicted), torch.cat(wanted), **close)


@pytest.mark.gpu
def test_each_batch_is_split_and_the_step_runs_once(tmp_path):
    net, logged = Watched(), []
    net.register_forward_hook(lambda module, args, output: logged.append(len(output)))
    options = {"max_epochs": 1, "num_sanity_val_steps": 0}
    fitted, *_ = fit(tmp_path, GPUS, Classifier(net, lr=0.02), **options)
    assert sorted(net.sizes) == sorted([4, 4, 2] * 9 + [3, 3, 3] + [1])
    assert logged == [10] * 7 + [9] + [10, 10, 1]
    assert fitted.global_step == 8


class OwnStep(LightningModule):
    """No BaseModule. Calls `net` twice, and has parameters of its own beside it."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.temperature = nn.Parameter(torch.ones(()))

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Any:
        x, y = batch
        logits = self.net(x) * self.temperature + self.net(x.flip(3))
        return {"loss": nn.functional.cross_entropy(logits, y)}

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:
        self.log("val/mean", self.net(batch[0]).mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.02)


@pytest.mark.gpu
def test_a_step_of_ones_own_trains_as_on_one_device(tmp_path):
    results = []
    for devices in (ALONE, GPUS):
        seed_everything(1, verbose=False)
        fitted, model, _ = fit(tmp_path, devices, OwnStep(Watched()))
        results.append({**model.state_dict(), **fitted.callback_metrics})
    torch.testing.assert_close(results[1], results[0], **CLOSE)


def test_a_compiled_network_is_not_split_and_the_flag_takes_dp(tmp_path, monkeypatch):
    compiled = Classifier(MLP(sizes=[48, 8, 4]), lr=0.1, compile_net="eager")
    with pytest.raises(UserError, match=r"split a compiled network: leave model"):
        fit(tmp_path, [torch.device("cpu")] * 2, compiled)
    args = ["--config", TINY, "--trainer.default_root_dir", str(tmp_path)]
    register_strategies()
    # as if there were GPUs
    monkeypatch.setattr("lightbase.core.build.check_devices", lambda *_: None)
    parsed = parse([*args, "--trainer.strategy", "dp"])
    strategy = make_trainer(*parsed[:2], logger=False).strategy
    assert isinstance(strategy, DataParallelStrategy)
