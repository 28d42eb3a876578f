"""Find a batch size and a learning rate for an experiment before training it.

The searches are made by Lightning's Tuner. Each one has a new Trainer and begins with
the same weights, because the Tuner restores them. Nothing is changed in the config: the
user adds the suggested flags to the next command.
"""

from argparse import Namespace
from pathlib import Path
from typing import Any

from lightning import Trainer
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities.parsing import lightning_setattr

from lightbase.commands import arguments
from lightbase.commands.script import short_errors
from lightbase.commands.train import parse
from lightbase.core.build import make_trainer
from lightbase.core.checkpoint import AtomicCheckpointIO
from lightbase.core.checks import dry_run, short_loss_errors
from lightbase.core.compat import quiet_lightning
from lightbase.core.data import BaseDataModule
from lightbase.core.devices import check_one_device
from lightbase.core.errors import UserError
from lightbase.core.files import relative_to_cwd
from lightbase.core.folder import make_version, root_folder
from lightbase.core.module import BaseModule
from lightbase.core.names import flatten
from lightbase.core.spec import RunSpec, as_values


def main(args: arguments.Args = None) -> list[str]:
    """Print and return the suggested flags, such as ["--model.lr", "0.012"].

    The batch size is searched first, and the learning rate is searched with the new
    batch size. The picture lr.png is in the folder NAME_tune/version_N.

    args: The flags of tune.py and train.py. None means the flags of the command line.
    A user's mistake prints two lines and raises SystemExit. In a notebook it raises
    UserError.
    """
    with short_errors():
        options, flags = arguments.tune().read(args)
        quiet_lightning()
        spec, model, data = parse(flags)
        check_one_device(spec.config.trainer)
        finders = {}
        if "batch_size" in options.find:
            finders[flag_of(spec, "data.batch_size")] = find_batch_size
        if "lr" in options.find:
            finders[flag_of(spec, "model.lr", "model.learning_rate")] = find_lr
        spec.trainer["callbacks"] = None  # they would stop the training, or save
        if isinstance(model, BaseModule):
            model.scheduler = None  # the finder has its own
        dry_run(model, data, spec.config)
        folder = make_version(root_folder(spec.config) / f"{spec.config.name}_tune")
        suggested = []
        with short_loss_errors(model):
            for flag, find in finders.items():
                trainer = make_endless_trainer(spec, model, folder)
                suggested += [flag, find(trainer, model, data, options)]
        print(f"Folder: {relative_to_cwd(folder)}")
        print(f"Suggested flags: {' '.join(suggested)}")
        return suggested


def flag_of(spec: RunSpec, *names: str) -> str:
    """Return the flag of the first of `names` that the classes of the run take.

    names: Names of settings, such as "model.lr" and "model.learning_rate".
    Raise UserError if the classes take none of them.
    """
    settings = flatten(as_values(spec))
    for name in names:
        if name in settings:
            return f"--{name}"
    raise UserError(f"there is no {' or '.join(names)}: it cannot be searched")


def make_endless_trainer(spec: RunSpec, model: Any, folder: Path) -> Trainer:
    """Return a Trainer that only a finder ends. It does not validate, and it writes
    only the weights that the finder restores afterwards.

    spec: The record of the run. Its flags of the Trainer count, except for the ones
        below.
    folder: The finder writes the weights there, and deletes the file at its end.
    """
    return make_trainer(
        spec,
        model,
        default_root_dir=folder,
        plugins=[AtomicCheckpointIO()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        fast_dev_run=False,
        max_epochs=-1,
        num_sanity_val_steps=0,
        check_val_every_n_epoch=1_000_000,
    )


def find_batch_size(trainer: Trainer, model: Any, data: Any, options: Namespace) -> str:
    """Return the largest size that fits into memory, up to --max_batch_size. The data
    has this size afterwards.

    The search begins with 2 samples, and doubles the size until the memory is full or
    the limit is reached. The limit is never above the number of training samples.

    trainer: See `make_endless_trainer`; each search needs a new one.
    options: The flag --max_batch_size.
    """
    limit = options.max_batch_size
    if isinstance(data, BaseDataModule):
        limit = min(limit, len(data.splits["train"]))
        data.drop_last = False  # Lightning makes a loader of a size over the limit, too
    size: Any = Tuner(trainer).scale_batch_size(
        model,
        datamodule=data,
        steps_per_trial=5,
        max_val=limit + 1,  # Lightning ends the search there without a trial
    )
    if size > limit:
        size //= 2  # the next one, which was not tried
    lightning_setattr(model, "batch_size", size)  # wherever the finder has set it
    return str(size)


def find_lr(trainer: Trainer, model: Any, data: Any, options: Namespace) -> str:
    """Return the learning rate at which the loss falls fastest, and draw the losses as
    lr.png in the Trainer's folder.

    The rate grows from --min_lr to --max_lr in --num_steps training steps. Lightning
    smooths the losses, and ends the search early if the loss is above four times its
    lowest value.

    trainer: See `make_endless_trainer`; each search needs a new one.
    options: The flags --min_lr, --max_lr and --num_steps.
    Raise UserError if too few losses are finite.
    """
    finder: Any = Tuner(trainer).lr_find(
        model,
        datamodule=data,
        min_lr=options.min_lr,
        max_lr=options.max_lr,
        num_training=options.num_steps,
        update_attr=False,
    )
    suggested = finder.suggestion()
    file = Path(trainer.default_root_dir) / "lr.png"
    finder.plot(suggest=True).savefig(file)
    if suggested is None:
        problem = f"no learning rate to suggest: see {relative_to_cwd(file)}"
        way_out = "give another --min_lr or --max_lr, or more --num_steps"
        raise UserError(problem, way_out)
    return f"{suggested:.2g}"
