"""How busy the devices are: GPU and process, as curves beside the loss."""

import threading
from collections.abc import Callable
from statistics import fmean
from typing import Any

import psutil
import pynvml
import torch
from lightning import Callback, LightningModule

from lightbase.core.curves import log_values, num_steps
from lightbase.core.devices import devices_of
from lightbase.core.errors import say

GIB = 2**30
Readers = dict[str, Callable[[], float]]


class DeviceMonitor(Callback):
    """Reads the devices in a thread of the first process, and writes curves in
    watch/device/.

    cpu_percent (100 is one core) and memory_gib are of this process. GPU I of
    --trainer.devices has gpuI_busy_percent, gpuI_memory_gib, gpuI_power_watt and
    gpuI_temperature_celsius, as nvidia-smi shows them. What NVML cannot read has no
    curve, and a line says so.

    A point is the mean since the point before it; there is at most one in
    log_every_n_steps steps.

    interval_s: Seconds between two readings. NVML's busy_percent is itself a mean over
        1/6 to 1 s.
    """

    def __init__(self, interval_s: float = 0.5) -> None:
        self.interval_s = interval_s
        self.readers: Readers = {}
        self.readings: dict[str, list[float]] = {}  # since the start, by curve
        self.recent: dict[str, list[float]] = {}  # since the last point
        self.written_at = 0  # step of the last point
        self.stopped = threading.Event()
        self.thread: threading.Thread | None = None

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        process = psutil.Process()
        process.cpu_percent()  # each call returns the load since the call before it
        self.readers = {
            "cpu_percent": process.cpu_percent,
            "memory_gib": lambda: process.memory_info().rss / GIB,
        }
        for gpu in devices_of(trainer.strategy):
            if gpu.type == "cuda":
                self.readers |= gpu_readers(gpu)
        self.readings = {}
        self.recent = {}
        self.written_at = num_steps(trainer)
        self.stopped.clear()
        self.thread = threading.Thread(
            target=self._watch, name="device monitor", daemon=True
        )
        self.thread.start()

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        # written here and not by the thread: loggers need not bear a second thread
        if num_steps(trainer) - self.written_at >= trainer.log_every_n_steps:
            self._write(trainer)

    def on_train_end(self, trainer: Any, pl_module: LightningModule) -> None:
        self._stop()
        if num_steps(trainer) > self.written_at:
            self._write(trainer)

    def on_exception(self, *_: Any) -> None:
        self._stop()

    def _stop(self) -> None:
        if self.thread is not None:
            self.stopped.set()
            self.thread.join()
            self.thread = None

    def _write(self, trainer: Any) -> None:
        if trainer.log_every_n_steps and self.recent:
            recent = list(self.recent.items())
            self.recent = {}
            self.written_at = num_steps(trainer)
            log_values(
                trainer, {f"watch/device/{name}": fmean(x) for name, x in recent}
            )

    def _watch(self) -> None:
        """Read in intervals, and once when the training ends, so that a short one has a
        point, too."""
        is_last = False
        while not is_last:
            is_last = self.stopped.wait(self.interval_s)
            for name, read in list(self.readers.items()):
                try:
                    value = read()
                except pynvml.NVMLError as error:  # not permitted, or the GPU has gone
                    say(f"Device monitor: no {name}: {error}")
                    del self.readers[name]
                    continue
                for readings in (self.readings, self.recent):
                    readings.setdefault(name, []).append(value)


def busy_shares(trainer: Any) -> list[float]:
    """Return the share of the time in which each GPU ran anything, in [0, 1], after a
    training with a DeviceMonitor. GPUs that cannot be read are left out."""
    shares = []
    for callback in trainer.callbacks:
        if isinstance(callback, DeviceMonitor):
            for name, values in callback.readings.items():
                if name.endswith("_busy_percent"):
                    shares.append(fmean(values) / 100)
    return shares


def gpu_readers(gpu: torch.device) -> Readers:
    """Return functions that read a GPU through NVML, by curve.

    Without NVML, as on a part of a GPU (MIG) and in many containers, a line says so,
    and the memory is only that of this process.
    """
    prefix = f"gpu{gpu.index}"
    try:
        pynvml.nvmlInit()
        # torch counts the GPUs in CUDA_VISIBLE_DEVICES, NVML counts all of them
        uuid = torch.cuda.get_device_properties(gpu).uuid
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    except pynvml.NVMLError as error:
        text = f"of GPU {gpu.index} only this process's memory: NVML says {error}"
        say(f"Device monitor: {text}")
        return {f"{prefix}_memory_gib": lambda: torch.cuda.memory_reserved(gpu) / GIB}
    celsius = pynvml.NVML_TEMPERATURE_GPU
    return {
        f"{prefix}_busy_percent": lambda: (
            pynvml.nvmlDeviceGetUtilizationRates(handle).gpu
        ),
        f"{prefix}_memory_gib": lambda: (
            pynvml.nvmlDeviceGetMemoryInfo(handle).used / GIB
        ),
        f"{prefix}_power_watt": lambda: pynvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
        f"{prefix}_temperature_celsius": lambda: pynvml.nvmlDeviceGetTemperature(
            handle, celsius
        ),
    }
