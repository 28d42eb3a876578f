"""What to try next, from where the time went and how busy the devices were: rules in one table."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from lightning import Trainer

from project.callbacks.device_monitor import DeviceMonitor
from project.callbacks.phase_clock import PHASES
from project.callbacks.step_timer import StepTimer


@dataclass(frozen=True)
class Facts:
    """What a training was like. Shares are of the time of its steps, in [0, 1]."""

    data_loading: float
    transfer_transforms: float
    forward: float
    backward: float
    optimizer: float
    logging: float
    other: float
    """Lightning's loop and callbacks, without what lies between epochs."""
    step_ms: float
    on_gpu: bool = False
    num_processes: int = 1
    busy: float | None = None
    """Share of the time in which the least busy GPU ran anything; None if unknown."""
    memory: float | None = None
    """Share of the fullest GPU's memory in use at the peak; None if unknown."""
    batch_size: int | None = None
    """None for data without --data.batch_size; so are num_workers and resident."""
    num_workers: int | None = None
    max_workers: int = 1
    """CPU cores for each process."""
    is_resident: bool | None = None
    steps_per_execution: int = 1
    can_execute_several: bool = False
    """Whether --steps_per_execution over 1 would be taken."""
    log_every_n_steps: int = 50
    accumulate: int = 1
    is_full_precision: bool = True
    bf16_is_fast: bool = False
    can_compile: bool = False

    @property
    def compute(self) -> float:
        return self.forward + self.backward

    @property
    def overhead(self) -> float:
        return self.optimizer + self.other

    @property
    def waits_for_launches(self) -> bool:
        """Small steps: Python and kernel launches take longer than the arithmetic."""
        if self.on_gpu:
            return self.busy is not None and self.busy < 0.6
        return self.step_ms < 3 and self.overhead > 0.3


class Rule(NamedTuple):
    name: str
    applies: Callable[[Facts], bool]
    finding: Callable[[Facts], str]
    remedies: list[tuple[Callable[[Facts], bool], Callable[[Facts], str]]]
    """What to try, best first: the first two that are possible are named."""


def workers(facts: Facts) -> int:
    return min(facts.max_workers, max(2, 2 * (facts.num_workers or 0)))


def larger_batch(facts: Facts) -> str:
    return f"a larger batch: --data.batch_size {4 * (facts.batch_size or 0)}"


def has_room(facts: Facts) -> bool:
    return facts.batch_size is not None and (facts.memory or 0) < 0.6


