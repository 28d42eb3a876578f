"""The strategy dp on CPUs that stand in for GPUs, compared with one device; and on GPUs where there
are any."""

import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from example.classifier import Classifier
from example.data.synthetic import SyntheticImages
from example.models.mlp import MLP
from lightning import LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies import StrategyRegistry
from paths import TINY
from torch import Tensor, nn

from lightbase.cli.command_line import CommandLine
from lightbase.cli.training_cli import TrainingCLI
from lightbase.compat import quiet_lightning
from lightbase.devices import data_parallel
from lightbase.devices.data_parallel import DataParallelStrategy
from lightbase.errors import UserError
from lightbase.run.train import main

CPU = torch.device("cpu")


def replicate_on_cpu(
    net: nn.Module, devices: Sequence[torch.device], detach: bool = False
) -> list[nn.Module]:
    """In place of torch.nn.parallel.replicate, which wants GPUs: copies whose gradients flow back
    into `net`, in the order of memory that its broadcast leaves."""

    def copy(module: nn.Module) -> nn.Module:
        replica = module._replicate_for_data_parallel()
        for name, parameter in module._parameters.items():
            flat = parameter if parameter is None else (parameter * 1).contiguous()
            setattr(replica, name, flat.detach() if flat is not None and detach else flat)
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


class Watched(nn.Module):
    """A network that notes the sizes of the batches that its forward gets, and the context they
    come in."""

    def __init__(self) -> None:
        super().__init__()
        self.net = MLP(sizes=[48, 8, 4])
        self.sizes: list[int] = []
        self.contexts: list[tuple[bool, bool, bool, torch.dtype]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.sizes.append(len(x))
        context = (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled(x.device.type),
        )
        self.contexts.append((*context, torch.get_autocast_dtype(x.device.type)))
        return self.net(x)


def data(**options: Any) -> SyntheticImages:
    sizes = {"image_shape": (3, 4, 4), "num_classes": 4, "num_train": 100, "num_test": 37}
    batches = {"val_fraction": 0.21, "batch_size": 10, "drop_last": False}
    return SyntheticImages(**{**sizes, **batches, "noise": 0.1, **options})


def trainer(folder: Path, strategy: Any, **options: Any) -> Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    devices = strategy.parallel_devices if isinstance(strategy, DataParallelStrategy) else []
    is_on_gpu = bool(devices) and devices[0].type == "cuda"
    options = {"devices": 1, "max_epochs": 2, **quiet, **options}
    accelerator = "gpu" if is_on_gpu else "cpu"
    options |= {"default_root_dir": folder, "use_distributed_sampler": False}
    return Trainer(strategy=strategy, accelerator=accelerator, **options)


def fit(
    folder: Path, strategy: Any, net: nn.Module | None = None, **options: Any
) -> tuple[Trainer, Classifier, Any]:
    seed_everything(1, verbose=False)
    model = Classifier(
        MLP(sizes=[48, 8, 4]) if net is None else net, lr=0.02, optimizer_args={"momentum": 0.9}
    )
    fitted = trainer(folder, strategy, **options)
    samples = data()
    fitted.fit(model, samples)
    return fitted, model, samples


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"accumulate_grad_batches": 3},
    "clipping": {"gradient_clip_val": 0.05},
    "bf16": {"precision": "bf16-mixed"},
}


def compare(folder: Path, devices: Sequence[torch.device], **options: Any) -> None:
    """Fit, test, validate and predict on these devices and on the first one alone; all numbers must
    agree."""
    alone = "auto" if devices[0].type == "cpu" else DataParallelStrategy(devices[:1])
    one, plain, samples = fit(folder, alone, **options)
    several, split, _ = fit(folder, DataParallelStrategy(devices), **options)
    mixed = "precision" in options
    tolerance = {"rtol": 0.02, "atol": 5e-3} if mixed else {"rtol": 1e-4, "atol": 1e-5}

    assert one.global_step == several.global_step
    assert plain.state_dict().keys() == split.state_dict().keys()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(split.state_dict()[name], value, **tolerance)
    for name, value in one.callback_metrics.items():
        torch.testing.assert_close(several.callback_metrics[name], value, **tolerance)
    for evaluate in (Trainer.test, Trainer.validate):
        result = evaluate(several, split, samples, verbose=False)
        expected = evaluate(one, plain, samples, verbose=False)
        assert result[0] == pytest.approx(expected[0], rel=0.02 if mixed else 1e-4)
        assert result[0].get("test/num_samples", 37) == 37
    predicted, wanted = (
        torch.cat(t.predict(m, samples)) for t, m in ((several, split), (one, plain))
    )
    assert len(predicted) == 37
    torch.testing.assert_close(predicted, wanted, **tolerance)


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("num_devices", [pytest.param(1, marks=pytest.mark.slow), 2, 3])
@pytest.mark.parametrize("options", list(OPTIONS.values()), ids=list(OPTIONS))
def test_it_trains_as_one_device_does(tmp_path, num_devices, options):
    compare(tmp_path, [CPU] * num_devices, **options)


