"""What the outputs of a network mean: probabilities, classes, masks."""

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torchmetrics.functional.classification import multiclass_confusion_matrix

from lightbase.data.module import BaseDataModule
from lightbase.data.tensors import inputs_of
from lightbase.model.module import BaseModule
from lightbase.model.scores import gives_probabilities

PALETTE = (
    torch.arange(256)[:, None] * torch.tensor([2**25 - 1, 2**15 - 1, 2**21 - 1]) % 255
)
"""Colours (256, 3) of the classes in masks, as torchvision's draw_segmentation_masks
chooses them."""

MISFITS = (AttributeError, IndexError, RuntimeError, TypeError)
"""Errors of `columns_of` if outputs and targets do not fit the task: they are no
tensors, or tensors of other shapes."""


def prediction_step(module: Any) -> Callable[..., Any]:
    """Return the predict_step of a module. If it has none, return a function that calls
    it with the inputs: Lightning's own step would give it the whole batch."""
    if is_overridden("predict_step", module):
        return module.predict_step  # type: ignore[no-any-return]
    return lambda batch, *_: module(inputs_of(batch))


def task_of(module: Any, outputs: Any) -> Any:
    """Return the task of a module, or None. A classifier whose outputs are (N, classes,
    H, W) gives each pixel a class: its task is "segmentation"."""
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


def predicts_probabilities(module: Any, rows: Tensor) -> bool:
    """Return whether predictions (N, ...) are probabilities. Of a predict_step of the
    user's own they are if all lie in [0, 1], else logits."""
    if isinstance(module, BaseModule) and not is_overridden("predict_step", module):
        return bool(gives_probabilities(module))
    return bool(((rows >= 0) & (rows <= 1)).all())


def predicted_masks(outputs: Tensor, are_probabilities: bool | None) -> Tensor:
    """Return the class of each pixel, int64 (N, H, W).

    outputs: Logits or probabilities (N, classes, H, W), or (N, 1, H, W) for two
        classes.
    """
    if outputs.shape[1] > 1:
        return outputs.argmax(1)
    return (outputs[:, 0] > threshold(are_probabilities)).long()


def threshold(are_probabilities: bool | None) -> float:
    """Return the output above which a label is predicted."""
    return 0.5 if are_probabilities else 0.0


def columns_of(
    task: str,
    outputs: Tensor,
    targets: Tensor,
    ignored: int | None = None,
    are_probabilities: bool | None = False,
) -> list[Tensor]:
    """Return the true and the predicted values of a batch, each with a row for each
    sample.

    task: regression: the targets and the outputs as they are. segmentation: class
        numbers (N, H, W). multiclass: class numbers (N,), and as a third tensor (N,)
        the probability of the predicted class. docs/tensorboard.md lists the shapes.
    outputs: For classes, logits or probabilities.
    ignored: A target that the loss ignores. It becomes -100.
    are_probabilities: See `gives_probabilities`.
    """
    if task == "regression":
        return [targets, outputs.reshape(targets.shape)]
    predicted = predicted_masks(outputs, are_probabilities)
    # the loss of two classes may need masks of floats
    true = targets.reshape(predicted.shape).long()
    if ignored is not None:
        true = true.masked_fill(true == ignored, -100)
    columns = [true, predicted]
    if task == "multiclass":
        shares = outputs if are_probabilities else outputs.softmax(1)
        columns.append(shares.amax(1))
    return columns


def confusion(true: Tensor, predicted: Tensor, num_classes: int) -> Tensor:
    """Return a confusion matrix, int64 (num_classes, num_classes). Row i, column j has
    the number of samples or pixels of class i that are predicted as class j.

    true: Integers of any shape. Only values from 0 to num_classes - 1 count.
    predicted: Class numbers of the same shape.
    """
    counts = (true >= 0) & (true < num_classes)
    return multiclass_confusion_matrix(predicted[counts], true[counts], num_classes)
