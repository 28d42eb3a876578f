"""What the outputs of a network mean: probabilities, classes, masks."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightbase.core.data import BaseDataModule

PALETTE = (
    torch.arange(256)[:, None] * torch.tensor([2**25 - 1, 2**15 - 1, 2**21 - 1]) % 255
)
"""Colours (256, 3) of the classes in masks, as torchvision's draw_segmentation_masks
chooses them."""


def class_names(data: Any, num_classes: int) -> list[str]:
    """Return a name for each class: the data's names, then numbers for classes without
    a name. If the data has more than `num_classes` names, all of them are returned."""
    names = []
    if isinstance(data, BaseDataModule):
        names = list(data.classes)
    return names + [str(i) for i in range(len(names), num_classes)]


def label_names(is_set: Tensor, names: Sequence[str]) -> str:
    """Return the names of the labels that one sample has, as one text with commas.

    is_set: Whether the sample has a label, bool (labels,).
    """
    return ", ".join(names[i] for i in is_set.nonzero()[:, 0])


def probabilities(outputs: Tensor) -> Tensor:
    """Return the sigmoid of logits, in the same shape. Outputs that all lie in [0, 1]
    count as probabilities and are returned unchanged. torchmetrics does the same."""
    are_probabilities = ((outputs >= 0) & (outputs <= 1)).all()
    return torch.where(are_probabilities, outputs, outputs.sigmoid())


def predicted_masks(outputs: Tensor) -> Tensor:
    """Return the class of each pixel, int64 (N, H, W).

    outputs: Logits or probabilities (N, classes, H, W), or (N, 1, H, W) for two
        classes.
    """
    if outputs.shape[1] > 1:
        return outputs.argmax(1)
    return (probabilities(outputs)[:, 0] > 0.5).long()
