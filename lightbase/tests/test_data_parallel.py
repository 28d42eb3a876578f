"""The strategy dp on CPUs that stand in for GPUs, compared with one device; and on GPUs
where there are any."""

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

from lightbase.commands.train import parse
from lightbase.core.build import make_trainer
from lightbase.core.compat import quiet_lightning
from lightbase.core.errors import UserError
from lightbase.extras import data_parallel
from lightbase.extras.data_parallel import DataParallelStrategy

CPU = torch.device("cpu")
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def replicate_on_cpu(
    net: nn.Module, devices: Sequence[torch.device], detach: bool
) -> list[Any]:
    """In place of torch.nn.parallel.replicate, which wants GPUs: copies whose gradients
    flow back into `net`."""

    def copy(module: nn.Module) -> nn.Module:
        replica = module._replicate_for_data_parallel()
        for name, parameter in module._parameters.items():
            value = parameter if parameter is None else parameter * 1
            setattr(
                replica, name, value.detach() if value is not None and detach else value
            )
        for name, child in module._modules.items():
            replica._modules[name] = None if child is None else copy(child)
        return replica

    return [copy(net) for _ in devices]


@pytest.fixture(autouse=True)
def known_warnings() -> None:
    quiet_lightning()


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_parallel, "replicate", replicate_on_cpu)
    chunks = SimpleNamespace(
        apply=lambda devices, _, dim, tensor: tensor.chunk(len(devices), dim)
    )
    monkeypatch.setattr(scatter_gather, "Scatter", chunks)
    joined = SimpleNamespace(apply=lambda _, dim, *tensors: torch.cat(tensors, dim))
    monkeypatch.setattr(scatter_gather, "Gather", joined)


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
    sizes = {
        "image_shape": (3, 4, 4),
        "num_classes": 4,
        "num_train": 100,
        "num_test": 37,
    }
    return SyntheticImages(
        **sizes, val_fraction=0.21, batch_size=10, drop_last=False, noise=0.1
    )


def trainer(folder: Path, strategy: Any, **options: Any) -> Trainer:
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    devices = (
        strategy.parallel_devices if isinstance(strategy, DataParallelStrategy) else []
    )
    accelerator = "gpu" if devices and devices[0].type == "cuda" else "cpu"
    options = {
        "devices": 1,
        "max_epochs": 2,
        "default_root_dir": folder,
        **quiet,
        **options,
    }
    return Trainer(strategy=strategy, accelerator=accelerator, **options)


def fit(
    folder: Path, strategy: Any, model: Any = None, **options: Any
) -> tuple[Trainer, Any, SyntheticImages]:
    if model is None:
        seed_everything(1, verbose=False)
        model = Classifier(
            MLP(sizes=[48, 8, 4]), lr=0.02, optimizer_args={"momentum": 0.9}
        )
    fitted, samples = trainer(folder, strategy, **options), data()
    fitted.fit(model, samples)
    return fitted, model, samples


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"accumulate_grad_batches": 3},
    "clipping": {"gradient_clip_val": 0.05},
    "bf16": {"precision": "bf16-mixed"},
}


def compare(folder: Path, devices: Sequence[torch.device], **options: Any) -> None:
    """Fit, test, validate and predict on these devices and on the first one alone; all
    numbers must agree."""
    alone = "auto" if devices[0].type == "cpu" else DataParallelStrategy(devices[:1])
    one, plain, samples = fit(folder, alone, **options)
    several, split, _ = fit(folder, DataParallelStrategy(devices), **options)
    mixed = "precision" in options
    tolerance = {"rtol": 0.02, "atol": 5e-3} if mixed else CLOSE

    assert one.global_step == several.global_step
    torch.testing.assert_close(split.state_dict(), plain.state_dict(), **tolerance)
    for name, value in one.callback_metrics.items():
        torch.testing.assert_close(several.callback_metrics[name], value, **tolerance)
    for evaluate in (Trainer.test, Trainer.validate):
        result = evaluate(several, split, samples, verbose=False)
        expected = evaluate(one, plain, samples, verbose=False)
        assert result[0] == pytest.approx(expected[0], rel=0.02 if mixed else 1e-4)
        assert result[0].get("test/num_samples", 37) == 37
    predicted = torch.cat(several.predict(split, samples))
    torch.testing.assert_close(
        predicted, torch.cat(one.predict(plain, samples)), **tolerance
    )


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize(
    ("num_devices", "name"),
    [
        *[(2, "plain"), (3, "accumulation"), (3, "bf16")],
        *[pytest.param(n, "clipping", marks=pytest.mark.slow) for n in (1, 2, 3)],
    ],
)
def test_it_trains_as_one_device_does(tmp_path, num_devices, name):
    compare(tmp_path, [CPU] * num_devices, **OPTIONS[name])


