"""How busy the devices are: GPU and process, as curves beside the loss."""

import threading
from collections.abc import Callable
from typing import Any

import psutil
import pynvml
import torch
from lightning import LightningModule

from lightbase.curves import MayMissSteps
from lightbase.devices.devices import HasDevices
from lightbase.ranks import say

GIB = 2**30


class DeviceMonitor(MayMissSteps):
    """Reads the devices in a thread of the first process, and writes means on the axis of steps: at
    most one point every log_every_n_steps steps, of the time since the last one.

    Curves, in watch/device/: cpu_percent (of this process; 100 is one core), memory_gib (resident,
    of this process), and for GPU i that the run uses on this machine, numbered as in
    --trainer.devices: gpuI_busy_percent (share of the time in which it ran anything, as nvidia-smi
    shows it), gpuI_memory_gib (all programs), gpuI_power_watt, gpuI_temperature_celsius. What NVML
    cannot read, as of a part of a GPU (MIG) and in many containers, is left out, with a line that
    says so; the memory is that of this process then.
    """

    def __init__(self, interval_s: float = 0.5) -> None:
        self.interval_s = interval_s  # NVML's utilisation is itself a mean over 1/6 to 1 s
        self.readers: dict[str, Callable[[], float]] = {}
        self.thread: threading.Thread | None = None
        self.gpu_memory_gib: dict[int, float] = {}  # of each GPU that is watched
        self.totals: dict[str, tuple[int, float, float]] = {}  # of each curve: number, sum, highest
        self.recent: dict[str, list[float]] = {}  # readings since the last point

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        process = psutil.Process()
        process.cpu_percent()  # each call says what was used since the last
        self.readers = {
            "cpu_percent": process.cpu_percent,
            "memory_gib": lambda: process.memory_info().rss / GIB,
        }
        strategy = trainer.strategy
        devices = (
            strategy.parallel_devices
            if isinstance(strategy, HasDevices)
            else [strategy.root_device]
        )
        for gpu in devices:
            if gpu.type == "cuda":
                self.gpu_memory_gib[gpu.index] = (
                    torch.cuda.get_device_properties(gpu).total_memory / GIB
                )
                self.readers |= gpu_readers(gpu)
        self.totals, self.recent, self.written_at = {}, {}, trainer.global_step
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self._watch, name="device monitor", daemon=True)
        self.thread.start()

    def on_train_batch_end(
        self, trainer: Any, *_: Any
    ) -> None:  # loggers need not bear a second thread
        every = trainer.log_every_n_steps
        if every and self.recent and trainer.global_step - self.written_at >= every:
            self._write(trainer)

    def on_train_end(self, trainer: Any, pl_module: LightningModule) -> None:
        self._end()
        if trainer.log_every_n_steps and self.recent and trainer.global_step > self.written_at:
            self._write(trainer)

    def on_exception(self, *_: Any) -> None:
        self._end()

    def _end(self) -> None:
        if self.thread is not None:
            self.stopped.set()
            self.thread.join()
            self.thread = None

    def _write(self, trainer: Any) -> None:
        recent, self.recent, self.written_at = self.recent, {}, trainer.global_step
        values = {
            f"watch/device/{name}": sum(numbers) / len(numbers)
            for name, numbers in list(recent.items())
        }
        for logger in trainer.loggers:
            # as Lightning counts: a resumed run drops its first own step and what comes after
            logger.log_metrics(values, trainer.global_step - 1)

    def on_fit_end(self, *_: Any) -> None:
        if not self.totals:
            return
        # below the bar, which is closed now
        cpu = (
            f"{self.mean('cpu_percent'):.0f} % on average, {self.peak('cpu_percent'):.0f} % at most"
        )
        say(
            f"CPU of this process: {cpu} (100 % is one core); memory "
            f"{self.peak('memory_gib'):.1f} GiB at most"
        )
        for gpu, gib in self.gpu_memory_gib.items():
            busy, memory = f"gpu{gpu}_busy_percent", self.peak(f"gpu{gpu}_memory_gib")
            is_read = busy in self.totals
            load = (
                f"{self.mean(busy):.0f} % busy on average, {self.peak(busy):.0f} % at most; "
                if is_read
                else ""
            )
            say(f"GPU {gpu}: {load}memory {memory:.1f} of {gib:.1f} GiB at most")

    def mean(self, name: str) -> float | None:
        """Of a curve, since the start of training; None without a reading."""
        num, total, _ = self.totals.get(name, (0, 0.0, 0.0))
        return total / num if num else None

    def peak(self, name: str) -> float:
        """0 without a reading."""
        return self.totals[name][2] if name in self.totals else 0.0

    def _watch(self) -> None:
        is_last = False
        while not is_last:
            is_last = self.stopped.wait(self.interval_s)
            for name, read in list(self.readers.items()):
                try:
                    value = read()
                except (
                    pynvml.NVMLError
                ) as error:  # a GPU that has gone, for instance: training will know
                    say(f"Device monitor: no {name} any more: {error}")
                    del self.readers[name]
                    continue
                num, total, peak = self.totals.get(name, (0, 0.0, 0.0))
                self.totals[name] = num + 1, total + value, max(peak, value)
                self.recent.setdefault(name, []).append(value)


def gpu_readers(gpu: torch.device) -> dict[str, Callable[[], float]]:
    """Functions that read a GPU through NVML; those that it refuses are missing, with a line, but
    for the memory."""
    own = {f"gpu{gpu.index}_memory_gib": lambda: torch.cuda.memory_reserved(gpu) / GIB}
    try:
        pynvml.nvmlInit()
        # torch's numbers are those of CUDA_VISIBLE_DEVICES, NVML's are not
        handle = pynvml.nvmlDeviceGetHandleByUUID(
            f"GPU-{torch.cuda.get_device_properties(gpu).uuid}"
        )
    except pynvml.NVMLError as error:
        say(f"Device monitor: of GPU {gpu.index} only this process's memory: NVML says {error}")
        return own
    readers: dict[str, Callable[[], float]] = {
        "busy_percent": lambda: pynvml.nvmlDeviceGetUtilizationRates(handle).gpu,
        "memory_gib": lambda: pynvml.nvmlDeviceGetMemoryInfo(handle).used / GIB,
        "power_watt": lambda: pynvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
        "temperature_celsius": lambda: pynvml.nvmlDeviceGetTemperature(
            handle, pynvml.NVML_TEMPERATURE_GPU
        ),
    }
    found, refused = {}, []
    for name, read in readers.items():
        try:
            read()
            found[f"gpu{gpu.index}_{name}"] = read
        except pynvml.NVMLError as error:
            refused.append(f"no {name} ({error})")
    if refused:
        say(f"Device monitor: GPU {gpu.index}: {', '.join(refused)}")
    return own | found
