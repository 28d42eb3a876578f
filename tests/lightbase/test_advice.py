"""The rules of the advice: what they find, and that each names a flag with a value."""

import re
from typing import Any

import pytest
import torch
from example.classifier import Classifier
from example.data.synthetic import SyntheticImages
from lightning import LightningDataModule, LightningModule, Trainer
from torch import nn

from lightbase.data.batches import DatasetSamples
from lightbase.watch import advice as rules
from lightbase.watch.advice import Facts, advice, busy_share, remedies

EVEN = {
    **{"data_loading": 0.1, "transfer_transforms": 0.1, "forward": 0.3, "backward": 0.28},
    **{"optimizer": 0.1, "logging": 0.02, "other": 0.1},
}
NAMES = (
    *("larger batch", "resident data", "workers", "several steps"),
    *("half precision", "compiling", "rarer logging"),
)
ALL = {name: f"{name}: --flag {number}" for number, name in enumerate(NAMES)}


def shares(**given: float) -> dict[str, float]:
    """Those given, the rest spread over the other phases but logging."""
    others = [name for name in EVEN if name not in given and name != "logging"]
    rest = dict.fromkeys(others, (1 - sum(given.values())) / len(others))
    return {"logging": 0.0, **rest, **given}


CASES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "Steps waited for data 60% of their time": (
        {"busy": 0.4, "shares": shares(data_loading=0.6)},
        ("resident data", "workers"),
    ),
    "Copies and transforms took 50% of a step": (
        {"shares": shares(transfer_transforms=0.5)},
        ("resident data", "larger batch"),
    ),
    "The GPU was busy 20% of the time: steps of 0.60 ms": (
        {"busy": 0.2, "step_ms": 0.6},
        ("several steps", "larger batch"),
    ),
    "Steps of 1.00 ms are small: 62% is overhead": (
        {"step_ms": 1.0, "shares": shares(optimizer=0.35, other=0.27)},
        ("several steps", "larger batch"),
    ),
    "The optimiser took 60% of a step": (
        {"step_ms": 30, "shares": shares(optimizer=0.6)},
        ("larger batch", "compiling"),
    ),
    "The network itself took 80% of a step": (
        {"busy": 0.99, "shares": shares(forward=0.4, backward=0.4)},
        ("half precision", "compiling"),
    ),
    "Logging and progress bar took 30% of a step": (
        {"shares": shares(logging=0.3)},
        ("rarer logging",),
    ),
    "Backward and exchange took 50% of a step": (
        {"shares": shares(forward=0.1, backward=0.5), "num_processes": 2},
        ("larger batch",),
    ),
}


@pytest.mark.parametrize("finding", CASES)
def test_each_rule_finds_its_case_and_names_the_flags(finding: str) -> None:
    changes, names = CASES[finding]
    facts = Facts(EVEN, 10, ALL)._replace(**changes)
    sentences = advice(facts)
    assert 1 <= len(sentences) <= 2
    assert sentences[0] == f"{finding}; try {', or '.join(ALL[name] for name in names)}"
    without = advice(facts._replace(remedies={}))
    assert "--" not in "".join(without)


def test_where_nothing_stands_out_nothing_is_advised_and_two_sentences_at_most() -> None:
    assert "--" not in "".join(advice(Facts(EVEN, 10, ALL)))
    everything = shares(data_loading=0.4, transfer_transforms=0.4)
    first, second = advice(Facts(everything, 10, ALL, busy=0.1))
    assert "waited for data" in first
    assert "Copies and transforms" in second


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> Any:
    """One that trained on a pretended GPU that is half full, of 8 CPU cores."""
    monkeypatch.setattr(rules, "obstacle", lambda trainer: None)
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda _: 50)
    size = type("Properties", (), {"total_memory": 100})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: size)
    trainer: Any = Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, accumulate_grad_batches=2
    )
    trainer.strategy._root_device = torch.device("cuda")
    trainer.strategy._lightning_module = Classifier(nn.Flatten())
    trainer.datamodule = SyntheticImages(num_train=10, batch_size=64, num_workers=2)
    trainer.datamodule.setup("validate")
    return trainer


def test_remedies_name_flags_with_values(trainer, monkeypatch):
    texts = remedies(trainer)
    assert set(texts) == set(NAMES)
    assert set(re.findall(r"--\S+ \S+", " ".join(texts.values()))) == {
        *("--data.batch_size 256", "--data.resident true", "--data.num_workers 0"),
        *("--data.num_workers 4", "--steps_per_execution 20", "--trainer.precision bf16-mixed"),
        *("--model.compile_net inductor", "--trainer.log_every_n_steps 500"),
    }
    assert busy_share(trainer) == 1  # without readings
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda _: 95)
    assert set(NAMES) - set(remedies(trainer)) == {"larger batch", "resident data"}


def test_what_is_in_use_or_cannot_be_is_not_advised(trainer, monkeypatch):
    trainer.datamodule.on_gpu = {"train": None}
    trainer.strategy._lightning_module.compile_net = "inductor"
    monkeypatch.setattr(rules, "obstacle", lambda trainer: "a hook")
    assert set(remedies(trainer)) == {"larger batch", "half precision", "rarer logging"}
    trainer.strategy._root_device = torch.device("cpu")
    trainer.datamodule = SyntheticImages(num_workers=8)
    for has_bf16 in (True, False):
        monkeypatch.setattr(rules, "has_bf16", lambda value=has_bf16: value)
        assert {"larger batch", "rarer logging"} == remedies(trainer).keys() - {"half precision"}
        assert ("half precision" in remedies(trainer)) == has_bf16


def test_a_gpu_without_bf16_is_advised_fp16_and_files_are_not_kept_on_a_gpu(trainer, monkeypatch):
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation: including_emulation
    )
    monkeypatch.setattr(trainer.datamodule, "splits", {"train": DatasetSamples([])})
    texts = remedies(trainer)
    assert texts["half precision"].endswith("--trainer.precision 16-mixed")
    assert "resident data" not in texts


class Plain(LightningModule):
    """As Lightning's pages write it."""


def test_a_plain_module_with_plain_data_hears_what_to_write(trainer: Any) -> None:
    trainer.datamodule, model = LightningDataModule(), Plain()
    trainer.strategy._lightning_module = model
    trainer.strategy.optimizers = [torch.optim.Adam([nn.Parameter(torch.ones(1))])]
    texts = remedies(trainer)
    assert texts["workers"].startswith("more num_workers for the DataLoader of LightningDataModule")
    assert texts["fused optimiser"] == "Adam(..., fused=True)"
