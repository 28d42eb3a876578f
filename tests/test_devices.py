"""Device flags against pretended GPUs."""

from typing import Any

import pytest
import torch

from project import devices
from project.devices import check_devices
from project.errors import UserError


@pytest.mark.parametrize(
    ("found", "accelerator", "asked", "strategy"),
    [
        (0, "auto", "auto", "auto"),
        (0, "cpu", 1, "auto"),
        (0, "cpu", "1", "auto"),
        (0, "auto", 2, "ddp"),
        (1, "gpu", 1, "auto"),
        (1, "auto", [0], "auto"),
        (2, "gpu", [1], "auto"),
        (2, "gpu", "0,1", "ddp"),
        (2, "cuda", -1, "auto"),
        (8, "auto", 8, "ddp"),
        (2, "cpu", 1, "auto"),
        (0, "tpu", 8, "auto"),
    ],
)
def test_what_is_there_may_be_asked_for(
    monkeypatch: pytest.MonkeyPatch, found: int, accelerator: str, asked: Any, strategy: str
) -> None:
    monkeypatch.setattr(devices, "num_gpus", lambda: found)
    check_devices(accelerator, asked, strategy)


@pytest.mark.parametrize(
    ("found", "accelerator", "asked", "strategy", "message"),
    [
        (0, "gpu", "auto", "auto", "no GPU was found"),
        (0, "cuda", 1, "auto", "no GPU was found"),
        (0, "auto", [1], "auto", "by index"),
        (0, "auto", 2, "auto", "--trainer.strategy ddp"),
        (2, "cpu", [0], "auto", "accelerator is cpu"),
        (2, "cpu", 2, "auto", "--trainer.strategy ddp"),
        (0, "cpu", 0, "auto", "0"),
        (0, "cpu", -2, "auto", "-2"),
        (0, "cpu", 999, "ddp", "999"),
        (1, "gpu", 2, "auto", "1 GPU was found"),
        (1, "auto", [1], "auto", "indices from 0 to 0"),
        (2, "gpu", 3, "ddp", "1 to 2"),
        (2, "gpu", [0, 0], "auto", "each once"),
        (2, "gpu", [], "auto", "indices"),
        (2, "gpu", [-1], "auto", "indices"),
        (2, "gpu", 0, "auto", "1 to 2"),
        (2, "gpu", "two", "auto", "'two'"),
    ],
)
def test_what_is_not_there_is_refused(
    monkeypatch: pytest.MonkeyPatch, found: int, accelerator: str, asked: Any, strategy: str, message: str
) -> None:
    monkeypatch.setattr(devices, "num_gpus", lambda: found)
    with pytest.raises(UserError, match=message) as caught:
        check_devices(accelerator, asked, strategy)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.gpu
def test_gpus_are_counted() -> None:
    assert devices.num_gpus() == torch.cuda.device_count()
