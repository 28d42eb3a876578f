"""Device flags against pretended GPUs."""

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from example.classifier import Classifier
from example.data.synthetic import SyntheticImages
from example.models.mlp import MLP
from lightning import Trainer
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from torch import Tensor

from lightbase.devices import devices
from lightbase.devices.devices import check_devices
from lightbase.errors import UserError
from lightbase.run import checks

NO_GPU = "accelerator gpu: no GPU was found.*use --trainer.accelerator cpu or auto"


@pytest.mark.parametrize(
    ("num_found", "accelerator", "asked", "message"),
    [
        (0, "auto", "auto", None),
        (0, "cpu", 1, None),
        (0, "tpu", 8, None),
        (2, "gpu", [1], None),
        (2, "gpu", "0,1", None),
        (2, "cuda", -1, None),
        (2, "cpu", 4, None),
        (0, "gpu", "auto", NO_GPU),
        (1, "gpu", 2, "devices 2: GPUs found: 1; give a number from 1 to 1"),
        (2, "auto", [0, 2], "GPUs found: 2; .* or indices from 0 to 1"),
        (2, "gpu", "two", "'two'"),
    ],
)
def test_only_gpus_that_are_there_may_be_used(monkeypatch, num_found, accelerator, asked, message):
    monkeypatch.setattr(devices, "num_gpus", lambda: num_found)
    if message is None:
        check_devices(accelerator, asked)
        return
    with pytest.raises(UserError, match=message):
        check_devices(accelerator, asked)


@pytest.mark.parametrize("flag", ["[1]", "0", "two"])
def test_lightning_refuses_what_is_no_number_of_processes(train, capsys, flag):
    with pytest.raises(SystemExit):
        train("--trainer.accelerator", "cpu", "--trainer.devices", flag)
    assert "devices" in capsys.readouterr().err


TORCHRUN = {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "3"}
ONE_PROCESS = TORCHRUN | {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
SLURM = {"SLURM_NTASKS": "8", "SLURM_NNODES": "2", "SLURM_JOB_NAME": "train"}
OPEN = ("auto", 1, "auto")


@pytest.mark.parametrize(
    ("environment", "given", "settled"),
    [
        ({}, OPEN, (1, 1, "auto")),
        ({}, ("auto", 1, "ddp"), ("auto", 1, "ddp")),
        ({}, (-1, 1, "auto"), (-1, 1, "auto")),
        ({}, ("auto", 2, "auto"), ("auto", 2, "auto")),
        (TORCHRUN, OPEN, (3, 2, "ddp")),
        (TORCHRUN, (3, 2, "ddp_notebook"), (3, 2, "ddp_notebook")),
        (ONE_PROCESS, OPEN, (1, 1, "auto")),
        (SLURM, OPEN, (4, 2, "ddp")),
        ({"SLURM_NTASKS": "1"}, OPEN, (1, 1, "auto")),
        (SLURM | {"SLURM_JOB_NAME": "bash"}, OPEN, (1, 1, "auto")),  # a shell of the cluster
    ],
)
def test_what_the_flags_leave_open_comes_from_the_launcher(
    monkeypatch, environment, given, settled
):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("shutil.which", lambda name: None)
    trainer = SimpleNamespace(devices=given[0], num_nodes=given[1], strategy=given[2])
    devices.settle_devices(trainer)
    assert (trainer.devices, trainer.num_nodes, trainer.strategy) == settled


def test_other_processes_than_the_launcher_started_are_refused(monkeypatch):
    with pytest.raises(UserError, match="num_nodes 2: start the command by torchrun or SLURM"):
        check_devices("cpu", 1, 2)
    monkeypatch.setattr(devices, "num_gpus", lambda: 8)
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    check_devices("gpu", 3, 2)
    for asked in (1, [0, 1], "3"):
        with pytest.raises(UserError, match="has started 3 processes on each of 2 machines"):
            check_devices("gpu", asked, 1)


@pytest.mark.parametrize(("cuda", "hint"), [(None, ", and this torch is built for"), ("13.2", "")])
def test_a_torch_for_cpus_finds_no_gpu(monkeypatch, cuda, hint):
    monkeypatch.setattr(devices, "num_gpus", lambda: 0)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    with pytest.raises(UserError, match=f"^trainer.accelerator gpu: no GPU was found{hint}"):
        check_devices("gpu", 1)


class LaunchedError(Exception):
    """In place of processes that train."""


@pytest.mark.parametrize("strategy", ["ddp_fork", "ddp_notebook"])
def test_cuda_is_asleep_when_processes_are_forked(train, monkeypatch, strategy):
    def wake() -> None:
        raise AssertionError("CUDA is woken")

    def launch(*_: Any, **__: Any) -> None:
        raise LaunchedError

    monkeypatch.setattr(torch.cuda, "_lazy_init", wake)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(_MultiProcessingLauncher, "launch", launch)
    gpus = "--trainer.accelerator gpu --trainer.devices 2 --trainer.precision 16-mixed"
    watched = "--device_monitor true --step_timer true --figures_every_n_epochs 1"
    with pytest.raises(LaunchedError):
        train("--trainer.strategy", strategy, *gpus.split(), *watched.split())


@pytest.mark.parametrize(
    ("strategy", "names"), [("auto", True), ("ddp_spawn", True), ("ddp_fork", False)]
)
def test_a_process_that_forks_leaves_the_gpu_alone(monkeypatch, strategy, names):
    asked: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda gpu: asked.append(gpu) or "stand-in")
    trainer = Trainer(
        accelerator="gpu", devices=1, strategy=strategy, logger=False, enable_checkpointing=False
    )
    name = " stand-in" if names else ""
    assert devices.describe_devices(trainer) == f"Device: cuda:0{name} (1 of 2 GPUs used)"
    assert bool(asked) == names


