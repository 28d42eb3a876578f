"""Curves of the devices: the process, stand-ins for GPUs, and what cannot be read."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import psutil
import pynvml
import pytest
import torch
from written import curves

from lightbase.watch import device_monitor
from lightbase.watch.device_monitor import DeviceMonitor, busy_shares


@pytest.fixture
def watched(train, tmp_path, monkeypatch):
    """Return a function that trains with a monitor, and returns the points of all
    curves. There are points on all log steps."""

    def run(flags: str = "--num_threads 1") -> dict[str, list[tuple[int, float]]]:
        monkeypatch.setattr(device_monitor, "INTERVAL_S", 0.0)
        train("--device_monitor true --trainer.max_epochs 1", flags)
        return curves(tmp_path / "tiny" / "version_0")

    return run


def test_cpu_and_memory_of_the_process_are_curves(watched):
    found = watched()
    steps, busy = zip(*found["watch/device/cpu_percent"], strict=True)
    assert steps == (4, 9, 14)  # log steps
    assert 0 < sum(busy) / len(busy) < 300  # of a core, in steps of 10 ms
    memory = psutil.Process().memory_info().rss / 2**30
    _, last = found["watch/device/memory_gib"][-1]
    assert last == pytest.approx(memory, rel=0.2)


@pytest.mark.parametrize(
    ("refused", "missing", "line"),
    [
        ("", "nothing", "Trained 1 epochs"),
        ("nvmlDeviceGetPowerUsage", "power_watt", "gpu0_power_watt: "),
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
    for name, value in values.items():
        reader = Mock(return_value=value)
        if name == refused:
            reader.side_effect = pynvml.NVMLError(pynvml.NVML_ERROR_NO_PERMISSION)
        monkeypatch.setattr(pynvml, name, reader)
    properties = SimpleNamespace(uuid="1-2-3")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    gpus = [torch.device("cuda", 0), torch.device("cuda", 1)]
    monkeypatch.setattr(device_monitor, "devices_of", lambda _: gpus)
    found = watched()
    read = {"busy_percent": 40, "memory_gib": 3, "power_watt": 250}
    read["temperature_celsius"] = 51
    for name, value in read.items():
        curve = f"watch/device/gpu1_{name}"
        assert (curve in found) == (missing not in curve)
        assert curve not in found or found[curve][-1][1] == value
    assert capsys.readouterr().out.count(line) == 1


def test_the_load_of_each_gpu_is_a_mean():
    monitor = DeviceMonitor()
    monitor.readings = {"gpu0_busy_percent": [40, 60], "gpu1_busy_percent": [90]}
    trainer: Any = SimpleNamespace(callbacks=[monitor])
    assert busy_shares(trainer) == [0.5, 0.9]
