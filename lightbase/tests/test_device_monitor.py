"""Curves of the devices: the process, a stand-in for a GPU, and what cannot be read."""

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import psutil
import pynvml
import pytest
import torch
from example.models.mlp import MLP
from torch import Tensor
from written import curves

from lightbase.extras.device_monitor import DeviceMonitor, busy_shares


class Busy(MLP):
    """Keeps one core at work for 3 ms."""

    def forward(self, x: Tensor) -> Tensor:
        end = time.process_time() + 0.003
        while time.process_time() < end:
            pass
        return super().forward(x)


def test_cpu_and_memory_of_the_process_are_curves(train, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        DeviceMonitor.__init__, "__defaults__", (0.02,)
    )  # s between two points
    flags = (
        "--model.net test_device_monitor.Busy --num_threads 1 --trainer.max_epochs 4"
    )
    start, cpu_start = time.monotonic(), time.process_time()
    train("--device_monitor", "true", *flags.split())
    cpu_s, wall_s = time.process_time() - cpu_start, time.monotonic() - start
    share = cpu_s / wall_s  # of a core: less than 1 beside other programs
    found = curves(tmp_path / "tiny" / "version_0")
    for name in ("cpu_percent", "memory_gib"):
        steps = [step for step, _ in found[f"watch/device/{name}"]]
        assert len(steps) >= 3
        assert steps == sorted(set(steps))
        assert steps[-1] == 4 * 19 - 1
    busy = [value for _, value in found["watch/device/cpu_percent"]]
    assert 70 * share < sum(busy) / len(busy) < 150
    memory = psutil.Process().memory_info().rss / 2**30
    assert found["watch/device/memory_gib"][-1][1] == pytest.approx(memory, rel=0.2)


def test_a_short_training_has_a_point(train, tmp_path):
    train("--device_monitor", "true", "--trainer.max_steps", 2)
    points = curves(tmp_path / "tiny" / "version_0")["watch/device/memory_gib"]
    assert [step for step, _ in points] == [1]


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """NVML with one GPU, at 40 and 60 % in turn; it refuses the functions of these
    names."""
    refused: set[str] = set()
    turns = iter([40, 60] * 100)
    values: dict[str, Callable[[], Any]] = {
        "nvmlInit": lambda: None,
        "nvmlDeviceGetHandleByUUID": lambda: "handle",
        "nvmlDeviceGetUtilizationRates": lambda: SimpleNamespace(gpu=next(turns)),
        "nvmlDeviceGetMemoryInfo": lambda: SimpleNamespace(used=3 * 2**30),
        "nvmlDeviceGetPowerUsage": lambda: 250_000,
        "nvmlDeviceGetTemperature": lambda: 51,
    }

    def read(name: str) -> Any:
        if name in refused:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NO_PERMISSION)
        return values[name]()

    for name in values:
        monkeypatch.setattr(pynvml, name, lambda *_, name=name: read(name))
    properties = SimpleNamespace(uuid="1-2-3")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    return refused


def watched(
    gpus: list[torch.device], seconds: float = 0.2
) -> tuple[DeviceMonitor, dict[str, list[float]]]:
    """A monitor that has watched a stand-in for a Trainer on these GPUs, and what it
    has written."""
    written: dict[str, list[float]] = {}

    def log_metrics(values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            written.setdefault(name, []).append(value)

    trainer: Any = SimpleNamespace(
        is_global_zero=True,
        global_step=0,
        log_every_n_steps=1,
        loggers=[SimpleNamespace(log_metrics=log_metrics)],
        strategy=SimpleNamespace(parallel_devices=gpus),
        lightning_module=SimpleNamespace(automatic_optimization=True),
    )
    monitor = DeviceMonitor(interval_s=0.01)
    monitor.on_train_start(trainer, None)  # type: ignore[arg-type]
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        trainer.global_step += 1
        monitor.on_train_batch_end(trainer)
        time.sleep(0.001)
    monitor.on_train_end(trainer, None)  # type: ignore[arg-type]
    monitor.on_fit_end(trainer, None)  # type: ignore[arg-type]
    return monitor, written


@pytest.mark.usefixtures("refused")
def test_a_gpu_has_four_curves() -> None:
    monitor, written = watched([torch.device("cuda", 0), torch.device("cuda", 1)])
    for gpu in ("gpu0", "gpu1"):
        assert set(written[f"watch/device/{gpu}_memory_gib"]) == {3}
        assert set(written[f"watch/device/{gpu}_power_watt"]) == {250}
        assert set(written[f"watch/device/{gpu}_temperature_celsius"]) == {51}
        assert set(written[f"watch/device/{gpu}_busy_percent"]) <= {40, 60}
    trainer: Any = SimpleNamespace(callbacks=[monitor])
    assert busy_shares(trainer) == pytest.approx([0.5, 0.5], abs=0.1)


def test_without_nvml_a_gpu_has_no_curves(refused, capsys):
    refused.add("nvmlDeviceGetHandleByUUID")
    monitor, written = watched([torch.device("cuda", 0)])
    assert {*written} == {"watch/device/cpu_percent", "watch/device/memory_gib"}
    trainer: Any = SimpleNamespace(callbacks=[monitor])
    assert busy_shares(trainer) == []
    assert capsys.readouterr().out.count("no curves of GPU 0: NVML says") == 1


def test_a_value_that_nvml_refuses_has_no_curve(refused, capsys):
    refused.add("nvmlDeviceGetPowerUsage")
    _, written = watched([torch.device("cuda", 0)])
    assert "watch/device/gpu0_memory_gib" in written
    assert "watch/device/gpu0_power_watt" not in written
    assert capsys.readouterr().out.count("no gpu0_power_watt: ") == 1
