"""Find a batch size and a learning rate for an experiment before training it."""

import contextlib
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from lightning import Trainer
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities.parsing import lightning_setattr

from lightbase.commands import arguments
from lightbase.commands.script import short_errors
from lightbase.core.checkpoint import AtomicCheckpointIO
from lightbase.core.checks import prepare
from lightbase.core.compat import quiet_lightning
from lightbase.core.data import BaseDataModule
from lightbase.core.devices import check_one_device, cpu_threads
from lightbase.core.errors import UserError
from lightbase.core.folder import Run, root_folder, short
from lightbase.core.module import BaseModule
from lightbase.core.run import parse
from lightbase.core.training_cli import TrainingCLI


def main(args: Sequence[str] | None = None) -> list[str]:
    """Returns the suggested flags."""
    with short_errors():
        options, flags = arguments.tune().read(args)
        quiet_lightning()
        cli = parse(
            [*flags, "--steps_per_execution", "1"]
        )  # the finders look at each step
        check_one_device(cli.config.trainer)
        if "lr" in options.find:
            lr_name = argument(cli.config.model, "lr", "learning_rate")
        if "batch_size" in options.find:
            argument(cli.config.data, "batch_size")
        cli.config_init.trainer.callbacks = (
            None  # they would stop the training, or save
        )
        if isinstance(cli.model, BaseModule):
            cli.model.scheduler, cli.model.scheduler_args = (
                None,
                {},
            )  # the finder has its own
        prepare(cli.model, cli.datamodule, cli.config)
        run, suggested = Run(root_folder(cli.config), f"{cli.config.name}_tune"), []
        with contextlib.closing(run), cpu_threads(cli.config.num_threads):
            if "batch_size" in options.find:
                size = find_batch_size(cli, options.max_batch_size, run)
                suggested += ["--data.batch_size", str(size)]
            if "lr" in options.find:
                suggested += [f"--model.{lr_name}", f"{find_lr(cli, options, run):.2g}"]
        print(f"Folder: {short(run.folder)}\nSuggested flags: {' '.join(suggested)}")
        return suggested


def argument(config: Any, *names: str) -> str:
    """The first of `names` that the class of a config takes. Raises UserError."""
    for name in names:
        if name in config.get("init_args", {}):
            return name
    raise UserError(f"{config.class_path} has no argument {' or '.join(names)}")


def make_trainer(cli: TrainingCLI, run: Run, **options: Any) -> Trainer:
    """A Trainer without end, which writes only the weights that a finder restores
    afterwards."""
    return cli.make_trainer(
        default_root_dir=run.folder,
        plugins=[AtomicCheckpointIO()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        fast_dev_run=False,
        max_epochs=-1,
        num_sanity_val_steps=0,
        check_val_every_n_epoch=1_000_000,
        **options,
    )


def find_batch_size(cli: TrainingCLI, limit: int | None, run: Run) -> int:
    """Return the largest size that fits into memory, up to the limit. The data then has
    it."""
    data: Any = cli.datamodule
    start = cli.config.data.init_args.batch_size
    trainer = make_trainer(cli, run)
    # Lightning's finder goes no further than 8192
    limit = min(
        limit or (1024 if trainer.strategy.root_device.type == "cpu" else 8192), 8192
    )
    if isinstance(data, BaseDataModule):
        limit = min(limit, len(data.splits["train"]))
        data.drop_last = False  # Lightning makes a loader of a size over the limit, too
    if start > limit:
        raise UserError(
            f"--max_batch_size {limit}: the search begins at batch_size {start}",
            status=2,
        )
    # at its max_val Lightning ends the search without a trial
    options: Any = {"steps_per_trial": 5, "init_val": start, "max_val": limit + 1}
    size = Tuner(trainer).scale_batch_size(cli.model, datamodule=data, **options)
    if not size:
        raise UserError(
            f"no batch size from {start} to {limit} fits: give other limits", status=2
        )
    if size > limit:
        size //= 2  # the next one, which was not tried
    lightning_setattr(cli.model, "batch_size", size)  # wherever the finder has set it
    print(f"Batch size {size} fits")
    return size


def find_lr(cli: TrainingCLI, options: Namespace, run: Run) -> float:
    """Return the rate at which the loss falls fastest, and draw the losses as
    lr.png."""
    finder: Any = Tuner(make_trainer(cli, run)).lr_find(
        cli.model,
        datamodule=cli.datamodule,
        min_lr=options.min_lr,
        max_lr=options.max_lr,
        num_training=options.num_steps,
        update_attr=False,
    )
    suggested = finder.suggestion()
    finder.plot(suggest=suggested is not None).savefig(run.folder / "lr.png")
    if suggested is None:
        what = f"no learning rate to suggest: see the plot in {short(run.folder)}"
        raise UserError(what, "give another --min_lr or --max_lr, or more --num_steps")
    return float(suggested)
