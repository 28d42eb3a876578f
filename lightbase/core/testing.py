"""The test of a checkpoint, and the lines that report it.

Read `run_test` first. train.py calls it after the training, with the path of the best
checkpoint. evaluate.py calls it with weights that are loaded already.
"""

import random
from collections.abc import Mapping
from itertools import filterfalse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.seed import isolate_rng

from lightbase.core.curves import is_of_class
from lightbase.core.errors import say
from lightbase.core.files import relative_to_cwd
from lightbase.core.record import best_callback
from lightbase.core.tables import as_text

LENGTHS = ("epochs", "steps", "train_seconds")
"""Keys of metrics.json that are no metrics."""
NO_TEST = (
    "No test: the model or the data has none, the data has no batch for it, or nothing "
    "is logged with self.track or self.log"
)
"""The line in place of the test metrics."""


def best_checkpoint(trainer: Trainer) -> Path | None:
    """Return the path of best.ckpt, or None if there is none.

    All processes have to call this function. The first one decides, because only it
    writes the file.
    """
    best = best_callback(trainer)
    if best is None:
        return None
    path = Path(str(best.dirpath), "best.ckpt")
    if trainer.strategy.broadcast(path.is_file()):
        return path
    return None


def run_test(
    trainer: Any, model: LightningModule, data: LightningDataModule, path: Path | None
) -> dict[str, Any]:
    """Test a checkpoint. Return the metrics; {} if there are none, see `NO_TEST`.

    The random generators are seeded with 0 for the test, and restored after it. So the
    result does not depend on random numbers that the training has drawn.

    trainer: WeightAveraging is removed from its callbacks. best.ckpt already holds the
        averaged weights, and WeightAveraging would replace them.
    path: The checkpoint, or None to test the weights that the model has now.
    """
    if not has_test(model, data):
        return {}
    # best.ckpt holds the averaged weights; WeightAveraging would replace them
    trainer.callbacks = [
        callback
        for callback in trainer.callbacks
        if not isinstance(callback, WeightAveraging)
    ]
    with isolate_rng(include_cuda=torch.cuda.is_initialized()):
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        results = trainer.test(
            model, data, ckpt_path=path, verbose=False, weights_only=True
        )
    metrics: dict[str, Any] = {}
    for result in results:
        for key, value in result.items():
            # in the digits of float32: 0.979, not 0.9789999723434448
            metrics[key] = float(str(np.float32(value)))
            if key == "test/num_samples":
                metrics[key] = int(value)
    return metrics


def has_test(model: LightningModule, data: LightningDataModule) -> bool:
    """Return whether the model has a test_step and the data a test_dataloader."""
    return is_overridden("test_step", model) and is_overridden("test_dataloader", data)


def say_results(
    values: Mapping[str, Any], tested: Path | None, without: str = NO_TEST
) -> None:
    """Print the length of the training and the test metrics. Metrics of single classes
    follow below the others, the lowest value first.

    values: The content of metrics.json.
    tested: The checkpoint that was tested, or None for the last weights.
    without: The line in place of the test metrics if there are none.
    """
    say(
        f"Trained {values['epochs']} epochs, {values['steps']:,} steps in "
        f"{values['train_seconds']:.1f} s"
    )
    metrics = [name for name in values if name not in LENGTHS]
    if not metrics:
        say(without)
        return
    weights = "the last weights"
    if tested:
        weights = f"the best checkpoint {relative_to_cwd(tested)}"
    overall = filterfalse(is_of_class, metrics)
    texts = [f"{name} {as_text(values[name])}" for name in overall]
    say(f"Test of {weights}: {', '.join(texts)}")
    class_metrics = filter(is_of_class, metrics)
    for name in sorted(class_metrics, key=values.__getitem__):  # the worst class first
        say(f"  {name:<40}{as_text(values[name])}")
