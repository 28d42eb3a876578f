"""Curves of the load of the training process and of the GPUs, beside the loss.

`DeviceMonitor` reads the devices in a thread. `busy_shares` returns the result for the
advice at the end of a training.
"""

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
"""Functions that read one value, by the name of the curve without watch/device/."""


class DeviceMonitor(Callback):
    """Writes curves of the devices; their names begin with watch/device/. Only the
    first process reads the devices.

    cpu_percent and memory_gib are the values of this process; 100 % is one core. Each
    GPU of --trainer.devices has gpuI_busy_percent, gpuI_memory_gib, gpuI_power_watt and
    gpuI_temperature_celsius, where I is its index in torch. They are the values that
    nvidia-smi shows, for all programs on the GPU. NVML, the library behind nvidia-smi,
    reads them. A value that NVML cannot read has no curve, and a line is printed.

    A point is the mean of the readings since the point before it. There is at most one
    point in log_every_n_steps steps.

    interval_s: Seconds between two readings. More readings would not show more: NVML's
        busy_percent is itself a mean over 1/6 to 1 s.
    """

    def __init__(self, interval_s: float = 0.5) -> None:
        self.interval_s = interval_s
        self.readers: Readers = {}
        self.readings: dict[str, list[float]] = {}  # since the start, by curve
        self.recent: dict[str, list[float]] = {}  # since the last point, by curve
        self.written_at = 0  # step of the last point
        self.stopped = threading.Event()
        self.thread: threading.Thread | None = None

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Find out what can be read, and start the thread, in the first process."""
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
        """Write a point every log_every_n_steps steps. The thread does not write,
        because a logger may not allow calls from two threads."""
        if num_steps(trainer) - self.written_at >= trainer.log_every_n_steps:
            self._write(trainer)

    def on_train_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Stop the thread, and write the last point."""
        self._stop()
        if num_steps(trainer) > self.written_at:
            self._write(trainer)

    def on_exception(self, *_: Any) -> None:
        """Stop the thread if the training ends with an error."""
        self._stop()

    def _stop(self) -> None:
        """End the thread, and wait for its last reading."""
        if self.thread is not None:
            self.stopped.set()
            self.thread.join()
            self.thread = None

    def _write(self, trainer: Any) -> None:
        """Write the mean of the recent readings of each curve, and drop them."""
        if trainer.log_every_n_steps and self.recent:
            recent = list(self.recent.items())
            self.recent = {}
            self.written_at = num_steps(trainer)
            log_values(
                trainer, {f"watch/device/{name}": fmean(x) for name, x in recent}
            )

    def _watch(self) -> None:
        """Read every `interval_s` seconds, in the thread. Read once more when the
        training ends, so that a short training has a point, too."""
        is_last = False
        while not is_last:
            is_last = self.stopped.wait(self.interval_s)
            for name, read in list(self.readers.items()):
                try:
                    value = read()
                # the user may not read this value, or the GPU has failed
                except pynvml.NVMLError as error:
                    say(f"Device monitor: no {name}: {error}")
                    del self.readers[name]
                    continue
                for readings in (self.readings, self.recent):
                    readings.setdefault(name, []).append(value)


def busy_shares(trainer: Any) -> list[float]:
    """Return for each GPU the share of the time in which it ran anything, in [0, 1].
    Call it after a training with a DeviceMonitor; without one the list is empty. A GPU
    that NVML cannot read is left out."""
    shares = []
    for callback in trainer.callbacks:
        if isinstance(callback, DeviceMonitor):
            for name, values in callback.readings.items():
                if name.endswith("_busy_percent"):
                    shares.append(fmean(values) / 100)
    return shares


def gpu_readers(gpu: torch.device) -> Readers:
    """Return the functions that read a GPU.

    NVML may be missing, as in many containers, and it does not know the parts of a
    divided GPU (MIG). Then a line is printed, and the only value is the memory that
    torch has reserved in this process.
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
