"""Curves of the load of the training process and of the GPUs, beside the loss."""

import time
from collections.abc import Callable
from statistics import fmean
from typing import Any

import torch
from lightning import Callback

from lightbase.config.errors import say
from lightbase.model.curves import log_values
from lightbase.run.devices import devices_of

try:
    import psutil
    import pynvml
except ModuleNotFoundError:  # the extra "tools"
    pynvml = None

GIB = 2**30

INTERVAL_S = 1.0
"""Seconds between two points, at least. More points would not show more: NVML's
busy_percent is itself a mean over 1/6 to 1 s."""


class DeviceMonitor(Callback):
    """Writes curves of the devices; their names begin with watch/device/. Only the
    first process reads the devices.

    cpu_percent, a mean since the last point, and memory_gib are of this process; 100 %
    is one core. Each GPU of --trainer.devices has gpuI_busy_percent, gpuI_memory_gib,
    gpuI_power_watt and gpuI_temperature_celsius, where I is its index in torch. They
    are the values that nvidia-smi shows, for all programs on the GPU. A value that
    NVML, the library behind nvidia-smi, cannot read has no curve.

    There is a point on log steps, but at most one in INTERVAL_S seconds.

    readers: Functions that read one value, by the name of the curve.
    readings: All values so far, by the name of the curve.
    """

    def __init__(self) -> None:
        self.readers: dict[str, Callable[[], float]] = {}
        self.readings: dict[str, list[float]] = {}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Find out what can be read, in the first process."""
        self.read_at = time.monotonic()  # of the last point
        if not trainer.is_global_zero:
            return
        if pynvml is None:
            say('Device monitor: no curves without pip install -e ".[tools]"')
            return
        process = psutil.Process()
        process.cpu_percent()  # each call returns the load since the call before it
        self.readers = {
            "watch/device/cpu_percent": process.cpu_percent,
            "watch/device/memory_gib": lambda: process.memory_info().rss / GIB,
        }
        for gpu in devices_of(trainer.strategy):
            if gpu.type == "cuda":
                self.readers |= gpu_readers(gpu)

    def watch(self, trainer: Any, _: Any, __: Any, is_log_step: bool) -> None:
        """Read the devices if it is time. `BetweenSteps` calls this."""
        now = time.monotonic()
        if not is_log_step or now - self.read_at < INTERVAL_S:
            return
        self.read_at = now
        values = {}
        for name, read in list(self.readers.items()):
            try:
                values[name] = read()
                self.readings.setdefault(name, []).append(values[name])
            # the user may not read this value, or the GPU has failed
            except pynvml.NVMLError as error:
                say(f"Device monitor: no {name}: {error}")
                del self.readers[name]
        log_values(trainer, values)


def busy_shares(trainer: Any) -> list[float]:
    """Return for each GPU that a DeviceMonitor could read the share of the time in
    which it ran anything, in [0, 1]."""
    return [
        fmean(values) / 100
        for callback in trainer.callbacks
        if isinstance(callback, DeviceMonitor)
        for name, values in callback.readings.items()
        if name.endswith("_busy_percent")
    ]


def gpu_readers(gpu: torch.device) -> dict[str, Callable[[], float]]:
    """Return the functions that read a GPU, or print a line: NVML may be missing, as in
    many containers, and it does not know the parts of a divided GPU (MIG)."""
    try:
        pynvml.nvmlInit()
        # torch counts the GPUs in CUDA_VISIBLE_DEVICES, NVML counts all of them
        uuid = torch.cuda.get_device_properties(gpu).uuid
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    except pynvml.NVMLError as error:
        say(f"Device monitor: no curves of GPU {gpu.index}: NVML says {error}")
        return {}
    celsius = pynvml.NVML_TEMPERATURE_GPU
    readers = {
        "busy_percent": lambda: pynvml.nvmlDeviceGetUtilizationRates(handle).gpu,
        "memory_gib": lambda: pynvml.nvmlDeviceGetMemoryInfo(handle).used / GIB,
        "power_watt": lambda: pynvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
        "temperature_celsius": lambda: pynvml.nvmlDeviceGetTemperature(handle, celsius),
    }
    start = f"watch/device/gpu{gpu.index}_"
    return {start + name: read for name, read in readers.items()}
