"""Open a checkpoint for evaluate.py, predict.py and export.py, or in Python, with a
Trainer that writes nothing. `Result` is what `lightbase.train` returns.
"""

import contextlib
from argparse import Namespace
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from lightning import Callback, LightningModule, Trainer
from matplotlib.figure import Figure

from lightbase.commands.flags import checkpoint_file
from lightbase.commands.train import progress_bar, register_strategies
from lightbase.compat import quiet_lightning
from lightbase.config.errors import UserError, say
from lightbase.config.files import Values, relative_to_cwd
from lightbase.config.paths import PROJECT
from lightbase.config.spec import RunSpec
from lightbase.model.curves import Picture, is_of_class
from lightbase.run.devices import cpu_threads
from lightbase.run.fit import make_trainer, users_callbacks
from lightbase.run.record import best_callback, recorder_of
from lightbase.setup.load import load_run


def open_checkpoint(options: Namespace) -> Any:
    """Return the record of the run, the model with the weights of --ckpt_path, and the
    data. Print which file it is. See `load_run`."""
    quiet_lightning()
    say(f"Checkpoint: {relative_to_cwd(options.ckpt_path)}")
    return load_run(
        options.ckpt_path, options.others, options.trust_checkpoint == "true"
    )


@contextlib.contextmanager
def trainer_of(
    spec: RunSpec, model: LightningModule, callbacks: Sequence[Callback]
) -> Iterator[Any]:
    """Yield a Trainer for a test or a prediction, without logger and checkpoints, with
    the run's flags, and a progress bar."""
    register_strategies()
    callbacks = [*users_callbacks(spec, model), *callbacks, *progress_bar(spec)]
    trainer = make_trainer(spec, callbacks, logger=False, enable_checkpointing=False)
    with cpu_threads(spec.config.num_threads):
        yield trainer


def open_run(run: Any, callbacks: list[Callback]) -> tuple[Trainer, Any, Any]:
    """Return a Trainer for a run that is opened in Python, in the precision and on the
    device of the run, and its module and data. run: See `lightbase.predict`."""
    quiet_lightning()
    data: Any = None
    options: Values = {}
    if isinstance(run, str | Path):
        spec, run, data = load_run(checkpoint_file(str(run), PROJECT.logs))
        options = {x: spec.config.trainer[x] for x in ("accelerator", "precision")}
    elif isinstance(run, tuple):
        run, data = run
    elif isinstance(run, Result):
        run = run.module
    with contextlib.suppress(RuntimeError):  # raised if the module has no Trainer
        before = run.trainer
        data = data or before.datamodule
        options = {"accelerator": before.strategy.root_device.type}
        options["precision"] = before.precision
    if data is None:
        raise UserError(
            f"no lightbase.train has trained this {type(run).__name__}",
            "give the name of its run, or (module, data)",
        )
    trainer = Trainer(
        **options,
        devices=1,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    return trainer, run, data


class Result(dict[str, Any]):
    """The result of a training: the dict of metrics.json, with more attributes.

    module: The module, with the weights of the best epoch.
    folder: The folder of the run. None with fast_dev_run.
    best_epoch: The number of the best epoch, from 1. None if no metric compares epochs.
    epochs: The metrics of each epoch, {curve: number}, with its number, "epoch".
    """

    def __init__(self, values: Values, module: LightningModule) -> None:
        super().__init__(values)
        self.module = module
        recorder = recorder_of(module.trainer)
        self.epochs = recorder.history
        self.folder = recorder.folder
        best = best_callback(module.trainer)
        self.best_epoch: int | None = getattr(best, "best_epoch", None) or None

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics of training and validation in the best epoch, or in the last one
        if none is the best. Then the content of the dict."""
        row: Values = {}
        for row in self.epochs:
            if row["epoch"] == self.best_epoch:
                break
        return row | self

    @property
    def history(self) -> Any:
        """The metrics of all epochs: a DataFrame of pandas with a row for each epoch,
        or {curve: list} if pandas is not installed. An epoch without a validation has
        no values in val/: NaN or None."""
        names = dict.fromkeys(chain(*self.epochs))
        columns = {name: [row.get(name) for row in self.epochs] for name in names}
        try:
            import pandas
        except ImportError:
            return columns
        return pandas.DataFrame(columns)

    def plot(self) -> Figure:
        """Draw the curves of training and validation over the epochs: the losses on the
        left, and the other metrics on the right."""
        figure = Picture((9, 3), layout="constrained")
        figure.supxlabel("epoch")
        losses, others = figure.subplots(1, 2)
        history = self.history
        for name in history:
            if name != "epoch" and not is_of_class(name):
                axes = others
                if name.endswith("loss"):
                    axes = losses
                axes.plot(history["epoch"], history[name], ".-", label=name)
                axes.legend()
        return figure
