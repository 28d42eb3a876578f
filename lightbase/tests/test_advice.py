"""The advice at the end of a training: what each rule sees, and the flag that it
names."""

import re
from typing import Any

import pytest
import torch
from example.classifier import Classifier
from example.data.synthetic import SyntheticImages
from lightning import LightningDataModule, Trainer
from torch import nn

from lightbase.extras.step_timer import (
    PHASES,
    RULES,
    StepTimer,
    Times,
    advice,
    parts,
    remedies,
    sentence,
)

REMEDIES = {
    "resident": "data kept on the GPU: --data.resident true",
    "workers": "more workers: --data.num_workers 4",
    "batch": "a larger batch: --data.batch_size 256",
    "precision": "half precision: --trainer.precision bf16-mixed",
    "compiling": "compiling: --model.compile_net inductor",
    "logging": "logging less often: --trainer.log_every_n_steps 500",
}


@pytest.mark.parametrize("i", range(len(RULES)))
def test_the_most_urgent_rule_names_its_part_and_two_remedies(i: int) -> None:
    name, _, finding, names = RULES[i]
    shares = {part: limit + 0.1 for part, limit, *_ in RULES[i:]}
    shares |= {part: limit for part, limit, *_ in RULES[:i]}
    found = finding.format(f"{shares[name]:.0%}")
    ways = ", or ".join(REMEDIES[way] for way in names[:2])
    assert sentence(shares, REMEDIES) == f"{found}; try {ways}"
    assert sentence(shares, {}) == found
    assert "No part" in sentence(dict.fromkeys(shares, 0.0), REMEDIES)


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> Any:
    """One that trained on a pretended GPU, with 8 CPU cores."""
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation: True
    )
    trainer: Any = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    trainer.strategy._root_device = torch.device("cuda")
    trainer.strategy._lightning_module = Classifier(nn.Flatten())
    trainer.datamodule = SyntheticImages(batch_size=64, num_workers=2, resident=False)
    return trainer


def test_remedies_are_those_that_can_be_tried(trainer, monkeypatch):
    assert remedies(trainer) == REMEDIES
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation: including_emulation
    )
    trainer.strategy._lightning_module.compile_net = "inductor"
    trainer.datamodule = SyntheticImages(batch_size=64, num_workers=8)
    assert set(remedies(trainer)) == {"batch", "logging"}
    trainer.datamodule = LightningDataModule()
    assert set(remedies(trainer)) == {"logging"}


def test_the_advice_follows_from_the_timer(trainer: Any) -> None:
    (timer,) = trainer.callbacks = [StepTimer()]
    assert advice(trainer) == ""
    seconds = dict.fromkeys(PHASES, 1.0) | {"logging": 0.0, "optimizer": 5.0}
    timer.times = Times(seconds, rest=1.0, num_steps=10_000)
    # on a GPU its load says more
    assert parts(trainer, timer.times)["overhead"] == 0
    assert advice(trainer, [0.9, 0.5]).startswith("The GPU was idle 50% of the time")
    trainer.strategy._root_device = torch.device("cpu")
    assert re.match(
        "Steps are small: 60% of their time is overhead; try ", advice(trainer)
    )
