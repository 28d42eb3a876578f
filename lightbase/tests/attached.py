"""A data module as the Trainer has it when it asks for loaders."""

from typing import Any

import pytest
import torch
from lightning import Trainer
from lightning.pytorch.utilities.combined_loader import (
    _shutdown_workers_and_reset_iterator,
)
from paths import ACCELERATOR

from lightbase.core.data import BaseDataModule


def attach(data: BaseDataModule, stage: str = "fit", **trainer: Any) -> Any:
    options = {
        "logger": False,
        "enable_checkpointing": False,
        "max_epochs": 1,
        **trainer,
    }
    data.trainer = Trainer(accelerator=ACCELERATOR, devices=1, **options)
    data.prepare_data()
    data.setup(stage)
    return data


def inputs_of(loader: Any) -> list[Any]:
    return torch.cat([inputs for inputs, _ in loader]).tolist()


def refuse_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError("no network in tests")

    monkeypatch.setattr("socket.socket.connect", refuse)
    monkeypatch.setattr("socket.getaddrinfo", refuse)


def read(loader: Any) -> list[Any]:
    """Its batches; its workers end as in a training, or torch would wait 5 s for those
    that have met an error."""
    try:
        return list(loader)
    finally:
        _shutdown_workers_and_reset_iterator(loader)
