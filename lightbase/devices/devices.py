"""Which devices there are, which are asked for, and a clear word where the two do not fit."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

import torch
from lightning import Trainer
from lightning.pytorch.accelerators import CPUAccelerator, CUDAAccelerator, MPSAccelerator
from lightning.pytorch.plugins.environments import SLURMEnvironment, TorchElasticEnvironment
from lightning.pytorch.strategies import ParallelStrategy

from lightbase.devices.data_parallel import DataParallelStrategy
from lightbase.errors import UserError


@runtime_checkable
class HasDevices(Protocol):  # the strategies dp, whose one process has them all, and ddp
    parallel_devices: list[torch.device]


def num_gpus() -> int:
    """CUDA or ROCm GPUs, or the one of an Apple computer."""
    return CUDAAccelerator.auto_device_count() or int(MPSAccelerator.is_available())


def num_processes_started() -> tuple[int, int]:
    """Processes that torchrun or SLURM has started for this run: on each machine, and machines; (0,
    0) without them."""
    if TorchElasticEnvironment.detect():
        on_each = int(os.environ["LOCAL_WORLD_SIZE"])
        return on_each, int(os.environ["WORLD_SIZE"]) // on_each
    if int(os.environ.get("SLURM_NTASKS", 1)) > 1 and SLURMEnvironment.detect():
        num_nodes = int(os.environ.get("SLURM_NNODES", 1))
        return int(os.environ["SLURM_NTASKS"]) // num_nodes, num_nodes
    return 0, 0


def settle_devices(trainer: Any) -> None:
    """Fill in the Trainer's flags that are left open: the processes that torchrun or SLURM has
    started; else one device, or with a strategy all there are, as in Lightning."""
    on_each, num_nodes = num_processes_started()
    if on_each * num_nodes > 1:
        trainer.devices = on_each if trainer.devices == "auto" else trainer.devices
        trainer.num_nodes = num_nodes if trainer.num_nodes == 1 else trainer.num_nodes
        trainer.strategy = "ddp" if trainer.strategy == "auto" else trainer.strategy
    elif (trainer.devices, trainer.num_nodes, trainer.strategy) == ("auto", 1, "auto"):
        trainer.devices = 1


def parse_devices(devices: Any) -> Any:
    """As a number, "auto" or a list of GPU indices, also where it is text such as "0,1"."""
    if not isinstance(devices, str) or devices == "auto":
        return devices
    try:
        return (
            [int(part) for part in devices.split(",") if part.strip()]
            if "," in devices
            else int(devices)
        )
    except ValueError as error:
        raise UserError(
            f"trainer.devices {devices!r}: give a number, auto, or GPU indices as [0,1]", 2
        ) from error


def num_devices(devices: Any) -> Any:
    """A number, or "auto"."""
    devices = parse_devices(devices)
    return len(devices) if isinstance(devices, list) else devices


def check_devices(accelerator: Any, devices: Any, strategy: Any, num_nodes: int = 1) -> None:
    """Raise UserError where the Trainer's flags ask for CPUs or GPUs that are not there."""
    flag, devices, number = (
        f"trainer.devices {devices}",
        parse_devices(devices),
        num_devices(devices),
    )
    found, started = num_gpus(), num_processes_started()
    reason = "the accelerator is cpu" if found else "no GPU was found"
    if strategy == "dp" and (accelerator == "cpu" or not found or started != (0, 0)):
        raise UserError(
            "trainer.strategy dp splits each batch over the GPUs of one process; else use "
            "ddp, or none"
        )
    if started != (0, 0) and number not in ("auto", -1) and (number, num_nodes) != started:
        has_started = (
            f"torchrun or SLURM has started {started[0]} processes on each of {started[1]} machines"
        )
        raise UserError(
            f"{flag} and trainer.num_nodes {num_nodes}: {has_started}; leave the two flags out"
        )
    if (
        num_nodes > 1 and started == (0, 0) and "MASTER_ADDR" not in os.environ
    ):  # it would wait for them for ever
        raise UserError(
            f"trainer.num_nodes {num_nodes}: start the command by torchrun or SLURM, on each "
            "machine"
        )
    if accelerator in ("gpu", "cuda", "mps") and not found:
        for_cpus = ", and this torch is built for CPUs alone" * (
            torch.version.cuda is torch.version.hip is None
        )
        way_out = "use --trainer.accelerator cpu or auto"
        raise UserError(f"trainer.accelerator {accelerator}: no GPU was found{for_cpus}; {way_out}")
    if accelerator not in ("auto", "cpu", "gpu", "cuda", "mps") or devices in ("auto", -1):
        return
    if found and accelerator != "cpu":
        asked = set(devices) if isinstance(devices, list) else set(range(number))
        if not asked or len(asked) < number or not asked <= set(range(found)):
            way_out = (
                f"give a number from 1 to {found}, or indices from 0 to {found - 1}, each once"
            )
            if started != (0, 0):
                way_out = (
                    "start a process for each, and let it see all (SLURM: "
                    "--gpus-per-node, not --gpus-per-task)"
                )
            raise UserError(f"{flag}: GPUs found: {found}; {way_out}")
    elif isinstance(devices, list) or number < 1:
        raise UserError(
            f"{flag}: {reason}, and CPU processes are a number; use --trainer.devices 1"
        )
    elif number > 1 and strategy == "auto":
        raise UserError(
            f"{flag}: {reason}; several CPU processes need --trainer.strategy ddp, one needs none"
        )
    elif number > 2 * (os.cpu_count() or 1):
        raise UserError(f"{flag}: {number} processes are too many for {os.cpu_count()} CPU cores")


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
    """One line: the devices in use, and what else was found."""
    found = num_gpus()
    gpus = f"{found or 'no'} GPU{'s' * (found > 1)}"
    if isinstance(trainer.accelerator, CPUAccelerator):
        num_threads = max(
            1, torch.get_num_threads() // trainer.num_devices
        )  # shared out when the processes start
        threads = f"{num_threads} thread{'s' * (num_threads > 1)}"
        threads = (
            f"{trainer.world_size} processes, {threads} each" if trainer.world_size > 1 else threads
        )
        return f"Device: CPU ({threads}), {gpus} found{', not used' * (found > 0)}"
    if isinstance(trainer.accelerator, CUDAAccelerator):
        strategy: Any = trainer.strategy  # trainer.device_ids would be wrong for dp, and for [1, 0]
        has_several = isinstance(strategy, ParallelStrategy | DataParallelStrategy)
        used = strategy.parallel_devices if has_several else [strategy.root_device]
        forks = strategy.launcher is not None and strategy.launcher.is_interactive_compatible
        # a process that has asked for the name could not fork others that use the GPU
        names = ", ".join(
            str(gpu) if forks else f"{gpu} {torch.cuda.get_device_name(gpu)}" for gpu in used
        )
        machines = f", on each of {trainer.num_nodes} machines" if trainer.num_nodes > 1 else ""
        return f"Device: {names} ({len(used)} of {gpus} used{machines})"
    return (
        f"Device: {trainer.num_devices} x "
        f"{type(trainer.accelerator).__name__.removesuffix('Accelerator')}"
    )


def has_bf16() -> bool:
    """Whether this CPU has instructions for bf16; of others than x86 it is not known here."""
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_tile"))