@pytest.mark.usefixtures("stand_ins")
def test_each_batch_is_split_and_the_step_runs_once(tmp_path: Path) -> None:
    net = Watched()
    logged: list[int] = []
    net.register_forward_hook(lambda module, args, output: logged.append(len(output)))
    fitted, _, _ = fit(
        tmp_path, DataParallelStrategy([CPU] * 3), net, max_epochs=1, num_sanity_val_steps=0
    )
    # 79 of 100 samples train, in batches of 10: 7 times 4 + 3 + 3, then 3 + 3 + 3; 21 validate: 4 +
    # 3 + 3 twice, then 1
    assert sorted(net.sizes) == sorted([4, 3, 3] * 7 + [3, 3, 3] + [4, 3, 3] * 2 + [1])
    assert logged == [10] * 7 + [9] + [10, 10, 1]
    assert fitted.global_step == 8
    assert "forward" not in vars(net)


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_replicas_work_in_the_context_of_the_step(dtype: torch.dtype) -> None:
    strategy = DataParallelStrategy([CPU, CPU])
    x = torch.zeros(4, 3, 4, 4)
    net = Watched()
    strategy.connect(Classifier(net))
    with strategy.split_forward():
        with torch.autocast("cpu", dtype=dtype):
            assert net(x).dtype == dtype
        with torch.no_grad():
            assert not net(x).requires_grad
        with torch.inference_mode():
            assert net(x).is_inference()
        assert net(x).requires_grad
    default = torch.get_autocast_dtype("cpu")
    assert net.contexts[:2] == [(True, False, True, dtype)] * 2
    assert net.contexts[2:4] == [(False, False, False, default)] * 2
    assert net.contexts[4:6] == [(False, True, False, default)] * 2
    assert net.contexts[6:] == [(True, False, False, default)] * 2


class WatchedConvolution(nn.Conv2d):
    """Notes whether its weights are in channels_last order."""

    def __init__(self) -> None:
        super().__init__(3, 4, 3, bias=False)
        self.are_channels_last: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        self.are_channels_last.append(self.weight.is_contiguous(memory_format=torch.channels_last))
        return super().forward(x).mean((2, 3))


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("channels_last", [True, False])
def test_the_replicas_keep_the_order_of_the_weights_in_memory(tmp_path, channels_last):
    found = []
    for strategy in ("auto", DataParallelStrategy([CPU, CPU])):
        seed_everything(1, verbose=False)
        model = Classifier(
            convolution := WatchedConvolution(), lr=0.02, channels_last=channels_last
        )
        trainer(tmp_path, strategy, max_epochs=1).fit(model, data())
        assert set(convolution.are_channels_last) == {channels_last}
        found.append(convolution.weight)
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)


def split(net: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """What a network returns from two devices."""
    strategy = DataParallelStrategy([CPU, CPU])
    strategy.connect(Classifier(net))
    with strategy.split_forward():
        return net(*args, **kwargs)


@pytest.mark.usefixtures("stand_ins")
def test_tensors_in_arguments_and_outputs_are_split_and_joined() -> None:
    class Net(nn.Module):
        def forward(self, batch: dict[str, Any], scale: float, *, shift: Tensor) -> dict[str, Any]:
            x = batch["x"]
            assert len(x) <= 3
            total = x * scale + batch["more"][0] * batch["number"] + shift
            return {"sum": total, "both": (x, [shift]), "scale": scale}

    x, shift = torch.arange(5.0), torch.arange(5.0) * 10
    batch = {"number": torch.tensor(3.0), "x": x, "more": [x], "name": "a"}
    output = split(Net(), batch, 2.0, shift=shift)
    assert torch.equal(output["sum"], x * 5 + shift)
    assert torch.equal(output["both"][0], x)
    assert torch.equal(output["both"][1][0], shift)
    assert output["scale"] == 2.0
    with pytest.raises(UserError, match="got none"):
        split(Net(), {"number": torch.tensor(2.0)}, 2.0, shift=torch.tensor(1.0))


@pytest.mark.usefixtures("stand_ins")
def test_an_error_in_a_replica_is_the_users_own_and_leaves_the_network_as_it_was() -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x[0] == 3:
                raise ValueError("not 3")
            return x

    net = Net()
    with pytest.raises(ValueError, match="not 3"):
        split(net, torch.arange(6))
    assert "forward" not in vars(net)


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
    found = []
    for strategy in ("auto", DataParallelStrategy([CPU] * 3)):
        seed_everything(1, verbose=False)
        net = Watched()
        model = kind(net)
        fitted = trainer(tmp_path, strategy, max_epochs=1, log_every_n_steps=1)
        fitted.fit(model, data())
        assert max(net.sizes) == (10 if strategy == "auto" else 4)
        found.append({**model.state_dict(), **fitted.callback_metrics})
    assert found[0].keys() == found[1].keys()
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-4, atol=1e-5)


