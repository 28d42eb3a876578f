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


def test_a_gpu_has_the_curves_that_nvml_gives(watched, monkeypatch, capsys):
    values: dict[str, Any] = {
        "nvmlInit": None,
        "nvmlDeviceGetHandleByUUID": "handle",
        "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=40),
        "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=3 * 2**30),
        "nvmlDeviceGetPowerUsage": 250_000,
    }
    for name, value in values.items():
        monkeypatch.setattr(pynvml, name, Mock(return_value=value))
    refused = pynvml.NVMLError(pynvml.NVML_ERROR_NO_PERMISSION)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetTemperature", Mock(side_effect=refused))
    properties = SimpleNamespace(uuid="1-2-3")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    gpus = [torch.device("cuda", 0), torch.device("cuda", 1)]
    monkeypatch.setattr(device_monitor, "devices_of", lambda _: gpus)
    found = watched()
    read = {"busy_percent": 40, "memory_gib": 3, "power_watt": 250}
    for name, value in read.items():
        assert found[f"watch/device/gpu1_{name}"][-1][1] == value
    assert "watch/device/gpu1_temperature_celsius" not in found
    assert capsys.readouterr().out.count("gpu0_temperature_celsius: ") == 1
