"""Device flags against pretended GPUs."""

import contextlib
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from example.models.mlp import MLP
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from torch import Tensor

from lightbase.core import devices
from lightbase.core.device_errors import short_device_errors
from lightbase.core.devices import check_devices
from lightbase.core.errors import UserError


def flags(
    accelerator: str, devices: Any, num_nodes: int, strategy: str
) -> SimpleNamespace:
    """Flags of the Trainer."""
    return SimpleNamespace(
        accelerator=accelerator, devices=devices, num_nodes=num_nodes, strategy=strategy
    )


NO_GPU = "accelerator gpu: no GPU was found.*use cpu"


@pytest.mark.parametrize(
    ("num_found", "accelerator", "requested", "strategy", "message"),
    [
        (0, "auto", "auto", "ddp", None),
        (0, "tpu", 8, "ddp", None),
        (2, "gpu", "0,1", "ddp", None),
        (2, "cuda", -1, "ddp", None),
        (2, "cpu", 2, "ddp", None),
        (0, "gpu", "auto", "auto", NO_GPU),
        (1, "gpu", 2, "ddp", "devices 2: GPUs found: 1; the first is .0."),
        (2, "auto", [0, 2], "ddp", "GPUs found: 2"),
        (2, "gpu", "two", "ddp", "'two'"),
        (0, "auto", 10_000, "ddp", "devices 10000: there are .* CPU cores"),
        (0, "cpu", "2", "auto", "devices 2 on CPUs needs --trainer.strategy ddp"),
        (2, "cpu", 1, "dp", "dp is for GPUs: with torchrun or on CPUs use"),
    ],
)
def test_only_devices_that_are_there_may_be_used(
    monkeypatch, num_found, accelerator, requested, strategy, message
):
    monkeypatch.setattr(devices, "num_gpus", lambda: num_found)
    expected = (
        pytest.raises(UserError, match=message) if message else contextlib.nullcontext()
    )
    with expected:
        check_devices(flags(accelerator, requested, 1, strategy))


@pytest.mark.parametrize("requested", ["[1]", "0"])
def test_a_cpu_has_no_index(train, capsys, tmp_path, requested):
    with pytest.raises(SystemExit):
        train("--trainer.accelerator", "cpu", "--trainer.devices", requested)
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith("error: the trainer flags do not fit: ")
    assert "cpu" in error.lower()
    assert not [*tmp_path.rglob("config.yaml")]


