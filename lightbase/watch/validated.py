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

from lightbase.config.errors import UserError
from lightbase.data.tensors import to_host
from lightbase.run.fit import Extra

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

    These attributes exist after a validation:
    fingerprints: See `fingerprints`: of the parameters and buffers at this step.
    suspects: The names of classes that may have changed the weights.
    """

    is_first = True
    step = -1

    def on_validation_epoch_end(
        self, trainer: Trainer, pl_module: LightningModule
    ) -> None:
        """Keep the fingerprints of the validated weights, and the names of all classes
        that may change the weights before they are saved."""
        self.step = trainer.global_step
        self.fingerprints = fingerprints(pl_module.state_dict())
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
        saved = fingerprints(checkpoint["state_dict"])
        saved, measured = to_host((saved, self.fingerprints))
        if any(saved[name] != measured[name] for name in saved.keys() & measured):
            raise UserError(
                f"{' or '.join(self.suspects)} changes the weights between a "
                "validation and best.ckpt, which would hold others than were measured",
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


def fingerprints(state: dict[str, Any]) -> dict[str, Tensor]:
    """Return {name: int64 ()}: the sum of the bits of all values, for each tensor of
    floating-point numbers. Sums of integers are exact, so they do not depend on the
    layout in memory or on the device. Nothing waits for a GPU.

    state: A state_dict. Parameters of lazy modules have no values before the first
        batch, and are left out.
    """
    sums = {}
    for name, value in state.items():
        if not isinstance(value, Tensor) or is_lazy(value):
            continue
        if value.is_floating_point():
            bits = value.detach().view(INTEGERS[value.element_size()])
            sums[name] = bits.sum(dtype=torch.int64)
    return sums
