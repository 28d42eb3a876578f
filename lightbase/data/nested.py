"""Batches of any structure: tensors in tuples, lists and dicts, which may be nested."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from lightning_utilities.core.apply_func import apply_to_collection, is_namedtuple
from torch import Tensor

NESTED = (Tensor, np.ndarray, tuple, dict)


def map_tensors(function: Callable[[Tensor], Any], values: Any) -> Any:
    """The same structure, with the results of the function in place of the tensors."""
    return apply_to_collection(values, Tensor, function)


def tensors_in(values: Any) -> list[Tensor]:
    tensors: list[Tensor] = []
    apply_to_collection(values, Tensor, tensors.append)
    return tensors


def builder(values: Any) -> Callable[[Sequence[Tensor]], Any]:
    """A function that makes the structure of `values` of other tensors, in the order of
    `tensors_in`."""
    if type(values) is tuple and all(isinstance(part, Tensor) for part in values):
        return tuple  # a pair, for instance: faster than by map_tensors

    def build(tensors: Sequence[Tensor]) -> Any:
        iterator = iter(tensors)
        return map_tensors(lambda _: next(iterator), values)

    return build


def as_tensors(values: Any) -> Any:
    """The same structure, with tensors in place of arrays and lists of numbers."""
    if isinstance(values, dict):
        return {key: as_tensors(value) for key, value in values.items()}
    is_list = isinstance(values, list) and any(isinstance(part, NESTED) for part in values)
    if isinstance(values, tuple) or is_list:
        return with_parts(values, *map(as_tensors, values))
    return torch.as_tensor(values)


def inputs_of(batch: Any) -> Any:
    """The first part of a tuple or list; else the batch itself."""
    return batch[0] if isinstance(batch, tuple | list) and batch else batch


def targets_of(batch: Any) -> Any:
    """The second part of a pair; None for a batch that is no pair."""
    return batch[1] if isinstance(batch, tuple | list) and len(batch) == 2 else None


def with_parts(batch: Any, *parts: Any) -> Any:
    """The tuple of these parts; a named one if the batch is a named tuple."""
    return type(batch)(*parts) if is_namedtuple(batch) else parts


def convert_types(batch: Any) -> Any:
    """A batch with float32 in place of float64. The targets of a pair, if they are one tensor,
    become float32 or int64."""
    batch = map_tensors(lambda x: x.float() if x.dtype == torch.float64 else x, batch)
    targets = targets_of(batch)
    if isinstance(targets, Tensor):
        targets = targets.float() if targets.is_floating_point() else targets.long()
        batch = with_parts(batch, batch[0], targets)
    return batch
