"""Weights that follow from the data, before a training."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from project.base.datamodule import TensorDataModule
from project.base.errors import UserError, first_line, is_raised_on_purpose
from project.base.imports import function_at

NUM_SAMPLES = 1000


def initialize(net: nn.Module, initializer: str | Callable[..., Any], data: Any) -> None:
    """Call initializer(net, inputs) with up to 1,000 training samples, evenly spread, as the
    network gets them."""
    if not isinstance(data, TensorDataModule):
        raise UserError(
            f"model.initializer needs data from a TensorDataModule; {type(data).__name__} is none",
            2,
        )
    set_weights: Any = function_at("initializer", initializer)
    samples = data.splits["train"]
    num = min(len(samples), NUM_SAMPLES)
    inputs = samples.__getitems__([i * len(samples) // num for i in range(num)])[0]
    with torch.no_grad():
        try:
            set_weights(net, data.normalize(inputs))
        except ValueError as error:
            if is_raised_on_purpose(error):  # its word for a network that it is not made for
                raise UserError(f"model.initializer: {first_line(error)}", 2) from error
            raise
