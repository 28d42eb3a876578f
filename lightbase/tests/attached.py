"""A data module as the Trainer has it when it asks for loaders."""

from typing import Any

import torch
from lightning import Trainer
from lightning.pytorch.utilities.combined_loader import (
    _shutdown_workers_and_reset_iterator,
)
from paths import ACCELERATOR

from lightbase.data.module import BaseDataModule


def attach(data: BaseDataModule, stage: str = "fit", **trainer: Any) -> Any:
    """Set a data module up for a stage. trainer: arguments of its Trainer."""
    options = {"logger": False, "enable_checkpointing": False, "max_epochs": 1}
    options |= trainer
    data.trainer = Trainer(accelerator=ACCELERATOR, devices=1, **options)
    data.prepare_data()
    data.setup(stage)
    return data


def inputs_of(loader: Any) -> list[Any]:
    """Return the inputs of all batches, as nested lists."""
    return torch.cat([inputs for inputs, _ in loader]).tolist()


def read(loader: Any) -> list[Any]:
    """Return the batches of a loader. Its workers end as in a training, or torch would
    wait 5 s for the workers that have met an error."""
    try:
        return list(loader)
    finally:
        _shutdown_workers_and_reset_iterator(loader)
