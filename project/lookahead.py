"""A callback that pulls the weights of a network back to their running average."""

from typing import Any

from jsonargparse.typing import PositiveInt
from lightning import Callback
from torch import Tensor


class Lookahead(Callback):
    """Replaces the weights by their exponential moving average every few steps. The
    average follows more and more slowly, and is the result of the training.

    As in K. Jordan, arXiv 2404.00498, after M. Zhang et al., "Lookahead Optimizer",
    arXiv 1907.08610. The average has all floating-point tensors of the module, those
    of batch norms too. A training that ends before its last step, such as by patience,
    keeps the weights that it has then.

    Args:
        every_n_steps: How many optimizer steps are between two updates.
        decay: The weight of the old average in an update is
            decay^every_n_steps (step / number of all steps)^3.
    """

    def __init__(self, every_n_steps: PositiveInt = 5, decay: float = 0.95) -> None:
        self.every_n_steps = every_n_steps
        self.decay = decay
        self.averages: dict[str, Tensor] = {}
        self.newest_step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"averages": self.averages, "newest_step": self.newest_step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.averages = state_dict["averages"]
        self.newest_step = state_dict["newest_step"]

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin the average with the weights, or move the saved one to their device."""
        for name, value in pl_module.state_dict().items():
            if value.is_floating_point():
                average = self.averages.get(name, value.clone())
                self.averages[name] = average.to(value.device)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        """Update the average and the weights, and take the average after the last
        step."""
        step, num_steps = trainer.global_step, trainer.estimated_stepping_batches
        if step == self.newest_step:  # within an accumulation of gradients
            return
        self.newest_step = step
        if step % self.every_n_steps == 0:
            share = self.decay**self.every_n_steps * (step / num_steps) ** 3
            self.update(pl_module, share)
        if step >= num_steps:
            self.update(pl_module, 1)

    def update(self, pl_module: Any, decay: float) -> None:
        """Move the average towards the weights, and replace the weights by it.

        decay: The weight of the old average.
        """
        state = pl_module.state_dict()
        for name, average in self.averages.items():
            average.lerp_(state[name], 1 - decay)
            state[name].copy_(average)