RESIDENT = (
    lambda f: f.on_gpu and f.is_resident is False and (f.memory or 0) < 0.6,
    lambda f: "data kept on the GPU: --data.resident true",
)
SEVERAL_STEPS = (
    lambda f: f.can_execute_several and f.steps_per_execution == 1,
    lambda f: "several steps per call: --steps_per_execution 20",
)
COMPILE = (lambda f: f.can_compile, lambda f: "compiling: --model.compile_net inductor")
RULES = [
    Rule(
        "memory nearly full",
        lambda f: f.memory is not None and f.memory > 0.92,
        lambda f: f"GPU memory was {f.memory:.0%} full",
        [
            (
                lambda f: f.batch_size is not None and f.batch_size > 1,
                lambda f: (
                    f"a smaller batch with accumulation: --data.batch_size {(f.batch_size or 0) // 2} "
                    f"--trainer.accumulate_grad_batches {2 * f.accumulate}"
                ),
            ),
            (lambda f: f.is_full_precision, lambda f: "half precision: --trainer.precision bf16-mixed"),
        ],
    ),
    Rule(
        "data-bound",
        lambda f: f.data_loading > 0.3,
        lambda f: f"Steps waited for data {f.data_loading:.0%} of their time",
        [
            RESIDENT,
            (
                lambda f: (
                    f.num_workers is not None and not f.is_resident and f.max_workers > 1 and workers(f) > f.num_workers
                ),
                lambda f: f"more workers: --data.num_workers {workers(f)}",
            ),
            (has_room, larger_batch),
        ],
    ),
    Rule(
        "transfer-bound",
        lambda f: f.transfer_transforms > 0.3,
        lambda f: f"Copies to the device and batch transforms took {f.transfer_transforms:.0%} of the time of steps",
        [
            RESIDENT,
            (has_room, larger_batch),
        ],
    ),
    Rule(
        "logging-bound",
        lambda f: f.logging > 0.1,
        lambda f: f"Logging and the progress bar took {f.logging:.0%} of the time of steps",
        [(lambda f: True, lambda f: f"logging less often: --trainer.log_every_n_steps {10 * f.log_every_n_steps}")],
    ),
    Rule(
        "exchange-bound",
        lambda f: f.num_processes > 1 and f.backward > 3 * f.forward,
        lambda f: f"The backward pass with the exchange of gradients took {f.backward:.0%} of the time of steps",
        [
            (has_room, larger_batch),
            (lambda f: True, lambda f: f"fewer exchanges: --trainer.accumulate_grad_batches {4 * f.accumulate}"),
        ],
    ),
    Rule(
        "launch-bound",
        lambda f: f.waits_for_launches,
        lambda f: (
            f"The GPU was busy {f.busy:.0%} of the time: steps of {f.step_ms:.2f} ms are too small for it"
            if f.on_gpu
            else f"Steps of {f.step_ms:.2f} ms are small: {f.overhead:.0%} of their time is not the network's"
        ),
        [SEVERAL_STEPS, (has_room, larger_batch), COMPILE],
    ),
    Rule(
        "optimiser-bound",
        lambda f: f.optimizer > 0.4,
        lambda f: f"The optimiser took {f.optimizer:.0%} of the time of steps",
        [(has_room, larger_batch), COMPILE],
    ),
    Rule(
        "compute-bound",
        lambda f: f.compute > 0.6,
        lambda f: f"The network itself took {f.compute:.0%} of the time of steps",
        [
            (
                lambda f: f.is_full_precision and (f.on_gpu or f.bf16_is_fast),
                lambda f: "half precision: --trainer.precision bf16-mixed",
            ),
            COMPILE,
        ],
    ),
]
"""In order of urgency: the first that applies is told, and a second one beside it."""


def advice(facts: Facts) -> list[str]:
    """One sentence, or two, that each name a finding and the flags to try."""
    sentences = []
    for rule in RULES:
        if rule.applies(facts):
            remedies = [text(facts) for is_possible, text in rule.remedies if is_possible(facts)][:2]
            if remedies:
                sentences.append(f"{rule.finding(facts)}; try {', or '.join(remedies)}")
    return sentences[:2] or ["No part of a step stands out; the time is well spent"]


def facts(trainer: Trainer, timer: StepTimer, monitor: DeviceMonitor | None, can_execute_several: bool) -> Facts | None:
    """Of a training that has ended; None where the timer has seen no step, or not in this process (ddp_spawn)."""
    seconds = timer.step_seconds()
    if not seconds:
        return None
    model: Any = trainer.lightning_module
    data: Any = trainer.datamodule  # type: ignore[attr-defined]
    total = sum(seconds[phase] for phase in PHASES)
    on_gpu = trainer.strategy.root_device.type == "cuda"
    gpus = monitor.gpu_memory_gib if monitor else {}
    busy = [monitor.mean(f"gpu{gpu}_busy_percent") for gpu in gpus] if monitor else []
    memory = [monitor.peak(f"gpu{gpu}_memory_gib") / gib for gpu, gib in gpus.items()] if monitor else []
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Facts(
        **{phase: seconds[phase] / total for phase in PHASES},
        step_ms=1e3 * total / seconds["num_steps"],
        num_processes=trainer.world_size,
        on_gpu=on_gpu,
        busy=min((percent / 100 for percent in busy if percent is not None), default=None),
        memory=max(memory, default=None),
        batch_size=getattr(data, "batch_size", None),
        num_workers=getattr(data, "num_workers", None),
        max_workers=max(1, cores // trainer.num_devices),
        is_resident=bool(data.on_gpu) if hasattr(data, "on_gpu") else None,
        steps_per_execution=getattr(data, "steps_per_execution", 1),
        can_execute_several=can_execute_several,
        log_every_n_steps=trainer.log_every_n_steps,  # type: ignore[attr-defined]
        accumulate=trainer.accumulate_grad_batches,
        is_full_precision=str(trainer.precision).startswith("32"),
        # torch has no public word for it
        bf16_is_fast=torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported(),
        # on a CPU it would need a compiler
        can_compile=on_gpu and getattr(model, "compile_net", "") is None,
    )
