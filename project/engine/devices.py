"""Which devices there are, which are asked for, and a clear word where the two do not fit."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
from lightning import Trainer
from lightning.pytorch.accelerators import CPUAccelerator, CUDAAccelerator, MPSAccelerator
from lightning.pytorch.plugins.environments import SLURMEnvironment, TorchElasticEnvironment

from project.base.errors import UserError


def num_gpus() -> int:
    """CUDA or ROCm GPUs, or the one of an Apple computer."""
    return CUDAAccelerator.auto_device_count() or int(MPSAccelerator.is_available())


def num_processes_started() -> tuple[int, int]:
    """Processes that torchrun or SLURM has started for this run: on each machine, and machines; (0, 0) without them."""
    if TorchElasticEnvironment.detect():
        on_each = int(os.environ["LOCAL_WORLD_SIZE"])
        return on_each, int(os.environ["WORLD_SIZE"]) // on_each
    if int(os.environ.get("SLURM_NTASKS", 1)) > 1 and SLURMEnvironment.detect():
        num_nodes = int(os.environ.get("SLURM_NNODES", 1))
        return int(os.environ["SLURM_NTASKS"]) // num_nodes, num_nodes
    return 0, 0


def settle_devices(trainer: Any) -> None:
    """Fill in what the Trainer's flags leave open: the processes that torchrun or SLURM has started; or one device
    without a strategy, and with one all there are, as in Lightning.

    trainer: the flags, with `devices`, `num_nodes` and `strategy`, which are changed.
    """
    on_each, num_nodes = num_processes_started()
    if on_each * num_nodes > 1:
        trainer.devices = on_each if trainer.devices == "auto" else trainer.devices
        trainer.num_nodes = num_nodes if trainer.num_nodes == 1 else trainer.num_nodes
        trainer.strategy = "ddp" if trainer.strategy == "auto" else trainer.strategy
    elif trainer.devices == "auto" and trainer.strategy == "auto" and trainer.num_nodes == 1:
        trainer.devices = 1


def check_devices(accelerator: Any, devices: Any, strategy: Any, num_nodes: int = 1) -> None:
    """Raise UserError where the Trainer's flags ask for what is not there.

    devices: a number, "auto" or -1 for all, or a list of GPU indices ("0,1" as text); [1] is the second GPU.
    Anything beyond CPUs and GPUs is left to Lightning.
    """
    found = num_gpus()
    _check_dp(strategy, found if accelerator != "cpu" else 0)
    _check_started(_parse_devices(devices), num_nodes)
    if accelerator in ("gpu", "cuda", "mps") and not found:
        raise UserError(f"trainer.accelerator {accelerator}: no GPU was found; use --trainer.accelerator cpu or auto")
    if accelerator not in ("auto", "cpu", "gpu", "cuda", "mps") or devices in ("auto", -1, "-1"):
        return
    asked = _parse_devices(devices)
    if accelerator == "cpu" or not found:
        _check_cpu(devices, asked, strategy, found)
        return
    wrong = f"trainer.devices {devices}: {found} GPU{'s were' if found > 1 else ' was'} found"
    if isinstance(asked, int) and not 1 <= asked <= found:
        raise UserError(f"{wrong}; give a number from 1 to {found}")
    if isinstance(asked, list) and (not asked or len(set(asked)) < len(asked) or not set(asked) <= set(range(found))):
        raise UserError(f"{wrong}; give indices from 0 to {found - 1}, each once")


def _check_dp(strategy: Any, found: int) -> None:
    if strategy != "dp":
        return
    if not found:
        raise UserError(
            "trainer.strategy dp splits each batch over GPUs: none is used; on CPUs use ddp, or no strategy"
        )
    if num_processes_started() != (0, 0):
        raise UserError("trainer.strategy dp is one process: start it without torchrun or SLURM tasks, or use ddp")


def _check_started(asked: Any, num_nodes: int) -> None:
    """Whether torchrun or SLURM has started as many processes as are asked for."""
    started = num_processes_started()
    asked_on_each = len(asked) if isinstance(asked, list) else asked
    counted = isinstance(asked_on_each, int) and asked_on_each > 0
    if started != (0, 0) and counted and (asked_on_each, num_nodes) != started:
        raise UserError(
            f"trainer.devices {asked} and trainer.num_nodes {num_nodes}: torchrun or SLURM has started {started[0]} "
            f"processes on each of {started[1]} machines; leave the two flags out"
        )


def _parse_devices(devices: Any) -> int | list[int]:
    try:
        if isinstance(devices, str) and devices != "auto":
            return [int(part) for part in devices.split(",") if part.strip()] if "," in devices else int(devices)
    except ValueError as error:
        raise UserError(f"trainer.devices {devices!r}: give a number, auto, or GPU indices as [0,1]", 2) from error
    return devices


def _check_cpu(devices: Any, asked: int | list[int], strategy: Any, found: int) -> None:
    cores = os.cpu_count() or 1
    if isinstance(asked, list):
        reason = "and the accelerator is cpu" if found else "and no GPU was found"
        raise UserError(f"trainer.devices {devices} names GPUs by index, {reason}; use --trainer.devices 1")
    if asked < 1:
        raise UserError(f"trainer.devices {devices}: one device is the least")
    if asked > 1 and strategy == "auto":
        what = "would train on the CPU" if found else "no GPU was found"
        raise UserError(
            f"trainer.devices {devices}: {what}; several CPU processes need --trainer.strategy ddp, one needs none"
        )
    if asked > 2 * cores:
        raise UserError(f"trainer.devices {devices}: {asked} processes are too many for {cores} CPU cores")


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
    if isinstance(trainer.accelerator, CPUAccelerator):
        # Lightning shares the cores out when it starts the processes
        threads = max(1, torch.get_num_threads() // trainer.num_devices)
        each = f"{threads} thread{'s' * (threads > 1)}"
        processes = f"{trainer.world_size} processes, {each} each" if trainer.world_size > 1 else each
        unused = f"{found} GPU{'s' * (found > 1)} found, not used" if found else "no GPU found"
        return f"Device: CPU ({processes}), {unused}"
    if isinstance(trainer.accelerator, CUDAAccelerator):
        used = getattr(trainer.strategy, "parallel_devices", [trainer.strategy.root_device])
        names = ", ".join(f"{gpu} {torch.cuda.get_device_name(gpu)}" for gpu in used)
        machines = f", on each of {trainer.num_nodes} machines" if trainer.num_nodes > 1 else ""
        return f"Device: {names} ({len(used)} of {found} GPU{'s' * (found > 1)} used{machines})"
    return f"Device: {trainer.num_devices} x {type(trainer.accelerator).__name__.removesuffix('Accelerator')}"
