"""What the first step of a training shows: a loss of a wrong scale, and parameters that
no loss reaches."""

import math
from typing import Any

from lightning import LightningModule
from torch import Tensor, nn

from lightbase.compat import newest_batch
from lightbase.config.errors import say
from lightbase.data.tensors import tensors_in
from lightbase.model.module import BaseModule


class FirstStep:
    """Prints a line if the first cross-entropy is ten times that of equal
    probabilities, and one if parameters get no gradient."""

    is_over = False

    def __init__(self, model: LightningModule) -> None:
        self.model: Any = model
        if isinstance(model, BaseModule):
            self.handle = model.criterion.register_forward_hook(self.check_loss)

    def check_loss(self, criterion: Any, args: Any, loss: Tensor) -> None:
        """Look at the first loss of the training. torch calls this."""
        if not criterion.training:  # in the validation before it
            return
        self.handle.remove()
        is_entropy = isinstance(criterion, nn.CrossEntropyLoss) and args
        if is_entropy and criterion.reduction == "mean":
            usual = math.log(args[0].shape[1])
            if loss > 10 * usual > 0:
                x = tensors_in(newest_batch(self.model.trainer))[0].float()
                say(
                    f"Network: the first loss is {loss:.3g}, and {usual:.3g} is usual: "
                    f"outputs reach {args[0].abs().max():.3g}, inputs have mean "
                    f"{x.mean():.3g} and std {x.std():.3g}. Standardise inputs in "
                    "`normalize`, or begin with smaller weights"
                )

    def watch(self, trainer: Any, outputs: Any, batch: Any, is_log_step: bool) -> None:
        """Look at the gradients of the first batch. `BetweenSteps` calls this."""
        if self.is_over or not self.model.automatic_optimization:
            return
        self.is_over = True
        weights = [x for x in self.model.named_parameters() if x[1].requires_grad]
        missed = [name for name, weight in weights if weight.grad is None]
        # with some strategies all gradients are elsewhere
        if 0 < len(missed) < len(weights):
            say(
                f"Network: {len(missed)} parameters got no gradient in the first step, "
                f"such as {missed[0]}: use them in the loss, or freeze them "
                "(--model.freeze): ddp stops here"
            )
