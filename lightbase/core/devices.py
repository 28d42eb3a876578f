"""Which devices there are and which are used; an error if a flag asks for others."""

import atexit
import contextlib
import os
import re
import sys
from collections.abc import Iterator
from typing import Any

import torch
from lightning import Trainer
from lightning.pytorch.accelerators import (
    CPUAccelerator,
    CUDAAccelerator,
    MPSAccelerator,
)
from lightning.pytorch.plugins.environments import (
    SLURMEnvironment,
    TorchElasticEnvironment,
)

from lightbase.core.compat import counts_gpus_by_nvml
from lightbase.core.errors import UserError, say_once

OTHER_TORCH = "another torch (docs/install.md#with-an-older-nvidia-driver)"
AGAIN = "start again, after the first epoch with --ckpt_path last"
GPU_FAILED = "unspecified launch failure|ECC error"
WAYS_OUT = {
    "busy or unavailable": "another program may use the GPU alone (nvidia-smi); choose another one "
    "with --trainer.devices [1], or use --trainer.accelerator cpu",
    "out of memory|allocate memory": "another program may use the memory (nvidia-smi); else try "
    "a smaller --data.batch_size, --trainer.precision bf16-mixed or --data.resident false",
    "NVIDIA driver": f"torch {torch.__version__} is built for CUDA {torch.version.cuda}: install "
    f"another driver or {OTHER_TORCH}, or use --trainer.accelerator cpu",
    "no kernel image": f"the GPU is older than torch's kernels: install {OTHER_TORCH}, or use "
    "--trainer.accelerator cpu",
    GPU_FAILED: f"nvidia-smi and dmesg may tell why it fails; {AGAIN}",
    "remote process exit|by peer": f"another process has ended, its lines may tell why; {AGAIN}",
    r"C(\+\+)? compiler": "install gcc and g++, or leave --model.compile_net out",
}
"""{pattern in an error of torch: what the user can do}."""


ONE_DEVICE = ("auto", "single_device")
"""Strategies of one process on one device."""


def devices_of(strategy: Any) -> list[torch.device]:
    """The devices of a run on this machine."""
    return getattr(strategy, "parallel_devices", None) or [strategy.root_device]


def num_gpus() -> int:
    """CUDA or ROCm GPUs, or the one of an Apple computer."""
    return CUDAAccelerator.auto_device_count() or int(MPSAccelerator.is_available())


def num_processes_started() -> tuple[int, int]:
    """(processes on each machine, machines) that torchrun or SLURM has started; (0, 0)
    without."""
    if TorchElasticEnvironment.detect():
        on_each = int(os.environ["LOCAL_WORLD_SIZE"])
        return on_each, int(os.environ["WORLD_SIZE"]) // on_each
    num_tasks = int(os.environ.get("SLURM_NTASKS", 1))
    if num_tasks > 1 and SLURMEnvironment.detect():
        num_nodes = int(os.environ.get("SLURM_NNODES", 1))
        return num_tasks // num_nodes, num_nodes
    return 0, 0


def settle_devices(trainer: Any) -> None:
    """Fill in the Trainer's flags that the user left open.

    They follow torchrun or SLURM. Without them a run has one device; with a strategy it
    has all, as in Lightning.
    """
    on_each, num_nodes = num_processes_started()
    if on_each * num_nodes > 1:
        if trainer.devices == "auto":
            trainer.devices = on_each
        if trainer.num_nodes == 1:
            trainer.num_nodes = num_nodes
        if trainer.strategy == "auto":
            trainer.strategy = "ddp"
    elif (trainer.devices, trainer.num_nodes, trainer.strategy) == ("auto", 1, "auto"):
        trainer.devices = 1


def parse_devices(devices: Any) -> Any:
    """The flag as a number, "auto" or a list of GPU indices, which may be text such as
    "0,1"."""
    if not isinstance(devices, str) or devices == "auto":
        return devices
    try:
        indices = [int(part) for part in devices.split(",") if part.strip()]
    except ValueError as error:
        raise UserError(
            f"trainer.devices {devices!r}: give a number, auto or [0,1]", status=2
        ) from error
    return indices if "," in devices else indices[0]


def num_devices(devices: Any) -> int:
    """How many devices the flag asks for; -1: all of them."""
    devices = parse_devices(devices)
    if isinstance(devices, list):
        return len(devices)
    return -1 if devices == "auto" else int(devices)


