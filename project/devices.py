"""Which devices there are, which are asked for, and a clear word where the two do not fit."""

import os
from typing import Any

import torch
from lightning import Trainer
from lightning.pytorch.accelerators import CPUAccelerator, CUDAAccelerator, MPSAccelerator

from project.errors import UserError


def num_gpus() -> int:
    """CUDA or ROCm GPUs, or the one of an Apple computer."""
    return CUDAAccelerator.auto_device_count() or int(MPSAccelerator.is_available())


def check_devices(accelerator: Any, devices: Any, strategy: Any) -> None:
    """Raise UserError where the Trainer flags `accelerator`, `devices` and `strategy` ask for what is not there.

    devices: a number, "auto" or -1 for all, or a list of GPU indices ("0,1" as text); [1] is the second GPU.
    Anything beyond CPUs and GPUs is left to Lightning.
    """
    found = num_gpus()
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


def _parse_devices(devices: Any) -> int | list[int]:
    try:
        if isinstance(devices, str):
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


def describe_devices(trainer: Trainer) -> str:
    """One line: the devices in use, and what else was found."""
    found = num_gpus()
    if isinstance(trainer.accelerator, CPUAccelerator):
        processes = f"{trainer.num_devices} processes, " if trainer.num_devices > 1 else ""
        unused = f"{found} GPU{'s' * (found > 1)} found, not used" if found else "no GPU found"
        return f"Device: CPU ({processes}{torch.get_num_threads()} threads), {unused}"
    if isinstance(trainer.accelerator, CUDAAccelerator):
        names = ", ".join(f"cuda:{i} {torch.cuda.get_device_name(i)}" for i in trainer.device_ids)
        return f"Device: {names} ({trainer.num_devices} of {found} GPU{'s' * (found > 1)} used)"
    return f"Device: {trainer.num_devices} x {type(trainer.accelerator).__name__.removesuffix('Accelerator')}"
