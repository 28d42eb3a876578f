"""What a callback can say about itself, and ask about its run."""

import tempfile
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning import Callback, LightningModule, Trainer


class MayMissSteps(Callback):
    """A callback whose batch hooks need not see each step.

    With `--steps_per_execution 20` its `on_train_batch_start` and `on_train_batch_end` are called
    once for 20 steps, with the first batch of them and the outputs of the last. Any other callback
    with such a hook gets single steps.
    """


class MaySampleSteps(MayMissSteps):
    """One whose `on_before_optimizer_step`, too, need not see each step: with
    `--steps_per_execution 20` one of 20."""


class RunFolder(Callback):
    """Tells all processes the folder of the run, which the first one has made; a temporary one in a
    fast_dev_run."""

    temporary: tempfile.TemporaryDirectory | None = None

    def __init__(self, path: Path | None) -> None:
        self.path = path

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self.path is None and trainer.is_global_zero:
            self.temporary = tempfile.TemporaryDirectory(prefix="fast_dev_run_")
            self.path = Path(self.temporary.name)
        self.path = trainer.strategy.broadcast(self.path)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self.temporary:
            self.temporary.cleanup()
            self.temporary = self.path = None


def run_folder(trainer: Trainer) -> Path:
    """Where a callback may write: the run's folder, on any process, from `on_fit_start` or
    `on_test_start` on.

    Unlike `trainer.log_dir` it may be asked for on one process alone. In evaluate.py it is
    `trainer.default_root_dir`.
    """
    found = [callback.path for callback in trainer.callbacks if isinstance(callback, RunFolder)]  # type: ignore[attr-defined]
    return found[0] if found and found[0] else Path(trainer.default_root_dir)


def gather(own: Any) -> list[Any]:
    """That of each process, by rank; to be called on all of them."""
    found = [own]
    if dist.is_initialized():
        found = [None] * dist.get_world_size()
        dist.all_gather_object(found, own)
    return found
