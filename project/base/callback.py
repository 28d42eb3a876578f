"""What a callback can say about itself."""

from lightning import Callback


class MayMissSteps(Callback):
    """A callback whose batch hooks need not see each step.

    With `--steps_per_execution 20` its `on_train_batch_start` and `on_train_batch_end` are called once for 20 steps,
    with the first batch of them and the outputs of the last. Any other callback with such a hook gets single steps.
    """
