"""What evaluate.py, predict.py and export.py share: how they open a checkpoint, and a
Trainer that writes nothing."""

import argparse
import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from lightning import Callback, LightningModule

from lightbase.commands.extras import progress_bar, register_strategies
from lightbase.core.build import make_trainer
from lightbase.core.compat import quiet_lightning
from lightbase.core.device_errors import short_device_errors
from lightbase.core.devices import cpu_threads
from lightbase.core.errors import say
from lightbase.core.files import relative_to_cwd
from lightbase.core.load import load_run
from lightbase.core.spec import RunSpec


def open_checkpoint(options: argparse.Namespace, flags: Sequence[str]) -> Any:
    """Return the record of the run, the model with the weights of --ckpt_path, and the
    data. Print which file it is.

    options, flags: What `CheckpointParser.read` has returned.
    Raise UserError if the file is no sound checkpoint, is not the user's, or does not
    fit today's code. See `load_run`.
    """
    quiet_lightning()
    say(f"Checkpoint: {relative_to_cwd(options.ckpt_path)}")
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
