"""What to try next, from where the time went and how busy the devices were."""

import os
import sys
from typing import Any, NamedTuple

import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.utils.data import DataLoader, TensorDataset

from lightbase.data.batches import TensorBatches
from lightbase.data.module import BaseDataModule
from lightbase.devices.devices import has_bf16
from lightbase.devices.steps import obstacle
from lightbase.module import BaseModule
from lightbase.watch.device_monitor import DeviceMonitor
from lightbase.watch.step_timer import StepTimer, shares, step_ms


class Facts(NamedTuple):
    """What a training was like."""

    shares: dict[str, float]  # of the time of steps, by phase
    step_ms: float
    remedies: dict[str, str]
    num_processes: int = 1
    busy: float | None = (
        None  # share of the time in which the least busy GPU ran anything; None without one
    )
    memory: float = 0.0  # share of the fullest GPU's memory in use at the peak
    logs_each_step: bool = False  # by self.log, not by --trainer.log_every_n_steps 1


def advice(facts: Facts) -> list[str]:
    """One sentence, or two, that each name a finding and the flags to try, the most urgent
    first."""
    share, busy, sentences = facts.shares, facts.busy, list[str]()
    overhead, compute = (
        share["optimizer"] + share["logging"] + share["other"],
        share["forward"] + share["backward"],
    )
    # Python and kernel launches take longer than the arithmetic
    small = ("several steps", "fused optimiser", "larger batch", "compiling")

    def tell(finding: str, *names: str, otherwise: str = "") -> None:
        possible = [facts.remedies[name] for name in names if name in facts.remedies][
            :2
        ]  # best first
        sentences.append(
            f"{finding}; try {', or '.join(possible)}" if possible else finding + otherwise
        )

    if facts.memory > 0.92:
        tell(f"GPU memory was {facts.memory:.0%} full", "smaller batch", "half precision")
    if (waits := share["data_loading"]) > (0.1 if "tensors" in facts.remedies else 0.3):
        tell(
            f"Steps waited for data {waits:.0%} of their time",
            "tensors",
            "resident data",
            "workers",
            "larger batch",
        )
    if (copies := share["transfer_transforms"]) > 0.3:
        tell(
            f"Copies to the device and transforms took {copies:.0%} of the time",
            "resident data",
            "larger batch",
        )
    if (logging := share["logging"]) > 0.1:
        way_out = "rarer calls" if facts.logs_each_step else "rarer logging"
        tell(f"Logging and the progress bar took {logging:.0%} of the time of steps", way_out)
    if facts.num_processes > 1 and (backward := share["backward"]) > 3 * share["forward"]:
        tell(
            f"Backward, with the exchange of gradients, took {backward:.0%}",
            "larger batch",
            "rarer exchanges",
        )
    if busy is not None and busy < 0.6:
        tell(
            f"The GPU was busy {busy:.0%} of the time: steps of {facts.step_ms:.2f} ms are "
            "too small for it",
            *small,
        )
    if busy is None and facts.step_ms < 3 and overhead > 0.3:
        tell(
            f"Steps of {facts.step_ms:.2f} ms are small: {overhead:.0%} of their time is not "
            "the network's",
            *small,
        )
    if share["optimizer"] > 0.4:
        tell(
            f"The optimiser took {share['optimizer']:.0%} of the time of steps",
            "larger batch",
            "compiling",
        )
    if compute > 0.6:
        # on a CPU casts to bf16 may cost more than they bring: steps of 1.7 ms became 2.3, of 7.8
        # became 6
        names = (
            ("half precision", "compiling")
            if busy is not None or facts.step_ms > 5
            else ("larger batch",)
        )
        rest = ": a smaller network, smaller inputs or a faster device are what helps"
        tell(f"The network itself took {compute:.0%} of the time of steps", *names, otherwise=rest)
    return sentences[:2] or ["No part of a step stands out; the time is well spent"]