@pytest.fixture
def stand_in_strategy(stand_ins: None) -> Iterator[str]:
    name = "dp_on_cpu"
    StrategyRegistry.register(name, DataParallelStrategy, parallel_devices=[CPU, CPU])
    yield name
    StrategyRegistry.remove(name)


def test_several_steps_in_one_call_become_single_ones(tmp_path, capsys, stand_in_strategy):
    args = [*command(tmp_path), "--trainer.strategy", stand_in_strategy]
    single = main(args)
    assert "One step at a time" not in capsys.readouterr().out
    several = main([*args, "--steps_per_execution", "4"])
    line = "One step at a time: --steps_per_execution 4 does not go with"
    assert capsys.readouterr().out.count(line) == 1
    assert several == {**single, "train_seconds": several["train_seconds"]}


@pytest.mark.usefixtures("stand_ins")
def test_checkpoints_are_those_of_one_device(tmp_path: Path) -> None:
    fitted, _, _ = fit(tmp_path, DataParallelStrategy([CPU, CPU]))
    fitted.save_checkpoint(tmp_path / "dp.ckpt", weights_only=False)
    seed_everything(1, verbose=False)
    alone = trainer(tmp_path, "auto", max_epochs=3)
    resumed = Classifier(MLP(sizes=[48, 8, 4]), lr=0.02, optimizer_args={"momentum": 0.9})
    alone.fit(resumed, data(), ckpt_path=tmp_path / "dp.ckpt", weights_only=True)
    _, uninterrupted, _ = fit(tmp_path, "auto", max_epochs=3)
    for name, value in uninterrupted.state_dict().items():
        torch.testing.assert_close(resumed.state_dict()[name], value, rtol=1e-4, atol=1e-5)


def test_what_dp_cannot_do_is_refused(tmp_path, monkeypatch, capsys):
    with pytest.raises(SystemExit) as caught:
        main([*command(tmp_path), "--trainer.strategy", "dp"])
    assert caught.value.code == 1
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    assert "dp is one process with several GPUs" in error
    two = functools.partial(DataParallelStrategy, [CPU, CPU])
    with pytest.raises(AttributeError, match="not an nn"):
        trainer(tmp_path, two()).fit(PlainModule(None), data())
    net = MLP(sizes=[48, 8, 4])
    net.compile(backend="eager")
    for compiled in (net, torch.compile(MLP(sizes=[48, 8, 4]), backend="eager")):
        with pytest.raises(UserError, match="compiled"):
            fit(tmp_path, two(), compiled)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    with pytest.raises(UserError, match="with torchrun or on CPUs use ddp"):
        fit(tmp_path, two())


def command(folder: Path) -> list[str]:
    return ["--config", TINY, "--trainer.default_root_dir", str(folder)]


def test_the_flag_makes_the_strategy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "lightbase.cli.training_cli.check_devices", lambda *_: None
    )  # there are no GPUs
    line = CommandLine(["--config", TINY, "--trainer.strategy", "dp"])
    cli = TrainingCLI(line.parser_args)
    assert isinstance(cli.make_trainer(logger=False).strategy, DataParallelStrategy)


GPU = torch.device("cuda", 0)


@pytest.mark.gpu
@pytest.mark.parametrize("indices", [(0, 0), (0, 1)], ids=["one GPU stands in for two", "two GPUs"])
@pytest.mark.parametrize(
    "options", [*OPTIONS.values(), {"precision": "16-mixed"}], ids=[*OPTIONS, "fp16"]
)
def test_gpus_train_as_one(tmp_path, options, indices):
    if torch.cuda.device_count() <= max(indices):
        pytest.skip("one GPU")
    compare(tmp_path, [torch.device("cuda", index) for index in indices], **options)


@pytest.mark.gpu
def test_batchnorms_running_mean_is_that_of_the_first_part(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(48), nn.Linear(48, 4))
    fitted, _, _ = fit(tmp_path, DataParallelStrategy([GPU, GPU]), net)
    assert int(net[1].num_batches_tracked) == fitted.global_step


@pytest.mark.gpu
def test_dp_by_flag_on_one_gpu_is_a_plain_run(tmp_path: Path) -> None:
    args = [*command(tmp_path), "--trainer.accelerator", "gpu"]
    plain = main([*args, "--trainer.devices", "1"])
    split = main([*args, "--trainer.devices", "1", "--trainer.strategy", "dp"])
    for name in ("test/acc", "test/loss", "steps"):
        assert plain[name] == split[name]
