"""What to try next, in one line, from where the time went and how busy the GPUs were."""

import os
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch.strategies import SingleDeviceStrategy

from lightbase.data.module import BaseDataModule
from lightbase.devices.strategies import obstacle
from lightbase.module import BaseModule
from lightbase.watch.device_monitor import DeviceMonitor
from lightbase.watch.step_timer import StepTimer, shares, step_ms

# in small steps Python and kernel launches take longer than the arithmetic
FOR_SMALL = ("steps", "batch", "compiling")
RULES = (
    ("data_loading", 0.2, "Steps waited for data {} of their time", ("resident", "workers")),
    ("transfer_transforms", 0.3, "Copies and transforms took {} of a step", ("resident", "batch")),
    ("logging", 0.1, "Logging and progress bar took {} of a step", ("logging",)),
    ("idle", 0.4, "The GPU was idle {} of the time", FOR_SMALL),
    ("overhead", 0.3, "Steps are small: {} of their time is overhead", FOR_SMALL),
    ("network", 0.6, "The network itself took {} of a step", ("precision", "compiling")),
)
"""(part of the time, share above which the rule applies, finding, names of remedies). The first
rule that applies is the most urgent one."""


def advice(trainer: Any) -> str:
    """A finding and what to try, after a training; empty if no step timer saw a step."""
    timers = [callback for callback in trainer.callbacks if isinstance(callback, StepTimer)]
    seconds = timers[0].sum() if timers else {}
    return sentence(parts(trainer, seconds), remedies(trainer)) if seconds else ""


def sentence(parts: Mapping[str, float], remedies: Mapping[str, str]) -> str:
    for part, limit, finding, names in RULES:
        if parts[part] > limit:
            possible = [remedies[name] for name in names if name in remedies][:2]
            way_out = f"; try {', or '.join(possible)}" if possible else ""
            return finding.format(f"{parts[part]:.0%}") + way_out
    return "No part of a step stands out; the time is well spent"


def parts(trainer: Any, seconds: dict[str, float]) -> dict[str, float]:
    """The parts of the time that RULES names, as shares in [0, 1]."""
    parts = shares(seconds)
    parts["network"] = parts["forward"] + parts["backward"]
    is_on_gpu = trainer.strategy.root_device.type == "cuda"
    monitors = [callback for callback in trainer.callbacks if isinstance(callback, DeviceMonitor)]
    busy = [share for monitor in monitors for share in monitor.busy_shares()]
    parts["idle"] = 1 - min(busy, default=1.0)
    is_small = not is_on_gpu and step_ms(seconds) < 3
    parts["overhead"] = parts["optimizer"] + parts["other"] if is_small else 0.0
    return parts


def remedies(trainer: Any) -> dict[str, str]:
    """What can be tried in a next training, with its flags, by name."""
    model, data, device = trainer.lightning_module, trainer.datamodule, trainer.strategy.root_device
    is_on_gpu = device.type == "cuda"
    every = 10 * trainer.log_every_n_steps
    texts = {"logging": f"logging less often: --trainer.log_every_n_steps {every}"}
    if isinstance(data, BaseDataModule):
        texts["batch"] = f"a larger batch: --data.batch_size {4 * data.batch_size}"
        if is_on_gpu and data.resident is False:
            texts["resident"] = "data kept on the GPU: --data.resident true"
        num_workers = min(
            max(2, 2 * data.num_workers), (os.cpu_count() or 1) // trainer.num_devices
        )
        if not data.on_gpu and num_workers > data.num_workers:
            texts["workers"] = f"more workers: --data.num_workers {num_workers}"
    if type(trainer.strategy) is SingleDeviceStrategy and obstacle(trainer) is None:
        texts["steps"] = "several steps per call: --steps_per_execution 20"
    # GPUs older than NVIDIA's Ampere, and most CPUs, only emulate bf16
    has_bf16 = is_on_gpu and torch.cuda.is_bf16_supported(including_emulation=False)
    if has_bf16 and str(trainer.precision).startswith("32"):
        texts["precision"] = "half precision: --trainer.precision bf16-mixed"
    if is_on_gpu and isinstance(model, BaseModule) and model.compile_net is None:
        texts["compiling"] = "compiling: --model.compile_net inductor"
    return texts
