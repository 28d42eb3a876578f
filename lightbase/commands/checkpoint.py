"""What evaluate.py, predict.py and export.py share with notebooks: how they open a
checkpoint, and a Trainer that writes nothing."""

import argparse
import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lightning import Callback, LightningModule, Trainer

from lightbase.commands.arguments import checkpoint_file
from lightbase.commands.extras import progress_bar, register_strategies
from lightbase.commands.result import Result
from lightbase.core.build import make_trainer
from lightbase.core.compat import quiet_lightning
from lightbase.core.device_errors import short_device_errors
from lightbase.core.devices import cpu_threads
from lightbase.core.errors import UserError, say
from lightbase.core.files import relative_to_cwd
from lightbase.core.load import load_run
from lightbase.core.project import PROJECT
from lightbase.core.spec import RunSpec


def open_checkpoint(options: argparse.Namespace, flags: Sequence[str]) -> Any:
    """Return the record of the run, the model with the weights of --ckpt_path, and the
    data. Print which file it is.

    options, flags: What `CheckpointParser.read` has returned.
    Raise UserError if the file is no sound checkpoint, is not the user's, or does not
    fit today's code. See `load_run`.
    """
    quiet_lightning()
    text = f"Checkpoint: {relative_to_cwd(options.ckpt_path)}"
    if not options.ckpt_path.with_name("best.ckpt").exists():
        text += " (there is no best.ckpt)"
    say(text)
    return load_run(options.ckpt_path, flags, options.trust_checkpoint == "true")


@contextlib.contextmanager
def trainer_of(
    spec: RunSpec, model: LightningModule, callbacks: Sequence[Callback]
) -> Iterator[Any]:
    """Yield a Trainer for a test or a prediction, without logger and checkpoints.

    Within the context, the flag --num_threads of the run counts, and an error of a
    device is a UserError of two lines.

    spec: The record of the run. Its flags of the Trainer are used.
    callbacks: The callbacks of the script. A progress bar is added.
    """
    register_strategies()
    callbacks = [*callbacks, *progress_bar(spec)]
    trainer = make_trainer(
        spec, model, callbacks, logger=False, enable_checkpointing=False
    )
    with short_device_errors(), cpu_threads(spec.config.num_threads):
        yield trainer


def open_run(run: Any, callbacks: list[Callback]) -> tuple[Trainer, Any, Any]:
    """Return a Trainer for a run that is opened in Python, in the precision and on the
    device of the run, and its module and data.

    run: A name or a path is opened as the scripts do. A Result or a module has the
        data of its training. A pair (module, data) may have been loaded.
    callbacks: Callbacks of the Trainer.
    """
    quiet_lightning()
    data: Any = None
    options: dict[str, Any] = {}
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
