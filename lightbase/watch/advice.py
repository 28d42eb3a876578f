"""What to try next, from where the time went and how busy the devices were."""

import os
from typing import Any, NamedTuple

import torch
from lightning.pytorch.strategies import SingleDeviceStrategy

from lightbase.data.batches import TensorBatches
from lightbase.data.module import BaseDataModule
from lightbase.devices.devices import has_bf16
from lightbase.devices.strategies import obstacle
from lightbase.module import BaseModule
from lightbase.watch.device_monitor import DeviceMonitor
from lightbase.watch.step_timer import StepTimer, shares, step_ms


class Facts(NamedTuple):
    """What a training was like. Shares are in [0, 1]."""

    shares: dict[str, float]  # of the steps' time, by phase
    step_ms: float
    remedies: dict[str, str]  # what can be tried here, with its flags, by name
    num_processes: int = 1
    busy: float | None = None  # share of the time in which the least busy GPU ran anything


# names of remedies, the best first
FOR_DATA = ("resident data", "workers", "larger batch")
FOR_COPY = ("resident data", "larger batch")
# in small steps Python and kernel launches take longer than the arithmetic
FOR_SMALL = ("several steps", "fused optimiser", "larger batch", "compiling")
FOR_OPTIMIZER = ("larger batch", "compiling")
FOR_NET = ("half precision", "compiling", "larger batch")


def findings(facts: Facts) -> list[tuple[bool, str, tuple[str, ...]]]:
    """The rules, the most urgent first: whether it applies, the finding, names of remedies."""
    part, ms, busy = facts.shares, f"{facts.step_ms:.2f} ms", facts.busy
    waits, copies, logging = part["data_loading"], part["transfer_transforms"], part["logging"]
    forward, backward, optimizer = part["forward"], part["backward"], part["optimizer"]
    compute = forward + backward
    overhead = optimizer + logging + part["other"]
    is_exchange = facts.num_processes > 1 and backward > 3 * forward
    is_idle = busy is not None and busy < 0.6
    is_small = busy is None and facts.step_ms < 3 and overhead > 0.3
    return [
        (waits > 0.2, f"Steps waited for data {waits:.0%} of their time", FOR_DATA),
        (copies > 0.3, f"Copies and transforms took {copies:.0%} of a step", FOR_COPY),
        (
            logging > 0.1,
            f"Logging and progress bar took {logging:.0%} of a step",
            ("rarer logging",),
        ),
        (is_exchange, f"Backward and exchange took {backward:.0%} of a step", ("larger batch",)),
        (is_idle, f"The GPU was busy {busy or 0:.0%} of the time: steps of {ms}", FOR_SMALL),
        (is_small, f"Steps of {ms} are small: {overhead:.0%} is overhead", FOR_SMALL),
        (optimizer > 0.4, f"The optimiser took {optimizer:.0%} of a step", FOR_OPTIMIZER),
        (compute > 0.6, f"The network itself took {compute:.0%} of a step", FOR_NET),
    ]


def advice(facts: Facts) -> list[str]:
    """One sentence, or two: a finding and what to try, with the flags."""
    sentences = []
    for applies, finding, names in findings(facts):
        if applies:
            possible = [facts.remedies[name] for name in names if name in facts.remedies]
            way_out = f"; try {', or '.join(possible[:2])}" if possible else ""
            sentences.append(finding + way_out)
    return sentences[:2] or ["No part of a step stands out; the time is well spent"]


def facts(trainer: Any) -> Facts | None:
    """Of a training that has ended; None if no step timer saw a step in this process."""
    timers = [callback for callback in trainer.callbacks if isinstance(callback, StepTimer)]
    seconds = timers[0].sum() if timers else {}
    if not seconds:
        return None
    ms, num_processes = step_ms(seconds), trainer.world_size
    return Facts(shares(seconds), ms, remedies(trainer), num_processes, busy_share(trainer))


def busy_share(trainer: Any) -> float | None:
    """`busy` of Facts; None on a CPU. A GPU without readings counts as busy."""
    if trainer.strategy.root_device.type != "cuda":
        return None
    monitors = [callback for callback in trainer.callbacks if isinstance(callback, DeviceMonitor)]
    return min((share for monitor in monitors for share in monitor.busy_shares()), default=1.0)


def remedies(trainer: Any) -> dict[str, str]:
    """What can be tried in a next training, with its flags."""
    every = 10 * trainer.log_every_n_steps
    logging = {"rarer logging": f"logging less often: --trainer.log_every_n_steps {every}"}
    return logging | data_remedies(trainer) | compute_remedies(trainer)


def data_remedies(trainer: Any) -> dict[str, str]:
    """For batches and how they are loaded."""
    data, device, texts = trainer.datamodule, trainer.strategy.root_device, {}
    if not isinstance(data, BaseDataModule):
        more = f"more num_workers for the DataLoader of {type(data).__name__}"
        return {"workers": f"{more}, or, for data in memory, a BaseDataModule"}
    has_memory = True
    if device.type == "cuda":
        size = torch.cuda.get_device_properties(device).total_memory
        has_memory = torch.cuda.max_memory_reserved(device) < 0.6 * size
    if has_memory:
        texts["larger batch"] = f"a larger batch: --data.batch_size {4 * data.batch_size}"
    if data.on_gpu:
        return texts
    is_array = isinstance(data.splits.get("train"), TensorBatches)
    if is_array and has_memory and device.type == "cuda":
        without = " --data.num_workers 0" if data.num_workers else ""
        texts["resident data"] = f"data kept on the GPU: --data.resident true{without}"
    most = (os.cpu_count() or 1) // trainer.num_devices
    if data.num_workers < most:
        more = min(most, max(2, 2 * data.num_workers))
        texts["workers"] = f"more workers: --data.num_workers {more}"
    return texts


def compute_remedies(trainer: Any) -> dict[str, str]:
    """For steps, optimizer and network."""
    model, texts = trainer.lightning_module, {}
    is_ours = isinstance(model, BaseModule)
    is_on_gpu = trainer.strategy.root_device.type == "cuda"
    if type(trainer.strategy) is SingleDeviceStrategy and obstacle(trainer) is None:
        texts["several steps"] = "several steps per call: --steps_per_execution 20"
    if not is_ours and trainer.optimizers:  # a BaseModule chooses the fused step itself
        optimizer = trainer.optimizers[0]
        if optimizer.defaults.get("fused", True) is None:  # torch has a fused step, off by default
            texts["fused optimiser"] = f"{type(optimizer).__name__}(..., fused=True)"
    if (is_on_gpu or has_bf16()) and str(trainer.precision).startswith("32"):
        # GPUs older than NVIDIA's Ampere only emulate bf16
        is_older = is_on_gpu and not torch.cuda.is_bf16_supported(including_emulation=False)
        precision = "16-mixed" if is_older else "bf16-mixed"
        texts["half precision"] = f"half precision: --trainer.precision {precision}"
    if is_on_gpu and is_ours and model.compile_net is None:  # on a CPU it needs a C++ compiler
        texts["compiling"] = "compiling: --model.compile_net inductor"
    return texts