def facts(trainer: Any) -> Facts | None:
    """Of a training that has ended; None where no timer has seen a step, or not in this process
    (ddp_spawn)."""
    timers = [callback for callback in trainer.callbacks if isinstance(callback, StepTimer)]
    seconds = timers[0].sum() if timers else {}
    if not seconds:
        return None
    busy, memory = 1.0, 0.0
    for monitor in [
        callback for callback in trainer.callbacks if isinstance(callback, DeviceMonitor)
    ]:
        for gpu, gib in monitor.gpu_memory_gib.items():
            percent = monitor.mean(f"gpu{gpu}_busy_percent")
            busy = busy if percent is None else min(busy, percent / 100)
            memory = max(memory, monitor.peak(f"gpu{gpu}_memory_gib") / gib)
    gpu_busy = busy if trainer.strategy.root_device.type == "cuda" else None
    often = (
        max(timers[0].logs.values(), default=0) > seconds["num_steps"] / 2
        and trainer.log_every_n_steps > 1
    )
    found = remedies(trainer, memory)
    return Facts(
        shares(seconds), step_ms(seconds), found, trainer.world_size, gpu_busy, memory, often
    )


def remedies(trainer: Any, memory: float) -> dict[str, str]:
    """What can be tried in a next training, and the flags for it."""
    model, data, on_gpu = (
        trainer.lightning_module,
        trainer.datamodule,
        trainer.strategy.root_device.type == "cuda",
    )
    flag, accumulate = "--trainer.accumulate_grad_batches", trainer.accumulate_grad_batches
    found = {"rarer exchanges": f"fewer exchanges: {flag} {4 * accumulate}"}
    found["rarer logging"] = (
        f"logging less often: --trainer.log_every_n_steps {10 * trainer.log_every_n_steps}"
    )
    is_ours, loader = isinstance(model, BaseModule), trainer.train_dataloader
    found["rarer calls"] = (
        "self.track in place of self.log" if is_ours else "self.log in every 100th batch alone"
    )
    known = vars(data) | dict(data.hparams) if data else {}
    batch_size, num_workers = known.get("batch_size"), known.get("num_workers")
    is_resident = isinstance(data, BaseDataModule) and bool(data.on_gpu)
    if isinstance(batch_size, int) and batch_size > 1:
        half = f"--data.batch_size {batch_size // 2} {flag} {2 * accumulate}"
        found["smaller batch"] = f"a smaller batch with accumulation: {half}"
    if isinstance(batch_size, int) and memory < 0.6:
        found["larger batch"] = f"a larger batch: --data.batch_size {4 * batch_size}"
    has_arrays = isinstance(data, BaseDataModule) and isinstance(
        data.splits.get("train"), TensorBatches
    )
    if has_arrays and memory < 0.6 and on_gpu and not is_resident:
        without = " --data.num_workers 0" * bool(num_workers)
        found["resident data"] = f"data kept on the GPU: --data.resident true{without}"
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    if isinstance(num_workers, int):
        more = min(cores // trainer.num_devices, max(2, 2 * num_workers))
        if more > max(1, num_workers) and not is_resident:
            found["workers"] = f"more workers: --data.num_workers {more}"
    elif isinstance(loader, DataLoader) and isinstance(
        loader.dataset, TensorDataset
    ):  # in memory: workers only copy
        found["tensors"] = (
            "the tensors from the `load` of a BaseDataModule, for batches made by one call (README)"
        )
    else:
        found["workers"] = f"more num_workers for the DataLoader of {type(data).__name__}"
    if type(trainer.strategy) is SingleDeviceStrategy and obstacle(trainer) is None:
        found["several steps"] = "several steps per call: --steps_per_execution 20"
    given = trainer.optimizers[0].defaults if trainer.optimizers else {}
    if (
        not is_ours and given.get("fused", True) is given.get("foreach", True) is None
    ):  # of those that torch has fused
        found["fused optimiser"] = f"{type(trainer.optimizers[0]).__name__}(..., fused=True)"
    if (on_gpu or has_bf16()) and str(trainer.precision).startswith("32"):
        is_older = on_gpu and not torch.cuda.is_bf16_supported(
            including_emulation=False
        )  # than NVIDIA's Ampere
        found["half precision"] = (
            f"half precision: --trainer.precision {'16-mixed' if is_older else 'bf16-mixed'}"
        )
    if (
        on_gpu and isinstance(model, BaseModule) and model.compile_net is None
    ):  # a CPU would need a compiler
        found["compiling"] = "compiling: --model.compile_net inductor"
    return found
