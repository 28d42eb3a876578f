"""What the outputs of a network mean: probabilities, classes, masks."""

from typing import Any

import torch
from torch import Tensor
from torchmetrics.functional.classification import multiclass_confusion_matrix

from lightbase.data.module import BaseDataModule

PALETTE = (
    torch.arange(256)[:, None] * torch.tensor([2**25 - 1, 2**15 - 1, 2**21 - 1]) % 255
)
"""Colours (256, 3) of the classes in masks, as torchvision's draw_segmentation_masks
chooses them."""

MISFITS = (AttributeError, IndexError, RuntimeError, TypeError)
"""Errors of `columns_of` if outputs and targets do not fit the task: they are no
tensors, or tensors of other shapes."""


def task_of(module: Any, outputs: Any) -> Any:
    """Return the attribute `task` of a module, or None. A classifier whose outputs are
    (N, classes, H, W) gives each pixel a class: its task is "segmentation"."""
    task = getattr(module, "task", None)
    if task == "multiclass" and isinstance(outputs, Tensor) and outputs.dim() == 4:
        return "segmentation"
    return task


def class_names(data: Any, num_classes: int) -> list[str]:
    """Return a name for each class: the data's names, then numbers for classes without
    a name. If the data has more than `num_classes` names, all of them are returned."""
    names = []
    if isinstance(data, BaseDataModule):
        names = list(data.classes)
    return names + [str(i) for i in range(len(names), num_classes)]


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


def columns_of(
    task: str, outputs: Tensor, targets: Tensor, ignored: int | None = None
) -> list[Tensor]:
    """Return the values of a batch that are kept for pictures: tensors with a row for
    each sample. The first tensor has the true values, the second one has the predicted
    values.

    regression: The targets and the outputs as they are.
    segmentation: Class numbers (N, H, W).
    multiclass: Class numbers (N,). A third tensor (N,) has the probability of the
        predicted class. The outputs may be logits or probabilities.

    task: The attribute `task` of the module. docs/tensorboard.md lists the shapes.
    ignored: A target that the loss ignores. It becomes -100.
    """
    if task == "regression":
        return [targets, outputs.reshape(targets.shape)]
    predicted = predicted_masks(outputs)
    # the loss of two classes may need masks of floats
    true = targets.reshape(predicted.shape).long()
    if ignored is not None:
        true = true.masked_fill(true == ignored, -100)
    columns = [true, predicted]
    if task == "multiclass":
        # the outputs are probabilities if none is negative, and if the outputs of each
        # sample add up to 1
        are_shares = ((outputs.sum(1) - 1).abs() < 1e-3).all() & (outputs >= 0).all()
        columns.append(torch.where(are_shares, outputs, outputs.softmax(1)).amax(1))
    return columns


def confusion(true: Tensor, predicted: Tensor, num_classes: int) -> Tensor:
    """Return a confusion matrix, int64 (num_classes, num_classes). Row i, column j has
    the number of samples or pixels of class i that are predicted as class j.

    true: Integers of any shape. Only values from 0 to num_classes - 1 count. The value
        -100, which the loss ignores, does not.
    predicted: Class numbers of the same shape.
    """
    counts = (true >= 0) & (true < num_classes)
    return multiclass_confusion_matrix(predicted[counts], true[counts], num_classes)
