"""The numbers of a cross-validation: each fold's, and those of all samples together.

The folds share most of their training samples, so their results are not independent.
Their range is printed, and no standard error: it would be too small (Bengio and
Grandvalet, "No unbiased estimator of the variance of k-fold cross-validation", 2004).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from lightning import Callback

from lightbase.core.build import make_trainer
from lightbase.core.errors import say
from lightbase.core.files import relative_to_cwd
from lightbase.core.load import load_run
from lightbase.core.metrics import Accumulator
from lightbase.core.module import BaseModule
from lightbase.core.testing import run_test


class Pool(Callback):
    """Adds the test samples of several checkpoints to one accumulator.

    means: The accumulator. None before the first test.
    """

    means: Accumulator | None = None

    def on_test_start(self, trainer: Any, pl_module: Any) -> None:
        """Let the accumulator of this test add its batches to the common one, too."""
        if isinstance(pl_module, BaseModule):
            test = pl_module.curves_callback.means["test"]
            if self.means is None:
                metrics = test.metrics.clone()
                self.means = Accumulator(metrics, test.prefix, test.classes)
            test.epoch = self.means


def pooled_metrics(root: Path, folders: Sequence[Path]) -> dict[str, float]:
    """Return the test metrics over the samples of all folds, each tested by the best
    checkpoint of its fold: {test/acc: ..., test/num_samples: ...}. Each sample counts
    once, and a metric such as F1 is computed from all predictions. Print a line and
    return nothing if this is not possible.

    root: The folder of all runs.
    folders: The folder of each run, with one model and other folds of one data set.
    """
    pool = Pool()
    for folder in folders:
        path = folder / "checkpoints" / "best.ckpt"
        if not path.is_file():
            say(f"Nothing is pooled: {relative_to_cwd(path)} is missing")
            return {}
        flags = [f"--trainer.default_root_dir={root}", "--trainer.devices=1"]
        spec, model, data = load_run(path, flags)
        trainer = make_trainer(
            spec, model, first=[pool], logger=False, enable_checkpointing=False
        )
        run_test(trainer, model, data, None)
    if pool.means is None:
        say("Nothing is pooled: the module is no BaseModule, or has no test")
        return {}
    metrics = pool.means.result(lambda x: x)  # one process has all samples
    num = int(metrics["test/num_samples"])
    say(f"pooled: {num:,} samples, each tested by the network of its fold")
    return {name: float(value) for name, value in metrics.items()}


def fold_rows(
    numbers: dict[str, dict[Any, float]], pooled: dict[str, float]
) -> list[dict[str, Any]]:
    """Return a row for each metric: the mean, the lowest and the highest value of the
    folds, and the value of all folds together.

    numbers: {metric: {fold: value}}.
    pooled: The result of `pooled_metrics`.
    """
    rows = []
    for metric in numbers:
        values = [*numbers[metric].values()]
        row = {"metric": metric, "folds": len(values), "mean": np.mean(values)}
        row |= {"lowest": np.min(values), "highest": np.max(values)}
        rows.append(row | {"pooled": pooled.get(metric)})
    return rows