TORCHRUN = {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "3"}
ONE_PROCESS = TORCHRUN | {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
SLURM = {"SLURM_NTASKS": "8", "SLURM_NNODES": "2", "SLURM_JOB_NAME": "train"}
OPEN = ("auto", 1, "auto")


@pytest.mark.parametrize(
    ("environment", "given", "settled"),
    [
        ({}, OPEN, (1, 1, "auto")),
        ({}, ("auto", 1, "ddp"), ("auto", 1, "ddp")),
        (TORCHRUN, OPEN, (3, 2, "ddp")),
        (TORCHRUN, (3, 2, "ddp_notebook"), (3, 2, "ddp_notebook")),
        (ONE_PROCESS, OPEN, (1, 1, "auto")),
        (SLURM, OPEN, (4, 2, "ddp")),
        ({"SLURM_NTASKS": "1"}, OPEN, (1, 1, "auto")),
        (
            SLURM | {"SLURM_JOB_NAME": "bash"},
            OPEN,
            (1, 1, "auto"),
        ),  # a shell of the cluster
    ],
)
def test_what_the_flags_leave_open_comes_from_the_launcher(
    monkeypatch, environment, given, settled
):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("shutil.which", lambda name: None)
    trainer = flags("auto", *given)
    devices.settle_devices(trainer)
    assert (trainer.devices, trainer.num_nodes, trainer.strategy) == settled


def test_what_needs_a_launcher_is_refused_without_one_and_dp_with_one(monkeypatch):
    with pytest.raises(UserError, match="num_nodes 2: start it by torchrun or SLURM"):
        check_devices(flags("cpu", 1, 2, "ddp"))
    monkeypatch.setattr(devices, "num_gpus", lambda: 8)
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    check_devices(flags("gpu", 3, 2, "ddp"))
    with pytest.raises(UserError, match="with torchrun or on CPUs use ddp"):
        check_devices(flags("gpu", 3, 2, "dp"))


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
    monkeypatch.setattr(devices, "counts_gpus_by_nvml", lambda: True)
    gpus = "--trainer.accelerator gpu --trainer.devices 2 --trainer.precision 16-mixed"
    watched = "--device_monitor true --step_timer true --figures_every_n_epochs 1"
    with pytest.raises(LaunchedError):
        train("--trainer.strategy", strategy, *gpus.split(), *watched.split())


@pytest.mark.parametrize(
    "strategy", ["ddp_fork", "ddp_notebook_find_unused_parameters_true"]
)
def test_processes_are_not_forked_where_torch_has_to_start_cuda(monkeypatch, strategy):
    monkeypatch.setattr(devices, "num_gpus", lambda: 2)
    monkeypatch.setattr(devices, "counts_gpus_by_nvml", lambda: False)
    with pytest.raises(UserError, match="torch finds no NVML\nuse ddp"):
        check_devices(flags("gpu", 2, 1, strategy))


@pytest.mark.gpu
def test_what_counts_the_gpus_leaves_them_to_forked_processes() -> None:
    """Only where it says so. On simulated GPUs NVML is there and is not."""
    code = "import os, torch; from lightbase.core import compat; "
    code += "torch.cuda.device_count(); "
    code += "print(compat.counts_gpus_by_nvml(), flush=True); "
    code += "os.fork() or print(torch.ones(1, device='cuda').sum().item())"
    kinds = ["1", "0"] if "SIMGPU_FOLDER" in os.environ else ["1"]
    for nvml in kinds:
        libraries = os.environ.get("LD_LIBRARY_PATH", "")
        if nvml == "0":
            libraries = libraries.replace("/nvml", "/none")
        command = [sys.executable, "-c", code]
        environment = os.environ | {"LD_LIBRARY_PATH": libraries}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        counted = done.stdout.splitlines()[0] == "True"
        assert ("1.0" in done.stdout) == counted, done.stderr
        if "SIMGPU_FOLDER" in os.environ:
            assert counted == (nvml == "1")


@pytest.mark.parametrize(
    ("problem", "way_out"),
    [
        (
            "CUDA error: all CUDA-capable devices are busy or unavailable",
            "trainer.devices .1.",
        ),
        ("CUDA out of memory. Tried to allocate 2.00 GiB", "data.batch_size"),
        (
            "CUDA error: no kernel image is available for execution on the device",
            "docs/install",
        ),
    ],
)
def test_an_error_of_a_device_is_two_lines(problem: str, way_out: str) -> None:
    links = "\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1"
    with (
        pytest.raises(UserError, match=f"^{problem}\n.*{way_out}[^\n]*$"),
        short_device_errors(),
    ):
        raise RuntimeError(problem + links)
    with pytest.raises(RuntimeError, match="another"), short_device_errors():
        raise RuntimeError("another")


class HalfOnly(MLP):
    """As attention that is written for GPUs: in half precision or not at all."""

    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_autocast_enabled(x.device.type):
            raise RuntimeError("only fp16 and bf16")
        return super().forward(x)


def test_a_network_is_tried_in_the_precision_of_its_training(train):
    flags = ("--model.net", "test_devices.HalfOnly", "--trainer.max_steps", 1)
    assert train("--trainer.precision", "bf16-mixed", *flags)["steps"] == 1


MEMORY = "CUDA out of memory. Tried to allocate 1 TiB. GPU 0 has 2 GiB. See PYTORCH_"
DRIVER = (
    "The NVIDIA driver on your system is too old (found version 12020). Please update "
    "your"
)
COMPILER = (
    "In a subprocess:\nRuntimeError: Failed to find C compiler. Please specify via CC"
)


class Fails(MLP):
    fails_in = (True,)
    text = MEMORY

    def forward(self, x: Tensor) -> Tensor:
        if self.training in self.fails_in:
            raise RuntimeError(self.text)
        return super().forward(x)


@pytest.mark.parametrize(
    ("fails_in", "text", "what", "way_out"),
    [
        (
            (True, False),
            MEMORY,
            "CUDA out of memory. Tried to allocate 1 TiB",
            "--data.batch_size",
        ),
        ((True, False), DRIVER, DRIVER.partition(".")[0], "is built for CUDA"),
        (
            (True,),
            COMPILER,
            "RuntimeError: Failed to find C compiler",
            "install gcc and g++",
        ),
    ],
)
def test_what_a_device_refuses_is_two_lines(
    train, monkeypatch, capsys, fails_in, text, what, way_out
):
    monkeypatch.setattr(Fails, "fails_in", fails_in)
    monkeypatch.setattr(Fails, "text", text)
    with pytest.raises(SystemExit) as caught:
        train("--model.net", "test_devices.Fails")
    assert caught.value.code == 1
    first, second = capsys.readouterr().err.splitlines()
    assert first == f"error: {what}"
    assert way_out in second
