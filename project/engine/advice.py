"""What to try next, from where the time went and how busy the devices were."""

import os
import sys
from dataclasses import dataclass
from typing import Any

import torch

from project.base.datamodule import TensorDataModule
from project.base.system import System
from project.callbacks.device_monitor import DeviceMonitor
from project.callbacks.phase_clock import PHASES
from project.callbacks.step_timer import StepTimer


@dataclass(frozen=True)
class Facts:
    """What a training was like. Shares are of the time of its steps, in [0, 1]; None is unknown."""

    data_loading: float
    transfer_transforms: float
    forward: float
    backward: float
    optimizer: float
    logging: float
    other: float  # Lightning's loop and callbacks, without what lies between epochs
    step_ms: float
    on_gpu: bool = False
    num_processes: int = 1
    busy: float | None = None  # share of the time in which the least busy GPU ran anything
    memory: float | None = None  # share of the fullest GPU's memory in use at the peak
    batch_size: int | None = None
    num_workers: int | None = None
    max_workers: int = 1  # CPU cores for each process
    is_resident: bool | None = None
    can_execute_several: bool = False  # whether --steps_per_execution is 1 and more would be taken
    log_every_n_steps: int = 50
    accumulate: int = 1
    is_full_precision: bool = True
    half_is_fast: bool = False
    can_compile: bool = False


def advice(f: Facts) -> list[str]:
    """One sentence, or two, that each name a finding and the flags to try, the most urgent first."""
    sentences = []

    def tell(finding: str, *remedies: str) -> None:
        if possible := [remedy for remedy in remedies if remedy][:2]:  # best first, empty where it is not
            sentences.append(f"{finding}; try {', or '.join(possible)}")

    batch_size, has_room = f.batch_size or 0, (f.memory or 0) < 0.6
    more_workers = min(f.max_workers, max(2, 2 * (f.num_workers or 0)))
    takes_workers = f.num_workers is not None and not f.is_resident and more_workers > max(1, f.num_workers)
    larger = f"a larger batch: --data.batch_size {4 * batch_size}" if batch_size and has_room else ""
    resident = "data kept on the GPU: --data.resident true" if f.on_gpu and f.is_resident is False and has_room else ""
    workers = f"more workers: --data.num_workers {more_workers}" if takes_workers else ""
    several_steps = "several steps per call: --steps_per_execution 20" if f.can_execute_several else ""
    half = "half precision: --trainer.precision bf16-mixed" if f.is_full_precision and f.half_is_fast else ""
    compiling = "compiling: --model.compile_net inductor" if f.can_compile else ""

    if f.memory is not None and f.memory > 0.92:
        flags = f"--data.batch_size {batch_size // 2} --trainer.accumulate_grad_batches {2 * f.accumulate}"
        smaller = f"a smaller batch with accumulation: {flags}" if batch_size > 1 else ""
        tell(f"GPU memory was {f.memory:.0%} full", smaller, half)
    if f.data_loading > 0.3:
        tell(f"Steps waited for data {f.data_loading:.0%} of their time", resident, workers, larger)
    if (copies := f.transfer_transforms) > 0.3:
        tell(f"Copies to the device and batch transforms took {copies:.0%} of the time of steps", resident, larger)
    if f.logging > 0.1:
        rarer = f"logging less often: --trainer.log_every_n_steps {10 * f.log_every_n_steps}"
        tell(f"Logging and the progress bar took {f.logging:.0%} of the time of steps", rarer)
    if f.num_processes > 1 and f.backward > 3 * f.forward:
        finding = f"The backward pass with the exchange of gradients took {f.backward:.0%} of the time of steps"
        tell(finding, larger, f"fewer exchanges: --trainer.accumulate_grad_batches {4 * f.accumulate}")
    small = several_steps, larger, compiling  # Python and kernel launches take longer than the arithmetic
    if f.on_gpu and f.busy is not None and f.busy < 0.6:
        tell(f"The GPU was busy {f.busy:.0%} of the time: steps of {f.step_ms:.2f} ms are too small for it", *small)
    if not f.on_gpu and f.step_ms < 3 and (overhead := f.optimizer + f.other) > 0.3:
        tell(f"Steps of {f.step_ms:.2f} ms are small: {overhead:.0%} of their time is not the network's", *small)
    if f.optimizer > 0.4:
        tell(f"The optimiser took {f.optimizer:.0%} of the time of steps", larger, compiling)
    if (compute := f.forward + f.backward) > 0.6:
        tell(f"The network itself took {compute:.0%} of the time of steps", half, compiling)
    return sentences[:2] or ["No part of a step stands out; the time is well spent"]


def facts(
    trainer: Any, timer: StepTimer, monitor: DeviceMonitor | None, steps_per_execution: int, can_execute_several: bool
) -> Facts | None:
    """Of a training that has ended; None where the timer has seen no step, or not in this process (ddp_spawn)."""
    seconds = timer.step_seconds()
    if not seconds:
        return None
    total = sum(seconds[phase] for phase in PHASES)
    model, data = trainer.lightning_module, trainer.datamodule
    own, on_gpu = isinstance(data, TensorDataModule), trainer.strategy.root_device.type == "cuda"
    gpus = list(monitor.gpu_memory_gib.items()) if monitor else []
    busy = [monitor.mean(f"gpu{gpu}_busy_percent") for gpu, _ in gpus] if monitor else []
    memory = [monitor.peak(f"gpu{gpu}_memory_gib") / gib for gpu, gib in gpus] if monitor else []
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return Facts(
        **{phase: seconds[phase] / total for phase in PHASES},
        step_ms=1e3 * total / seconds["num_steps"],
        num_processes=trainer.world_size,
        on_gpu=on_gpu,
        busy=min((percent / 100 for percent in busy if percent is not None), default=None),
        memory=max(memory, default=None),
        batch_size=data.batch_size if own else None,
        num_workers=data.num_workers if own else None,
        max_workers=max(1, cores // trainer.num_devices),
        is_resident=bool(data.on_gpu) if own else None,
        can_execute_several=can_execute_several and steps_per_execution == 1,
        log_every_n_steps=trainer.log_every_n_steps,
        accumulate=trainer.accumulate_grad_batches,
        is_full_precision=str(trainer.precision).startswith("32"),
        # torch.cpu.get_capabilities, public, is too new
        half_is_fast=on_gpu or torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported(),
        can_compile=on_gpu and isinstance(model, System) and model.compile_net is None,  # a CPU would need a compiler
    )
