"""How busy the devices are: GPU and process, as curves beside the loss."""

import threading
from collections.abc import Callable
from typing import Any

import psutil
import pynvml
import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger

from project.base.rank import say

GIB = 2**30
INTERVAL_S = 0.5
"""Between two readings. NVML's utilisation is itself a mean over 1/6 to 1 s."""


class DeviceMonitor(Callback):
    """Reads the devices twice a second in a thread of the first process, and writes means on the axis of steps: at most
    one point every log_every_n_steps steps, of the time since the last one.

    Curves: device/cpu_percent (of this process; 100 is one core), device/memory_gib (resident, of this process), and
    for GPU i that the run uses on this machine, numbered as in --trainer.devices: device/gpuI_busy_percent (share of
    the time in which it ran anything, as nvidia-smi shows it), gpuI_memory_gib (all programs), gpuI_power_watt,
    gpuI_temperature_celsius. What NVML cannot read is left out, with a line that says so.
    """

    def __init__(self, interval_s: float = INTERVAL_S) -> None:
        self.interval_s = interval_s
        self.readers: dict[str, Callable[[], float]] = {}
        self.thread: threading.Thread | None = None
        self.gpu_memory_gib: dict[int, float] = {}
        """Of each GPU that is watched."""
        self.totals: dict[str, list[float]] = {}
        """Of each curve since the start: number of readings, their sum, the highest."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        self.readers = process_readers()
        several = getattr(trainer.strategy, "parallel_devices", None) or [trainer.strategy.root_device]
        gpus = [device for device in several if device.type == "cuda"]
        self.gpu_memory_gib = {gpu.index or 0: torch.cuda.get_device_properties(gpu).total_memory / GIB for gpu in gpus}
        for gpu in gpus:
            self.readers |= gpu_readers(gpu)
        self.totals = {name: [0, 0.0, 0.0] for name in self.readers}
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self._watch, args=(trainer,), name="device monitor", daemon=True)
        self.thread.start()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stop()

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero and (summary := self.summary()):  # below the bar, which is closed now
            say(summary)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._stop()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._stop()

    def mean(self, name: str) -> float | None:
        """Of a curve, since the start of training; None without a reading."""
        num, total, _ = self.totals.get(name, (0, 0.0, 0.0))
        return total / num if num else None

    def peak(self, name: str) -> float:
        return self.totals[name][2]

    def summary(self) -> str:
        if self.mean("cpu_percent") is None:
            return ""
        mean, peak, memory = self.mean("cpu_percent"), self.peak("cpu_percent"), self.peak("memory_gib")
        lines = [
            f"CPU of this process: {mean:.0f} % on average, {peak:.0f} % at most (100 % is one core); "
            f"memory {memory:.1f} GiB at most"
        ]
        for gpu, gib in self.gpu_memory_gib.items():
            if self.mean(f"gpu{gpu}_busy_percent") is not None:
                line = f"GPU {gpu}: {self.mean(f'gpu{gpu}_busy_percent'):.0f} % busy on average, "
                line += f"{self.peak(f'gpu{gpu}_busy_percent'):.0f} % at most"
                if self.mean(f"gpu{gpu}_memory_gib") is not None:
                    line += f"; memory {self.peak(f'gpu{gpu}_memory_gib'):.1f} of {gib:.1f} GiB at most"
                lines.append(line)
        return "\n".join(lines)

    def __getstate__(self) -> dict[str, Any]:
        return vars(DeviceMonitor(self.interval_s))  # for ddp_spawn

    def _stop(self) -> None:
        if self.thread is not None:
            self.stopped.set()
            self.thread.join()
            self.thread = None

    def _watch(self, trainer: Trainer) -> None:
        every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
        written_at = trainer.global_step
        sums: dict[str, list[float]] = {}
        is_last = False
        while not is_last:
            is_last = self.stopped.wait(self.interval_s)
            for name, value in self._read().items():
                num, total, peak = self.totals[name]
                self.totals[name] = [num + 1, total + value, max(peak, value)]
                num, total = sums.get(name, (0, 0.0))
                sums[name] = [num + 1, total + value]
            step = trainer.global_step
            if not every or not isinstance(trainer.logger, TensorBoardLogger):
                sums = {}
            elif step - written_at >= every or (is_last and step > written_at):
                for name, (num, total) in sums.items():
                    # as Lightning counts: a resumed run drops its first own step and what comes after
                    trainer.logger.experiment.add_scalar(f"device/{name}", total / num, step - 1)
                written_at, sums = step, {}

    def _read(self) -> dict[str, float]:
        values = {}
        for name, read in list(self.readers.items()):
            try:
                values[name] = read()
            except pynvml.NVMLError as error:  # a GPU that has gone, for instance: training will know
                say(f"Device monitor: no {name} any more: {error}")
                del self.readers[name]
        return values


def process_readers() -> dict[str, Callable[[], float]]:
    process = psutil.Process()
    process.cpu_percent()  # each call says what was used since the last
    return {"cpu_percent": process.cpu_percent, "memory_gib": lambda: process.memory_info().rss / GIB}


def gpu_readers(gpu: torch.device) -> dict[str, Callable[[], float]]:
    """Functions that read a GPU through NVML; those that it refuses, all without NVML, are missing, with a line."""
    try:
        pynvml.nvmlInit()
        # torch's numbers are those of CUDA_VISIBLE_DEVICES, NVML's are not
        uuid = torch.cuda.get_device_properties(gpu).uuid
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    except pynvml.NVMLError as error:
        say(f"Device monitor: no curves of GPU {gpu.index}: NVML says {error}")
        return {}
    readers: dict[str, Callable[[], float]] = {
        "busy_percent": lambda: pynvml.nvmlDeviceGetUtilizationRates(handle).gpu,
        "memory_gib": lambda: pynvml.nvmlDeviceGetMemoryInfo(handle).used / GIB,
        "power_watt": lambda: pynvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
        "temperature_celsius": lambda: pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU),
    }
    refused = {}
    for name, read in list(readers.items()):
        try:
            read()
        except pynvml.NVMLError as error:
            refused[name] = str(error)
            del readers[name]
    if refused:
        say(f"Device monitor: GPU {gpu.index}: {', '.join(f'no {name} ({why})' for name, why in refused.items())}")
    return {f"gpu{gpu.index}_{name}": read for name, read in readers.items()}