@pytest.mark.usefixtures("stand_ins")
def test_each_batch_is_split_and_the_step_runs_once(tmp_path: Path) -> None:
    net, logged = Watched(), []
    net.register_forward_hook(lambda module, args, output: logged.append(len(output)))
    model, options = (
        Classifier(net, lr=0.02),
        {"max_epochs": 1, "num_sanity_val_steps": 0},
    )
    fitted, *_ = fit(tmp_path, DataParallelStrategy([CPU] * 3), model, **options)
    # 79 of 100 samples train, in batches of 10 and one of 9; 21 validate: 10, 10 and 1
    assert sorted(net.sizes) == sorted([4, 4, 2] * 9 + [3, 3, 3] + [1])
    assert logged == [10] * 7 + [9] + [10, 10, 1]
    assert fitted.global_step == 8


class OwnStep(Classifier):
    """Calls the network twice, and has parameters of its own beside it."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__(net, lr=0.02)
        self.temperature = nn.Parameter(torch.ones(()))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        x, y = batch
        logits = self.net(x) * self.temperature + self.net(x.flip(3))
        loss = nn.functional.cross_entropy(logits, y)
        self.track("train", loss, logits, y, temperature=self.temperature)
        return {"loss": loss}


class PlainModule(LightningModule):
    """No BaseModule: its network is only called `net`."""

    def __init__(self, net: nn.Module | None) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:
        self.log("val/mean", self.net(batch[0]).mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.02)


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("kind", [OwnStep, PlainModule])
def test_a_step_of_ones_own_trains_as_on_one_device(tmp_path, kind):
    results = []
    for strategy in ("auto", DataParallelStrategy([CPU] * 3)):
        seed_everything(1, verbose=False)
        model = kind(Watched())
        fitted, *_ = fit(tmp_path, strategy, model, max_epochs=1, log_every_n_steps=1)
        assert max(model.net.sizes) == (10 if strategy == "auto" else 4)
        results.append({**model.state_dict(), **fitted.callback_metrics})
    torch.testing.assert_close(results[1], results[0], **CLOSE)


@pytest.mark.usefixtures("stand_ins")
def test_checkpoints_are_those_of_one_device(tmp_path: Path) -> None:
    fitted, model, _ = fit(tmp_path, DataParallelStrategy([CPU, CPU]))
    fitted.save_checkpoint(tmp_path / "dp.ckpt", weights_only=False)
    alone = trainer(tmp_path, "auto", max_epochs=3)
    alone.fit(model, data(), ckpt_path=tmp_path / "dp.ckpt", weights_only=True)
    _, uninterrupted, _ = fit(tmp_path, "auto", max_epochs=3)
    torch.testing.assert_close(model.state_dict(), uninterrupted.state_dict(), **CLOSE)


def command(folder: Path) -> list[str]:
    return ["--config", TINY, "--trainer.default_root_dir", str(folder)]


def test_a_compiled_network_is_not_split_and_the_flag_takes_dp(tmp_path, monkeypatch):
    compiled = Classifier(MLP(sizes=[48, 8, 4]), lr=0.1, compile_net="eager")
    with pytest.raises(UserError, match=r"split a compiled network: leave model"):
        fit(tmp_path, DataParallelStrategy([CPU, CPU]), compiled)
    # as if there were GPUs
    args = [*command(tmp_path), "--trainer.strategy", "dp"]
    monkeypatch.setattr("lightbase.core.build.check_devices", lambda *_: None)
    strategy = make_trainer(*parse(args)[:2], logger=False).strategy
    assert isinstance(strategy, DataParallelStrategy)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "indices", [(0, 0), (0, 1)], ids=["one GPU stands in for two", "two GPUs"]
)
@pytest.mark.parametrize("options", [*OPTIONS.values(), {"precision": "16-mixed"}])
def test_gpus_train_as_one(tmp_path, options, indices):
    if torch.cuda.device_count() <= max(indices):
        pytest.skip("one GPU")
    compare(tmp_path, [torch.device("cuda", index) for index in indices], **options)
