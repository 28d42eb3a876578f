"""Curves of the devices: the process, stand-ins for GPUs, and what cannot be read."""

from types import SimpleNamespace
from typing import Any

import psutil
import pynvml
import pytest
import torch
from written import curves

from lightbase.extras import device_monitor
from lightbase.extras.device_monitor import DeviceMonitor, busy_shares


@pytest.fixture
def watched(train, tmp_path, monkeypatch):
    """Return a function that trains with a monitor, and returns the points of all
    curves."""

    def run(flags: str, interval_s: float = 1.0) -> dict[str, list[tuple[int, float]]]:
        monkeypatch.setattr(DeviceMonitor.__init__, "__defaults__", (interval_s,))
        train("--device_monitor true", flags)
        return curves(tmp_path / "tiny" / "version_0")

    return run


def test_cpu_and_memory_of_the_process_are_curves(watched):
    found = watched("--num_threads 1", interval_s=0.0)
    steps, busy = zip(*found["watch/device/cpu_percent"], strict=True)
    assert steps == (4, 9, 14, 19, 24, 29, 34)  # log steps
    assert 0 < sum(busy) / len(busy) < 300  # of a core, in steps of 10 ms
    memory = psutil.Process().memory_info().rss / 2**30
    _, last = found["watch/device/memory_gib"][-1]
    assert last == pytest.approx(memory, rel=0.2)


def test_a_short_training_has_a_point(watched):
    points = watched("--trainer.max_steps 2")["watch/device/memory_gib"]
    assert [step for step, _ in points] == [1]


@pytest.mark.parametrize(
    ("refused", "missing", "line"),
    [
        ("", "nothing", "Trained 1 epochs"),
        ("nvmlDeviceGetHandleByUUID", "gpu", "no curves of GPU 0: NVML says"),
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

    def read(name: str) -> Any:
        if name == refused:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NO_PERMISSION)
        return values[name]

    for name in values:
        monkeypatch.setattr(pynvml, name, lambda *_, name=name: read(name))
    properties = SimpleNamespace(uuid="1-2-3")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    gpus = [torch.device("cuda", 0), torch.device("cuda", 1)]
    monkeypatch.setattr(device_monitor, "devices_of", lambda _: gpus)
    found = watched("--trainer.max_epochs 1", interval_s=0.0)
    expected = {}
    for gpu in ("watch/device/gpu0", "watch/device/gpu1"):
        expected |= {f"{gpu}_busy_percent": 40, f"{gpu}_memory_gib": 3}
        expected |= {f"{gpu}_power_watt": 250, f"{gpu}_temperature_celsius": 51}
    last = {name: found[name][-1][1] for name in found if "/gpu" in name}
    assert last == {x: expected[x] for x in expected if missing not in x}
    assert capsys.readouterr().out.count(line) == 1


def test_the_load_of_each_gpu_is_a_mean():
    monitor = DeviceMonitor()
    monitor.readings = {"gpu0_busy_percent": [40, 60], "gpu1_busy_percent": [90]}
    trainer: Any = SimpleNamespace(callbacks=[monitor])
    assert busy_shares(trainer) == [0.5, 0.9]
