"""Curves of the devices: the process, stand-ins for GPUs, and what cannot be read."""

import time
from types import SimpleNamespace
from typing import Any

import psutil
import pynvml
import pytest
import torch
from example.models.mlp import MLP
from torch import Tensor
from written import curves

from lightbase.extras import device_monitor
from lightbase.extras.device_monitor import DeviceMonitor, busy_shares


class Busy(MLP):
    """Keeps one core at work for 3 ms."""

    def forward(self, x: Tensor) -> Tensor:
        end = time.process_time() + 0.003
        while time.process_time() < end:
            pass
        return super().forward(x)


@pytest.fixture
def watched(train, tmp_path, monkeypatch):
    """Return a function that trains with a monitor, and returns the points of
    watch/device/."""

    def run(flags: str, interval_s: float = 1.0) -> dict[str, list[tuple[int, float]]]:
        monkeypatch.setattr(DeviceMonitor.__init__, "__defaults__", (interval_s,))
        train("--device_monitor true", flags)
        points = curves(tmp_path / "tiny" / "version_0").items()
        start = "watch/device/"
        return {x.removeprefix(start): y for x, y in points if x.startswith(start)}

    return run


def test_cpu_and_memory_of_the_process_are_curves(watched):
    start, cpu_start = time.monotonic(), time.process_time()
    flags = "--model.net test_device_monitor.Busy --num_threads 1"
    found = watched(f"{flags} --trainer.max_epochs 4", interval_s=0.02)
    cpu_s, wall_s = time.process_time() - cpu_start, time.monotonic() - start
    share = cpu_s / wall_s  # of a core: less than 1 beside other programs
    assert found.keys() == {"cpu_percent", "memory_gib"}
    steps, busy = zip(*found["cpu_percent"], strict=True)
    assert len(steps) >= 3
    assert len(set(steps)) == len(steps)
    assert 70 * share < sum(busy) / len(busy) < 150
    memory = psutil.Process().memory_info().rss / 2**30
    assert found["memory_gib"][-1][1] == pytest.approx(memory, rel=0.2)


def test_a_short_training_has_a_point(watched):
    assert [step for step, _ in watched("--trainer.max_steps 2")["memory_gib"]] == [1]


@pytest.mark.parametrize(
    ("refused", "missing", "line"),
    [
        ("", set(), ""),
        (
            "nvmlDeviceGetHandleByUUID",
            {"busy_percent", "memory_gib", "power_watt", "temperature_celsius"},
            "no curves of GPU 0: NVML says",
        ),
        ("nvmlDeviceGetPowerUsage", {"power_watt"}, "gpu0_power_watt: "),
    ],
)
def test_a_gpu_has_the_curves_that_nvml_gives(
    watched, monkeypatch, capsys, refused, missing, line
):
    values: dict[str, Any] = {
        "nvmlInit": None,
        "nvmlDeviceGetHandleByUUID": "handle",
        "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=40),
        "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=3 * 2**30),
        "nvmlDeviceGetPowerUsage": 250_000,
        "nvmlDeviceGetTemperature": 51,
    }

    def read(name: str) -> Any:
        if name == refused:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NO_PERMISSION)
        return values[name]

    for name in values:
        monkeypatch.setattr(pynvml, name, lambda *_, name=name: read(name))
    properties = SimpleNamespace(uuid="1-2-3")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    gpus = [torch.device("cuda", i) for i in (0, 1)]
    monkeypatch.setattr(device_monitor, "devices_of", lambda _: gpus)
    found = watched("--trainer.max_epochs 1", interval_s=0.0)
    expected = {"busy_percent": 40, "memory_gib": 3, "power_watt": 250}
    for name, value in (expected | {"temperature_celsius": 51}).items():
        for gpu in ("gpu0", "gpu1"):
            if name in missing:
                assert f"{gpu}_{name}" not in found
            else:
                assert {x for _, x in found[f"{gpu}_{name}"]} == {value}
    assert capsys.readouterr().out.count(line or "Trained 1 epochs") == 1


def test_the_load_of_each_gpu_is_a_mean():
    monitor = DeviceMonitor()
    names = [f"watch/device/gpu{i}_busy_percent" for i in (0, 1)]
    monitor.readings = {names[0]: [40, 60], names[1]: [90], "watch/device/other": [1]}
    trainer: Any = SimpleNamespace(callbacks=[monitor])
    assert busy_shares(trainer) == [0.5, 0.9]
