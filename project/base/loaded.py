"""What a data module loads, as samples."""

from collections.abc import Sized
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from project.base.errors import UserError, first_line
from project.base.samples import DatasetSamples, Samples, TensorBatches, to_usual

Values = Tensor | np.ndarray | list  # of numbers
Loaded = tuple[Values, Values] | Dataset


def as_samples(
    loaded: Any, where: str, classes: list[str], image_shape: tuple[int, int, int] | None
) -> Samples:
    """What a data module loads, if it agrees with what the module says; else a UserError that
    begins with `where`."""
    samples = as_stored(loaded, where, bool(classes))
    if not len(samples):
        raise UserError(f"{where} is empty")
    if (
        image_shape
        and isinstance(samples, TensorBatches)
        and (1, *samples.inputs.shape[1:]) == tuple(image_shape)
    ):
        samples = TensorBatches(samples.inputs[:, None], samples.targets)  # grey images (N, H, W)
    inputs, targets = samples.__getitems__([0])
    if image_shape and isinstance(inputs, Tensor) and inputs.shape[1:] != tuple(image_shape):
        shapes = f"shape {tuple(inputs.shape[1:])} and image_shape {tuple(image_shape)}"
        raise UserError(
            f"{where} has samples of {shapes}: make them agree (channels, height, width)"
        )
    if classes and isinstance(targets, Tensor) and targets.dim() == 1:  # one number a sample
        if targets.is_floating_point():
            raise UserError(
                f"{where} has {targets.dtype} targets: they must be integers, or `classes` empty"
            )
        all_targets = samples.targets if isinstance(samples, TensorBatches) else targets
        first, last = int(all_targets.min()), int(all_targets.max())
        if not 0 <= first <= last < len(classes):
            numbers = f"targets {first} to {last} for {len(classes)} classes"
            raise UserError(
                f"{where} has {numbers}: they must be 0 to {len(classes) - 1}, or `classes` more"
            )
    return samples


def as_stored(loaded: Any, where: str, are_classes: bool) -> Samples:
    if isinstance(loaded, TensorDataset) and len(loaded.tensors) == 2:
        loaded = loaded.tensors
    if (
        isinstance(loaded, Dataset)
        and isinstance(loaded, Sized)
        and not isinstance(loaded, IterableDataset)
    ):
        return DatasetSamples(loaded, are_classes)
    if not isinstance(loaded, tuple | list) or len(loaded) != 2:
        what = (
            "load returns (inputs, targets) or a map-style Dataset of them (__len__, __getitem__)"
        )
        raise UserError(
            f"{where} is a {type(loaded).__name__}:\n{what}; for others write a LightningDataModule"
        )
    try:
        # C, W: torch takes no negative strides, and warns of memory that is read-only
        arrays = [
            part if isinstance(part, Tensor) else np.require(part, requirements=["C", "W"])
            for part in loaded
        ]
        inputs, targets = torch.as_tensor(arrays[0]), torch.as_tensor(arrays[1])
    except (TypeError, ValueError) as error:
        raise UserError(
            f"{where} is not made of numbers in one shape:\n{first_line(error)}"
        ) from error
    if len(inputs) != len(targets):
        raise UserError(
            f"{where} has {len(inputs)} inputs and {len(targets)} targets: each input needs one"
        )
    return TensorBatches(*to_usual(inputs, targets, are_classes))


def no_inputs(samples: Samples) -> Tensor | None:
    """An empty batch (0, ...), which tells shape and dtype of the inputs; None where they are no
    tensors."""
    first = samples.__getitems__([0])[0]
    return first.new_empty(0, *first.shape[1:]) if isinstance(first, Tensor) else None


def shape_of_images(batch: Tensor | None) -> tuple[int, int, int] | None:
    """Channels, height, width of uint8 images, for which files can stand; None for other inputs."""
    if batch is None or batch.dtype != torch.uint8 or batch.dim() != 4:
        return None
    return (batch.shape[1], batch.shape[2], batch.shape[3])