@pytest.mark.parametrize(
    ("found", "accelerator", "asked", "strategy", "expected"),
    [
        (0, "auto", 1, "auto", "cpu"),
        (2, "cpu", 1, "auto", "cpu"),
        (2, "auto", 1, "auto", "cuda:0"),
        (2, "gpu", [1], "auto", "cuda:1"),
        (2, "gpu", "1,0", "dp", "cuda:1"),
        (2, "gpu", -1, "ddp", "cuda:0"),
        (2, "gpu", 2, "ddp_notebook", None),
        (2, "cpu", 2, "ddp_fork", "cpu"),
    ],
)
def test_a_network_is_tried_where_it_will_be(
    monkeypatch, found, accelerator, asked, strategy, expected
):
    monkeypatch.setattr(checks, "num_gpus", lambda: found)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: found > 0)
    flags = SimpleNamespace(accelerator=accelerator, devices=asked, strategy=strategy)
    assert checks.trial_device(flags) == (torch.device(expected) if expected else None)


class HalfOnly(MLP):
    """As attention that is written for GPUs: in half precision or not at all."""

    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_autocast_enabled(x.device.type):
            raise RuntimeError("only fp16 and bf16")
        return super().forward(x)


def test_a_network_is_tried_in_the_precision_of_its_training(train):
    flags = ("--model.net", "test_devices.HalfOnly", "--trainer.max_steps", 1)
    assert train("--trainer.precision", "bf16-mixed", *flags)["steps"] == 1


class ReadsTheEnvironment(MLP):
    """As cuBLAS does, at its first product."""

    found: list[str | None] = []

    def forward(self, x: Tensor) -> Tensor:
        self.found.append(os.environ.get("CUBLAS_WORKSPACE_CONFIG"))
        return super().forward(x)


def test_the_trial_of_a_deterministic_training_is_one_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    data = SyntheticImages(image_shape=(3, 8, 8), num_classes=4, num_train=10)
    data.setup("validate")
    flags = SimpleNamespace(
        accelerator="cpu", devices=1, strategy="auto", precision="32-true", deterministic=True
    )
    checks.try_network(Classifier(ReadsTheEnvironment([192, 4])), data, flags)
    assert ReadsTheEnvironment.found == [":4096:8"] * 2


def test_what_cannot_be_resident_on_a_gpu_is_refused(train, monkeypatch, capsys):
    flags = ("--data.resident", "true", "--data.num_workers", 1, "--trainer.max_steps", 1)
    assert train(*flags)["steps"] == 1  # without a GPU all data is where it is
    monkeypatch.setattr(checks, "trial_device", lambda trainer: torch.device("cuda", 0))
    with pytest.raises(SystemExit) as caught:
        train(*flags)
    assert caught.value.code == 2
    assert "data.resident true keeps arrays on the GPU" in capsys.readouterr().err


class TooLarge(MLP):
    fails_in = (True,)

    def forward(self, x: Tensor) -> Tensor:
        if self.training in self.fails_in:
            raise torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 1 TiB. GPU 0 has 2 GiB. See PYTORCH_"
            )
        return super().forward(x)


@pytest.mark.parametrize("fails_in", [(True,), (True, False)], ids=["training", "trial"])
def test_a_full_gpu_is_two_lines(train, monkeypatch, capsys, fails_in):
    monkeypatch.setattr(TooLarge, "fails_in", fails_in)
    with pytest.raises(SystemExit) as caught:
        train("--model.net", "test_devices.TooLarge")
    assert caught.value.code == 1
    first, second = capsys.readouterr().err.splitlines()
    assert first == "error: CUDA out of memory. Tried to allocate 1 TiB"
    assert "--data.batch_size" in second


@pytest.mark.gpu
def test_gpus_are_counted() -> None:
    assert devices.num_gpus() == torch.cuda.device_count()
