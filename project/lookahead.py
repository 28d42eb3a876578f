"""A callback that pulls the weights back to their running average."""

from typing import Any

from lightning import Callback

NUM_STEPS = 5
"""How many steps of the optimizer lie between two updates of the averages."""


class Lookahead(Callback):
    """Replaces the weights by their exponential moving average every five optimizer
    steps. The average follows the weights more and more slowly. After the last step
    it takes their place.

    As in the code of K. Jordan, arXiv 2404.00498. The idea is from M. Zhang et al.,
    "Lookahead Optimizer", arXiv 1907.08610. All floating-point tensors of the module
    are averaged, also the statistics of batch norms. A training that ends before its
    last step, such as by patience, keeps the weights that it has.

    averages: The tensors by name, on the device of the weights.
    """

    averages: Any = {}

    def state_dict(self) -> Any:
        return self.averages

    def load_state_dict(self, state_dict: Any) -> None:
        """Take over saved averages. In a resume within an epoch this comes twice, the
        second time after on_train_start."""
        self.averages = {
            name: value.to(self.averages.get(name, value))
            for name, value in state_dict.items()
        }

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin with copies of the weights, or with the averages of a checkpoint."""
        self.averages = {
            name: self.averages.get(name, value).to(value, copy=True)
            for name, value in pl_module.state_dict().items()
            if value.is_floating_point()
        }

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Update the averages after every fifth step, and copy them to the weights."""
        is_waiting = (batch_idx + 1) % trainer.accumulate_grad_batches != 0
        if is_waiting and not trainer.is_last_batch:
            return  # the gradients of more batches are added before the next step
        progress = trainer.global_step / trainer.estimated_stepping_batches
        decay = 0.95**NUM_STEPS * progress**3
        if progress >= 1:
            decay = 1
        elif trainer.global_step % NUM_STEPS:
            return
        state = pl_module.state_dict()
        for name, average in self.averages.items():
            average.lerp_(state[name], 1 - decay)
            state[name].copy_(average)