def check_devices(trainer: Any) -> None:
    """Raise UserError if the Trainer's flags ask for GPUs or processes that are not
    there.

    For an index twice Lightning raises an error.
    """
    number, started = num_devices(trainer.devices), num_processes_started()
    is_launched = started != (0, 0)
    if is_launched and number != -1 and (number, trainer.num_nodes) != started:
        what = f"torchrun or SLURM has started {started[0]} processes on {started[1]} machines"
        raise UserError(f"{what}: leave trainer.devices and trainer.num_nodes out")
    accelerator = trainer.accelerator
    forks = forks_processes(trainer)
    if accelerator in ("auto", "gpu", "cuda") and torch.version.cuda and not forks:
        check_driver(accelerator)
    is_on_gpu = accelerator in ("gpu", "cuda", "mps") or (
        accelerator == "auto" and num_gpus() > 0
    )
    if trainer.num_nodes > 1 and not is_launched and "MASTER_ADDR" not in os.environ:
        raise UserError(
            f"trainer.num_nodes {trainer.num_nodes}: start it by torchrun or SLURM"
        )
    if trainer.strategy == "dp" and (not is_on_gpu or is_launched):
        raise UserError(
            "trainer.strategy dp is for GPUs: with torchrun or on CPUs use ddp"
        )
    if forks and is_on_gpu and not counts_gpus_by_nvml():
        what = f"trainer.strategy {trainer.strategy}: processes forked here cannot use the GPUs"
        raise UserError(
            f"{what}, because torch finds no NVML", "use ddp, from a script", 2
        )
    if is_on_gpu:
        check_gpus(accelerator, parse_devices(trainer.devices))
    elif accelerator in ("auto", "cpu"):
        if number > 1 and trainer.strategy == "auto":
            raise UserError(
                f"trainer.devices {number} on CPUs needs --trainer.strategy ddp"
            )
        if number > 2 * (os.cpu_count() or 1):
            raise UserError(
                f"trainer.devices {number}: there are {os.cpu_count()} CPU cores"
            )


def forks_processes(trainer: Any) -> bool:
    """Whether the Trainer's flags fork the processes that train from this one, which
    then must not start CUDA."""
    return str(trainer.strategy).startswith(("ddp_fork", "ddp_notebook"))


def check_one_device(trainer: Any) -> None:
    """Raise UserError for flags of the Trainer that name several devices, or a certain
    one."""
    if trainer.strategy not in ONE_DEVICE or trainer.devices not in (1, "1"):
        what = "this command trains on one device"
        raise UserError(
            f"{what}: leave --trainer.strategy and --trainer.devices out", status=2
        )


def check_driver(accelerator: str) -> None:
    """Start CUDA. If the driver is too old for torch, raise UserError; with `auto` use
    no GPU."""
    try:
        torch.cuda.init()
    except RuntimeError as error:  # it is raised without a GPU, too
        found = re.search(r"too old \(found version (\d+)(\d\d)\d\)", str(error))
        if not found:
            return
        what = f"the NVIDIA driver is for CUDA {found[1]}.{int(found[2])}, which is too old"
        way_out = WAYS_OUT["NVIDIA driver"]
        if accelerator != "auto":
            raise UserError(
                f"trainer.accelerator {accelerator}: {what}", way_out
            ) from error
        say_once(f"No GPU is used: {what}; {way_out}")
        os.environ["CUDA_VISIBLE_DEVICES"] = (
            ""  # NVML counts GPUs that torch cannot use
        )


def check_gpus(accelerator: Any, devices: Any) -> None:
    """Raise UserError if these GPUs are not there. devices: as `parse_devices` returns
    them."""
    total = num_gpus()
    if not total:
        # torch's version may end with +cpu
        raise UserError(
            f"trainer.accelerator {accelerator}: no GPU was found by torch {torch.__version__}; "
            "use cpu"
        )
    highest = (
        max(devices, default=0)
        if isinstance(devices, list)
        else num_devices(devices) - 1
    )
    if highest >= total:
        raise UserError(
            f"trainer.devices {devices}: GPUs found: {total}; the first is [0]"
        )


@contextlib.contextmanager
def short_device_errors() -> Iterator[None]:
    """Put what torch says about a full memory, a missing compiler, a GPU that is too
    old or has failed, or an NVIDIA driver that is missing or too old into two lines."""
    try:
        yield
    except RuntimeError as error:
        for pattern, way_out in WAYS_OUT.items():
            lines = [
                line for line in str(error).splitlines() if re.search(pattern, line)
            ]
            if lines:
                # what follows are links, and advice on torch's allocator
                what = re.split(r"\. (?!Tried|DefaultCPU)", lines[-1].strip())[0]
                if pattern == GPU_FAILED:
                    atexit.register(end_at_once)
                raise UserError(what, way_out) from error
        raise


def end_at_once() -> None:
    """End the process before torch frees the tensors of a GPU that has failed, where it
    aborts."""
    sys.stdout.flush()
    os._exit(1)


@contextlib.contextmanager
def cpu_threads(number: int | None) -> Iterator[None]:
    """Compute with so many threads; None changes nothing."""
    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def describe_devices(trainer: Trainer) -> str:
    """One line: the devices in use, and the number of GPUs that were found."""
    if isinstance(trainer.accelerator, CPUAccelerator):
        # the processes share the threads when they start
        num_threads = max(1, torch.get_num_threads() // trainer.num_devices)
        used = f"CPU, processes: {trainer.world_size}, threads of each: {num_threads}"
    else:
        # trainer.device_ids would be wrong for dp, and for [1, 0]
        names = ", ".join(map(str, devices_of(trainer.strategy)))
        used = f"{names}, machines: {trainer.num_nodes}"
    return f"Device: {used}, GPUs found: {num_gpus()}"
