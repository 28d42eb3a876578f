"""The weights that a validation has measured are the weights in best.ckpt.

If something changes them in between, the run ends with an error: best.ckpt would hold
weights that nobody has measured.
"""

from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping, ProgressBar, Timer
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.nn.parameter import is_lazy

from lightbase.core.errors import UserError
from lightbase.core.extra import Extra

AFTER_VALIDATION = (
    "on_validation_epoch_end",
    "on_validation_end",
    "on_train_epoch_end",
    "on_save_checkpoint",
)
"""Hooks between the validation of weights and their checkpoint."""
HARMLESS = (Checkpoint, EarlyStopping, ProgressBar, Timer)
"""Callbacks of Lightning that have such hooks and change no weight."""
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The type of integers with so many bytes."""


class ValidatedWeights(Extra):
    """Compares the weights in best.ckpt with the weights that the validation has
    measured. They differ if a callback such as ModelPruning changes them in between.

    It has to be the first callback. WeightAveraging validates averaged weights and puts
    the others back when the validation ends; the fingerprints must be taken before.

    step: The number of optimizer steps at the newest validation, -1 before it.
    fingerprints: {name: int64 ()} of the parameters and buffers at this step.
    suspects: The names of classes that may have changed the weights.
    """

    is_first = True

    def __init__(self) -> None:
        self.step = -1  # of the newest validation
        self.fingerprints: dict[str, Tensor] = {}
        self.suspects: list[str] = []

    def on_validation_epoch_end(
        self, trainer: Trainer, pl_module: LightningModule
    ) -> None:
        """Keep the fingerprints of the validated weights, and the names of all classes
        that may change the weights before they are saved."""
        self.step = trainer.global_step
        tensors = floats(pl_module.state_dict())
        self.fingerprints = {name: fingerprint(tensors[name]) for name in tensors}
        parts = [*trainer.callbacks, pl_module]  # type: ignore[attr-defined]
        self.suspects = [
            type(part).__name__ for part in parts if may_change_weights(part)
        ]

    def check_best(self, checkpoint: dict[str, Any]) -> None:
        """Raise UserError if a checkpoint has other weights than the validation after
        the same step has measured.

        checkpoint: What Lightning is about to save. Nothing is checked if its step is
            not the step of the newest validation.
        """
        if self.step != checkpoint["global_step"]:
            return
        are_equal = []
        for name, tensor in floats(checkpoint["state_dict"]).items():
            measured = self.fingerprints.get(name)
            if measured is not None:
                # a callback may have put a weight on another device
                are_equal.append(fingerprint(tensor).to(measured.device) == measured)
        if are_equal and not torch.stack(are_equal).all():
            names = " or ".join(self.suspects)
            raise UserError(
                f"{names} changes the weights between a validation and best.ckpt, "
                "which would hold others than were measured",
                "change them after optimizer steps, in on_train_batch_end, or use "
                "--monitor null",
            )


def may_change_weights(part: Callback | LightningModule) -> bool:
    """Return whether a callback or a module may change weights between a validation and
    a checkpoint. One of another package may do so if it has a hook there, unless it is
    in HARMLESS."""
    is_ours = type(part).__module__.startswith("lightbase.")
    if is_ours or isinstance(part, HARMLESS):
        return False
    return any(is_overridden(hook, part) for hook in AFTER_VALIDATION)


def floats(tensors: dict[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of floating-point numbers that have values. Parameters of lazy
    modules have none before the first batch."""
    values = {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor) or is_lazy(tensor):
            continue
        if tensor.is_floating_point() and tensor.numel():
            values[name] = tensor.detach()
    return values


def fingerprint(tensor: Tensor) -> Tensor:
    """Return a checksum of the values of a tensor: int64 ().

    It is the sum over the bits of all values, weighted by row. Sums of integers are
    exact, so it does not depend on the layout in memory or on the device.
    """
    bits = tensor.view(INTEGERS[tensor.element_size()])
    num_rows = 1
    if bits.dim():
        num_rows = len(bits)
    rows = bits.reshape(num_rows, -1)
    sums = rows.sum(1, dtype=torch.int64)
    return (sums * torch.arange(1, len(sums) + 1, device=sums.device)).sum()
