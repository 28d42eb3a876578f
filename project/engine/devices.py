"""Which devices there are, which are asked for, and a clear word where the two do not fit."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
from lightning import Trainer
from lightning.pytorch.accelerators import CPUAccelerator, CUDAAccelerator, MPSAccelerator
from lightning.pytorch.plugins.environments import SLURMEnvironment, TorchElasticEnvironment
from lightning.pytorch.strategies import ParallelStrategy

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
    """Fill in what the Trainer's flags leave open (`devices`, `num_nodes`, `strategy` of `trainer`): the processes that
    torchrun or SLURM has started; or one device without a strategy, and with one all there are, as in Lightning."""
    on_each, num_nodes = num_processes_started()
    if on_each * num_nodes > 1:
        trainer.devices = on_each if trainer.devices == "auto" else trainer.devices
        trainer.num_nodes = num_nodes if trainer.num_nodes == 1 else trainer.num_nodes
        trainer.strategy = "ddp" if trainer.strategy == "auto" else trainer.strategy
    elif trainer.devices == "auto" and trainer.strategy == "auto" and trainer.num_nodes == 1:
        trainer.devices = 1


def parse_devices(devices: Any) -> Any:
    """As a number, "auto" or a list of GPU indices, also where it is text such as "0,1"."""
    try:
        if isinstance(devices, str) and devices != "auto":
            return [int(part) for part in devices.split(",") if part.strip()] if "," in devices else int(devices)
    except ValueError as error:
        raise UserError(f"trainer.devices {devices!r}: give a number, auto, or GPU indices as [0,1]", 2) from error
    return devices


def check_devices(accelerator: Any, devices: Any, strategy: Any, num_nodes: int = 1) -> None:
    """Raise UserError where the Trainer's flags ask for what is not there; other than CPUs and GPUs is Lightning's."""
    flag = f"trainer.devices {devices}"
    devices = parse_devices(devices)
    found, started = num_gpus(), num_processes_started()
    gpus = f"{found} GPU{'s were' if found > 1 else ' was'} found"
    number = len(devices) if isinstance(devices, list) else devices
    if strategy == "dp" and (accelerator == "cpu" or not found):
        raise UserError("trainer.strategy dp splits each batch over the GPUs; without one use ddp, or no strategy")
    if strategy == "dp" and started != (0, 0):
        raise UserError("trainer.strategy dp is one process: start it without torchrun or SLURM tasks, or use ddp")
    if started != (0, 0) and isinstance(number, int) and number > 0 and (number, num_nodes) != started:
        has_started = f"torchrun or SLURM has started {started[0]} processes on each of {started[1]} machines"
        raise UserError(f"{flag} and trainer.num_nodes {num_nodes}: {has_started}; leave the two flags out")
    if accelerator in ("gpu", "cuda", "mps") and not found:
        raise UserError(f"trainer.accelerator {accelerator}: no GPU was found; use --trainer.accelerator cpu or auto")
    if accelerator not in ("auto", "cpu", "gpu", "cuda", "mps") or devices in ("auto", -1):
        return
    if accelerator == "cpu" or not found:
        reason = "the accelerator is cpu" if found else "no GPU was found"
        if isinstance(devices, list):
            raise UserError(f"{flag} names GPUs by index, and {reason}; use --trainer.devices 1")
        if number < 1:
            raise UserError(f"{flag}: one device is the least")
        if number > 1 and strategy == "auto":
            raise UserError(f"{flag}: {reason}; several CPU processes need --trainer.strategy ddp, one needs none")
        if number > 2 * (os.cpu_count() or 1):
            raise UserError(f"{flag}: {number} processes are too many for {os.cpu_count()} CPU cores")
    elif isinstance(devices, list):
        if not devices or len(set(devices)) < number or not set(devices) <= set(range(found)):
            raise UserError(f"{flag}: {gpus}; give indices from 0 to {found - 1}, each once")
    elif not 1 <= number <= found:
        raise UserError(f"{flag}: {gpus}; give a number from 1 to {found}")


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
        # Lightning shares the cores out when it starts the processes
        threads = max(1, torch.get_num_threads() // trainer.num_devices)
        each = f"{threads} thread{'s' * (threads > 1)}"
        processes = f"{trainer.world_size} processes, {each} each" if trainer.world_size > 1 else each
        return f"Device: CPU ({processes}), {gpus} found{', not used' * (found > 0)}"
    if isinstance(trainer.accelerator, CUDAAccelerator):
        strategy = trainer.strategy
        used = (strategy.parallel_devices if isinstance(strategy, ParallelStrategy) else None) or [strategy.root_device]
        names = ", ".join(f"{gpu} {torch.cuda.get_device_name(gpu)}" for gpu in used)
        machines = f", on each of {trainer.num_nodes} machines" if trainer.num_nodes > 1 else ""
        return f"Device: {names} ({len(used)} of {gpus} used{machines})"
    return f"Device: {trainer.num_devices} x {type(trainer.accelerator).__name__.removesuffix('Accelerator')}"
