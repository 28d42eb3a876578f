"""Device flags against pretended GPUs."""

import contextlib
import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from example.models.mlp import MLP
from torch import Tensor
from written import refused

from lightbase.config.errors import UserError
from lightbase.run import devices
from lightbase.run.devices import check_devices


def flags(
    accelerator: str, devices: Any, num_nodes: int, strategy: str
) -> SimpleNamespace:
    """Flags of the Trainer."""
    return SimpleNamespace(
        accelerator=accelerator, devices=devices, num_nodes=num_nodes, strategy=strategy
    )


@pytest.mark.parametrize(
    ("num_found", "accelerator", "requested", "strategy", "message"),
    [
        (0, "tpu", 8, "ddp", None),
        (2, "gpu", "0,1", "ddp", None),
        (2, "cuda", -1, "ddp", None),
        (0, "gpu", "auto", "auto", "finds 0 GPUs.*\n.*--trainer.accelerator cpu"),
        (2, "auto", [0, 2], "ddp", "finds 2 GPUs"),
        (0, "cpu", 9999, "ddp", "devices 9999: there are"),
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


def set_all(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


TORCHRUN = {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "3"}
SLURM = {"SLURM_NTASKS": "8", "SLURM_NNODES": "2", "SLURM_JOB_NAME": "train"}
OPEN = ("auto", 1, "auto")


@pytest.mark.parametrize(
    ("environment", "given", "settled"),
    [
        ({}, OPEN, (1, 1, "auto")),
        (TORCHRUN, OPEN, (3, 2, "ddp")),
        (TORCHRUN, (3, 2, "ddp_notebook"), (3, 2, "ddp_notebook")),
        (SLURM, OPEN, (4, 2, "ddp")),
        # a shell of the cluster
        (SLURM | {"SLURM_JOB_NAME": "bash"}, OPEN, (1, 1, "auto")),
    ],
)
def test_what_the_flags_leave_open_comes_from_the_launcher(
    monkeypatch, environment, given, settled
):
    set_all(monkeypatch, environment)
    monkeypatch.setattr("shutil.which", lambda name: None)
    trainer = flags("auto", *given)
    devices.settle_devices(trainer)
    assert (trainer.devices, trainer.num_nodes, trainer.strategy) == settled


def test_what_needs_a_launcher_is_refused_without_one_and_dp_with_one(monkeypatch):
    with pytest.raises(UserError, match="num_nodes 2: start it by torchrun or SLURM"):
        check_devices(flags("cpu", 1, 2, "ddp"))
    monkeypatch.setattr(devices, "num_gpus", lambda: 8)
    set_all(monkeypatch, TORCHRUN)
    check_devices(flags("gpu", 3, 2, "ddp"))
    with pytest.raises(UserError, match="with torchrun or on CPUs use ddp"):
        check_devices(flags("gpu", 3, 2, "dp"))


class HalfOnly(MLP):
    """As attention that is written for GPUs: in half precision or not at all."""

    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_autocast_enabled(x.device.type):
            raise RuntimeError("only fp16 and bf16")
        return super().forward(x)


def test_a_network_is_tried_in_the_precision_of_its_training(train):
    flags = ("--model.net", "test_devices.HalfOnly", "--trainer.max_steps", 1)
    assert train("--trainer.precision", "bf16-mixed", *flags)["steps"] == 1


class Fails(MLP):
    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("CUDA out of memory. Tried to allocate 1 TiB")


def test_what_a_device_refuses_has_a_way_out(train, capsys, tmp_path):
    run = functools.partial(train, "--model.net test_devices.Fails")
    lines = refused(capsys, tmp_path, run, 1).splitlines()
    assert lines[0] == "error: CUDA out of memory. Tried to allocate 1 TiB"
    assert lines[1].startswith(f"in {__file__}, line ")
    assert "--data.batch_size" in lines[-1]
