"""Find a batch size and a learning rate for an experiment before training it, by
Lightning's finders. The user adds the suggested flags to the next command."""

from argparse import Namespace
from collections.abc import Sized
from typing import Any

from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder

from lightbase.commands.train import parse
from lightbase.compat import quiet_lightning
from lightbase.config.errors import UserError
from lightbase.config.files import relative_to_cwd
from lightbase.config.spec import as_values
from lightbase.config.yaml_files import flatten
from lightbase.data.module import BaseDataModule
from lightbase.model.module import BaseModule
from lightbase.run.checkpoint import AtomicCheckpointIO
from lightbase.run.devices import check_one_device
from lightbase.run.fit import make_trainer, users_callbacks
from lightbase.run.folder import make_version, root_folder
from lightbase.watch.dry_run import dry_run

RATES = ("model.lr", "model.learning_rate")
"""Names of the learning rate: of a BaseModule, and in Lightning's examples."""


def run(options: Namespace) -> list[str]:
    """Print and return the suggested flags, such as ["--model.lr", "0.012"]. The batch
    size is searched first, and the learning rate with the new batch size."""
    quiet_lightning()
    spec, model, data = parse(options.others)
    check_one_device(spec.config.trainer)
    names = [name for name in RATES if name in flatten(as_values(spec))]
    if "lr" in options.find and not names:
        raise UserError(f"there is no {' or '.join(RATES)} to search")
    spec.trainer["callbacks"] = None  # they would stop the training, or save
    if isinstance(model, BaseModule):
        model.scheduler = None  # the finder has its own
    dry_run(spec, model, data)
    folder = make_version(root_folder(spec.config) / f"{spec.config.name}_tune")
    finders = make_finders(options, data)
    trainer = make_trainer(
        spec,
        [*users_callbacks(spec, model), *finders.values()],
        default_root_dir=folder,  # the finders write the weights there for a while
        plugins=[AtomicCheckpointIO()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        fast_dev_run=False,
        max_epochs=-1,
        max_steps=0,  # a finder sets its own limit
        num_sanity_val_steps=0,
        check_val_every_n_epoch=1_000_000,
    )
    trainer.fit(model, data)
    suggested = []
    if "batch_size" in finders:
        size = finders["batch_size"].optimal_batch_size
        suggested += ["--data.batch_size", str(size)]
    if "lr" in finders:
        search = finders["lr"].optimal_lr
        lr = search.suggestion()
        file = folder / "lr.png"
        search.plot(suggest=True).savefig(file)
        if lr is None:
            raise UserError(
                f"no learning rate to suggest: see {relative_to_cwd(file)}",
                "give another --min_lr or --max_lr, or more --num_steps",
            )
        suggested += [f"--{names[0]}", f"{lr:.2g}"]
    print(f"Folder: {relative_to_cwd(folder)}")
    print(f"Suggested flags: {' '.join(suggested)}")
    return suggested


def make_finders(options: Any, data: Any) -> dict[str, Any]:
    """Return the finders of --find, in the order in which they search. The data is
    loaded.

    The batch size begins with 2 samples, and is doubled until the memory is full, at
    most to --max_batch_size and the number of training samples. The learning rate grows
    from --min_lr to --max_lr in --num_steps training steps.
    """
    limit = options.max_batch_size
    if isinstance(data, BaseDataModule):
        data.setup("fit")
        samples = data.splits["train"]
        if isinstance(samples, Sized):  # the size of a stream is not known
            limit = min(limit, len(samples))
    doublings = limit.bit_length() - 1
    finders = {
        "batch_size": BatchSizeFinder(
            steps_per_trial=5, max_trials=doublings, max_val=limit + 1
        ),
        "lr": LearningRateFinder(
            options.min_lr, options.max_lr, options.num_steps, update_attr=False
        ),
    }
    return {name: finders[name] for name in finders if name in options.find}
