"""The strategy dp on CPUs that stand in for GPUs, compared with one device; and on GPUs where there are any."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import Trainer, seed_everything
from torch import Tensor, nn

from project.base.errors import UserError
from project.callbacks.step_timer import StepTimer, shares
from project.classifier import Classifier
from project.data.synthetic import SyntheticImages
from project.engine import data_parallel
from project.engine.data_parallel import DataParallelStrategy
from project.engine.quiet import quiet_lightning
from project.engine.run import main
from project.models.mlp import MLP

CPU = torch.device("cpu")


def replicate_on_cpu(net: nn.Module, devices: Sequence[torch.device], detach: bool = False) -> list[nn.Module]:
    """In place of torch.nn.parallel.replicate, which wants GPUs: copies whose gradients flow back into `net`."""

    def copy(module: nn.Module) -> nn.Module:
        replica = module._replicate_for_data_parallel()
        for name, parameter in module._parameters.items():
            setattr(replica, name, parameter if parameter is None else parameter.detach() if detach else parameter * 1)
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
    """A network that notes the sizes of the batches that its forward gets, and the context they come in."""

    def __init__(self) -> None:
        super().__init__()
        self.net = MLP(sizes=[48, 8, 4])
        self.sizes: list[int] = []
        self.contexts: list[tuple[bool, bool, bool, torch.dtype]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.sizes.append(len(x))
        context = (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled(x.device.type))
        self.contexts.append((*context, torch.get_autocast_dtype(x.device.type)))
        return self.net(x)


def data(**options: Any) -> SyntheticImages:
    sizes = {"image_shape": (3, 4, 4), "num_classes": 4, "num_train": 100, "num_test": 37, "val_fraction": 0.21}
    return SyntheticImages(**{**sizes, "noise": 0.1, "batch_size": 10, "drop_last": False, **options})


def trainer(folder: Path, strategy: Any, **options: Any) -> Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    accelerator = "gpu" if getattr(strategy, "parallel_devices", [CPU])[0].type == "cuda" else "cpu"
    options = {"accelerator": accelerator, "devices": 1, "max_epochs": 2, **quiet, **options}
    return Trainer(strategy=strategy, default_root_dir=folder, use_distributed_sampler=False, **options)


def fit(folder: Path, strategy: Any, net: nn.Module | None = None, **options: Any) -> tuple[Trainer, Classifier, Any]:
    seed_everything(1, verbose=False)
    model = Classifier(MLP(sizes=[48, 8, 4]) if net is None else net, lr=0.02, optimizer_args={"momentum": 0.9})
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
    """Fit, test, validate and predict on these devices and on the first one alone; all numbers must agree."""
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
    for result, expected in (
        (several.test(split, samples, verbose=False), one.test(plain, samples, verbose=False)),
        (several.validate(split, samples, verbose=False), one.validate(plain, samples, verbose=False)),
    ):
        assert result[0] == pytest.approx(expected[0], rel=0.02 if mixed else 1e-4)
        assert result[0].get("test/num_samples", 37) == 37
    predicted, wanted = (torch.cat(t.predict(m, samples)) for t, m in ((several, split), (one, plain)))
    assert len(predicted) == 37
    torch.testing.assert_close(predicted, wanted, **tolerance)


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("num_devices", [1, 2, 3])
@pytest.mark.parametrize("options", list(OPTIONS.values()), ids=list(OPTIONS))
def test_it_trains_as_one_device_does(tmp_path: Path, num_devices: int, options: dict[str, Any]) -> None:
    compare(tmp_path, [CPU] * num_devices, **options)


@pytest.mark.usefixtures("stand_ins")
def test_each_batch_is_split_and_the_step_runs_once(tmp_path: Path) -> None:
    net = Watched()
    logged: list[int] = []
    net.register_forward_hook(lambda module, args, output: logged.append(len(output)))
    fitted, _, _ = fit(tmp_path, DataParallelStrategy([CPU] * 3), net, max_epochs=1, num_sanity_val_steps=0)
    # 79 of 100 samples train, in batches of 10: 7 times 4 + 3 + 3, then 3 + 3 + 3; 21 validate: 4 + 3 + 3 twice, then 1
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
    strategy._lightning_module = Classifier(net)
    with strategy.split_forward():
        with torch.autocast("cpu", dtype=dtype):
            assert net(x).dtype == dtype
        with torch.no_grad():
            assert not net(x).requires_grad
        with torch.inference_mode():
            assert net(x).is_inference()
        assert net(x).requires_grad
    half, off, default = (True, False, True, dtype), (False, False, False), torch.get_autocast_dtype("cpu")
    assert net.contexts[:2] == [half] * 2
    assert net.contexts[2:4] == [(*off, default)] * 2
    assert net.contexts[4:6] == [(False, True, False, default)] * 2
    assert net.contexts[6:] == [(True, False, False, default)] * 2


@pytest.mark.usefixtures("stand_ins")
def test_arguments_and_outputs_of_several_tensors() -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor, scale: float, *, shift: Tensor) -> dict[str, Any]:
            return {"sum": x * scale + shift, "both": (x, [shift]), "scale": scale}

    strategy = DataParallelStrategy([CPU, CPU])
    strategy._lightning_module = Classifier(Net())
    x, shift = torch.arange(5.0), torch.arange(5.0) * 10
    with strategy.split_forward():
        output = strategy._lightning_module.net(x, 2.0, shift=shift)
    assert torch.equal(output["sum"], x * 2 + shift)
    assert torch.equal(output["both"][0], x)
    assert torch.equal(output["both"][1][0], shift)
    assert output["scale"] == 2.0


@pytest.mark.usefixtures("stand_ins")
def test_an_error_in_a_replica_is_the_users_own_and_leaves_the_network_as_it_was() -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x[0] == 3:
                raise ValueError("not 3")
            return x

    strategy = DataParallelStrategy([CPU, CPU])
    net = Net()
    strategy._lightning_module = Classifier(net)
    with pytest.raises(ValueError, match="not 3"), strategy.split_forward():
        net(torch.arange(6))
    assert "forward" not in vars(net)


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


def test_what_dp_cannot_do_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--trainer.strategy", "dp", "--trainer.accelerator", "cpu", "--trainer.default_root_dir", str(tmp_path)])
    assert caught.value.code == 1
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    assert "dp splits each batch over GPUs" in error
    with pytest.raises(UserError, match="over GPUs"):  # from Python
        fit(tmp_path, "dp")
    net = MLP(sizes=[48, 8, 4])
    net.compile(backend="eager")
    with pytest.raises(UserError, match="compiled"):
        fit(tmp_path, DataParallelStrategy([CPU, CPU]), net)
    with pytest.raises(UserError, match="compiled"):
        fit(tmp_path, DataParallelStrategy([CPU, CPU]), torch.compile(MLP(sizes=[48, 8, 4]), backend="eager"))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    with pytest.raises(UserError, match="without torchrun"):
        fit(tmp_path, DataParallelStrategy([CPU, CPU]))


GPU = torch.device("cuda", 0)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [*OPTIONS.values(), {"precision": "16-mixed"}], ids=[*OPTIONS, "fp16"])
def test_one_gpu_stands_in_for_two(tmp_path: Path, options: dict[str, Any]) -> None:
    compare(tmp_path, [GPU, GPU], **options)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [*OPTIONS.values(), {"precision": "16-mixed"}], ids=[*OPTIONS, "fp16"])
def test_two_gpus_train_as_one(tmp_path: Path, options: dict[str, Any]) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    compare(tmp_path, [GPU, torch.device("cuda", 1)], **options)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_replicas_on_a_gpu_work_in_the_steps_precision(dtype: torch.dtype) -> None:
    strategy = DataParallelStrategy([GPU, GPU])
    net = Watched().to(GPU)
    strategy._lightning_module = Classifier(net)
    with strategy.split_forward(), torch.autocast("cuda", dtype=dtype):
        assert net(torch.zeros(4, 3, 4, 4, device=GPU)).dtype == dtype
    assert {context[-1] for context in net.contexts} == {dtype}


@pytest.mark.gpu
def test_batchnorms_running_mean_is_that_of_the_first_part(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(48), nn.Linear(48, 4))
    fitted, _, _ = fit(tmp_path, DataParallelStrategy([GPU, GPU]), net)
    assert int(net[1].num_batches_tracked) == fitted.global_step


@pytest.mark.gpu
def test_dp_by_flag_on_one_gpu_is_a_plain_run(tmp_path: Path) -> None:
    config = str(Path(__file__).with_name("tiny.yaml"))
    args = ["--config", config, "--trainer.default_root_dir", str(tmp_path), "--trainer.accelerator", "gpu"]
    plain = main([*args, "--trainer.devices", "1"])
    split = main([*args, "--trainer.devices", "1", "--trainer.strategy", "dp"])
    for name in ("test/acc", "test/loss", "steps"):
        assert plain[name] == split[name]


class Slow(MLP):
    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.003)
        return super().forward(x)


@pytest.mark.usefixtures("stand_ins")
def test_the_step_timer_finds_a_slow_network_on_several_devices(tmp_path: Path) -> None:
    timer = StepTimer(every_n_epochs=0)
    fit(tmp_path, DataParallelStrategy([CPU, CPU]), Slow(sizes=[48, 8, 4]), callbacks=[timer])
    found = shares(timer.sum())
    assert max(found, key=lambda phase: found[phase]) == "forward"
