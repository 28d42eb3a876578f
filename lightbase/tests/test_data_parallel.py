"""The strategy dp on CPUs that stand in for GPUs, compared with one device; and on GPUs
where there are any."""

import copy
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from example.classifier import Classifier
from example.data.synthetic import SyntheticImages
from example.models.mlp import MLP
from lightning import LightningModule, Trainer, seed_everything
from paths import TINY
from torch import Tensor, nn
from torch.nn.parallel import scatter_gather

from lightbase.commands.extras import register_strategies
from lightbase.commands.train import parse
from lightbase.core.build import make_trainer
from lightbase.core.compat import quiet_lightning
from lightbase.core.errors import UserError
from lightbase.extras import data_parallel
from lightbase.extras.data_parallel import DataParallelStrategy

CPU = torch.device("cpu")
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


@pytest.fixture(autouse=True)
def known_warnings() -> None:
    quiet_lightning()


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of what torch does on GPUs: copies that share their parameters."""

    def replicate(net: nn.Module, devices: Sequence[Any], detach: bool) -> list[Any]:
        return [copy.copy(net) for _ in devices]

    monkeypatch.setattr(data_parallel, "replicate", replicate)
    scatter = SimpleNamespace(
        apply=lambda devices, _, dim, x: x.chunk(len(devices), dim)
    )
    gather = SimpleNamespace(apply=lambda _, dim, *parts: torch.cat(parts, dim))
    monkeypatch.setattr(scatter_gather, "Scatter", scatter)
    monkeypatch.setattr(scatter_gather, "Gather", gather)


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
    checkpoint: Path | None = None,
    **options: Any,
) -> tuple[Trainer, Any, SyntheticImages]:
    """Train on these devices by dp, or without devices on a CPU."""
    strategy: Any = "auto"
    accelerator = "cpu"
    if devices:
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
    trainer.fit(model, samples, ckpt_path=checkpoint, weights_only=True)
    return trainer, model, samples


OPTIONS: list[dict[str, Any]] = [
    {"accumulate_grad_batches": 3},
    {"gradient_clip_val": 0.05},
    {"precision": "bf16-mixed"},
]


def compare(folder: Path, devices: Sequence[torch.device], **options: Any) -> None:
    """Fit, test and predict on these devices and on the first one alone; all
    numbers must agree."""
    alone = [device for device in devices[:1] if device.type == "cuda"]
    one, plain, samples = fit(folder, alone, **options)
    several, split, _ = fit(folder, devices, **options)
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


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("options", OPTIONS)
def test_it_trains_as_one_device_does(tmp_path, options):
    compare(tmp_path, [CPU] * 3, **options)


@pytest.mark.usefixtures("stand_ins")
def test_each_batch_is_split_and_the_step_runs_once(tmp_path):
    net, logged = Watched(), []
    net.register_forward_hook(lambda module, args, output: logged.append(len(output)))
    options = {"max_epochs": 1, "num_sanity_val_steps": 0}
    fitted, *_ = fit(tmp_path, [CPU] * 3, Classifier(net, lr=0.02), **options)
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


@pytest.mark.usefixtures("stand_ins")
def test_a_step_of_ones_own_trains_as_on_one_device(tmp_path):
    results = []
    for devices in ([], [CPU] * 3):
        seed_everything(1, verbose=False)
        fitted, model, _ = fit(tmp_path, devices, OwnStep(Watched()))
        results.append({**model.state_dict(), **fitted.callback_metrics})
    torch.testing.assert_close(results[1], results[0], **CLOSE)


@pytest.mark.usefixtures("stand_ins")
def test_checkpoints_are_those_of_one_device(tmp_path):
    fitted, model, _ = fit(tmp_path, [CPU, CPU])
    fitted.save_checkpoint(tmp_path / "dp.ckpt", weights_only=False)
    fit(tmp_path, [], model, tmp_path / "dp.ckpt", max_epochs=3)
    _, uninterrupted, _ = fit(tmp_path, [], max_epochs=3)
    torch.testing.assert_close(model.state_dict(), uninterrupted.state_dict(), **CLOSE)


def test_a_compiled_network_is_not_split_and_the_flag_takes_dp(tmp_path, monkeypatch):
    compiled = Classifier(MLP(sizes=[48, 8, 4]), lr=0.1, compile_net="eager")
    with pytest.raises(UserError, match=r"split a compiled network: leave model"):
        fit(tmp_path, [CPU, CPU], compiled)
    args = ["--config", TINY, "--trainer.default_root_dir", str(tmp_path)]
    register_strategies()
    # as if there were GPUs
    monkeypatch.setattr("lightbase.core.build.check_devices", lambda *_: None)
    parsed = parse([*args, "--trainer.strategy", "dp"])
    strategy = make_trainer(*parsed[:2], logger=False).strategy
    assert isinstance(strategy, DataParallelStrategy)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, *OPTIONS, {"precision": "16-mixed"}])
def test_gpus_train_as_one(tmp_path, options):
    """One GPU stands in for two where there is only one."""
    last = torch.cuda.device_count() - 1
    compare(tmp_path, [torch.device("cuda", index) for index in (0, last)], **options)
