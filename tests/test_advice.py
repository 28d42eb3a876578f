"""The rules of the advice: what they find, and that each names a flag with a value."""

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import LightningDataModule
from torch.utils.data import DataLoader, TensorDataset

from project.engine.advice import Facts, advice

EVEN = Facts(
    data_loading=0.1, transfer_transforms=0.1, forward=0.3, backward=0.28, optimizer=0.1, logging=0.02, other=0.1,
    step_ms=10, batch_size=64, num_workers=0, is_resident=False, log_every_n_steps=50,
)  # fmt: skip


def shares(**given: float) -> dict[str, float]:
    """Those given, the rest spread over the other phases."""
    phases = ("data_loading", "transfer_transforms", "forward", "backward", "optimizer", "other")
    others = [name for name in phases if name not in given]
    return {"logging": 0.0, **dict.fromkeys(others, (1 - sum(given.values())) / len(others)), **given}


CASES: list[tuple[dict[str, Any], str, list[str]]] = [
    ({"on_gpu": True, "busy": 0.9, "memory": 0.97, "accumulate": 2, "half_is_fast": True}, "GPU memory was 97% full",
     ["--data.batch_size 32", "--trainer.accumulate_grad_batches 4", "--trainer.precision bf16-mixed"]),
    ({"on_gpu": True, "busy": 0.4, **shares(data_loading=0.6)}, "waited for data 60%",
     ["--data.resident true", "--data.batch_size 256"]),
    ({"max_workers": 8, "num_workers": 2, **shares(data_loading=0.5)}, "waited for data",
     ["--data.num_workers 4", "--data.batch_size 256"]),
    ({"max_workers": 2, "num_workers": 2, **shares(data_loading=0.5)}, "waited for data", ["--data.batch_size 256"]),
    ({"on_gpu": True, "busy": 0.9, **shares(transfer_transforms=0.5)}, "Copies to the device",
        ["--data.resident true", "--data.batch_size 256"]),
    (shares(logging=0.3), "Logging and the progress bar took 30%", ["--trainer.log_every_n_steps 500"]),
    ({"num_processes": 2, **shares(forward=0.1, backward=0.6)}, "with the exchange of gradients took 60%",
     ["--data.batch_size 256", "--trainer.accumulate_grad_batches 4"]),
    ({"on_gpu": True, "busy": 0.2, "step_ms": 0.6, "can_execute_several": True}, "The GPU was busy 20%",
     ["--steps_per_execution 20", "--data.batch_size 256"]),
    ({"step_ms": 1.0, **shares(optimizer=0.35)}, "Steps of 1.00 ms are small",
     ["--data.batch_size 256"]),
    ({"step_ms": 30, **shares(optimizer=0.6)}, "The optimiser took 60%", ["--data.batch_size 256"]),
    ({"on_gpu": True, "busy": 0.99, "can_compile": True, "half_is_fast": True, **shares(forward=0.4, backward=0.4)},
     "The network itself took 80%", ["--trainer.precision bf16-mixed", "--model.compile_net inductor"]),
    ({"half_is_fast": True, **shares(forward=0.45, backward=0.45)}, "The network itself took 90%",
     ["--trainer.precision bf16-mixed"]),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "finding", "flags"), CASES)
def test_each_rule_finds_its_case_and_names_the_flags(changes: dict[str, Any], finding: str, flags: list[str]) -> None:
    sentences = advice(dataclasses.replace(EVEN, **changes))
    assert 1 <= len(sentences) <= 2
    assert finding in sentences[0]
    assert re.findall(r"--\S+ [^\s,]+", sentences[0]) == flags
    assert "\n" not in "".join(sentences)


@pytest.mark.parametrize("changes", [{}, {"batch_size": None, "num_workers": None, "is_resident": None, "step_ms": 1}])
def test_where_nothing_stands_out_nothing_is_advised(changes: dict[str, Any]) -> None:
    assert "--" not in "".join(advice(dataclasses.replace(EVEN, **changes)))


def test_a_full_gpu_is_not_advised_to_take_more() -> None:
    full = dataclasses.replace(EVEN, on_gpu=True, memory=0.95, busy=0.5, **shares(data_loading=0.5))
    flags = re.findall(r"--\S+ [^\s,]+", " ".join(advice(full)))
    assert "--data.resident true" not in flags
    assert "--data.batch_size 256" not in flags


def test_two_at_most() -> None:
    everything = dataclasses.replace(
        EVEN, on_gpu=True, memory=0.5, busy=0.1, **shares(data_loading=0.4, transfer_transforms=0.4)
    )
    first, second = advice(everything)
    assert "waited for data" in first
    assert "Copies to the device" in second


class OwnData(LightningDataModule):
    """Without any of the arguments that our data modules have."""

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.rand(40, 3, 8, 8), torch.randint(4, (40,))), batch_size=8)

    def val_dataloader(self) -> Any:
        return self.train_dataloader()


def test_facts_of_data_and_a_model_of_ones_own(train: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Facts] = []
    monkeypatch.setattr("project.engine.run.advice", lambda facts: found.append(facts) or ["nothing"])
    flags = ("--step_timer", "true", "--trainer.max_epochs", 1, "--trainer.limit_test_batches", 1)
    train(*flags)
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    train(*flags, "--data", "test_advice.OwnData")
    assert [facts.batch_size for facts in found] == [16, None]
    assert [facts.is_resident for facts in found] == [False, None]
    assert all(facts.step_ms > 0 and 0 <= facts.forward <= 1 for facts in found)
