"""Find a batch size and a learning rate for an experiment before training it."""

import contextlib
import statistics
import time
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.profilers import Profiler
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities.parsing import lightning_getattr, lightning_setattr

from lightbase.cli import arguments
from lightbase.cli.script import short_errors
from lightbase.cli.training_cli import TrainingCLI
from lightbase.compat import quiet_lightning
from lightbase.data.module import BaseDataModule
from lightbase.devices.devices import cpu_threads
from lightbase.errors import UserError
from lightbase.folder import Run, root_folder, short
from lightbase.module import BaseModule
from lightbase.resume.state import AtomicCheckpointIO
from lightbase.run.checks import prepare
from lightbase.run.train import parse
from lightbase.tools.sweep import check_one_device
from lightbase.watch import figures


def main(args: Sequence[str] | None = None) -> list[str]:
    """Returns the suggested flags."""
    with short_errors():
        options, flags = arguments.tune().read(args)
        quiet_lightning()
        cli = parse([*flags, "--steps_per_execution", "1"])  # the finders look at each step
        check_one_device(cli.config.trainer)
        if "lr" in options.find:
            lr_name = argument(cli.config.model, "lr", "learning_rate")
        if "batch_size" in options.find:
            argument(cli.config.data, "batch_size")
        cli.config_init.trainer.callbacks = None  # they would stop the training, or save
        if isinstance(cli.model, BaseModule):
            cli.model.scheduler, cli.model.scheduler_args = None, {}  # the finder has its own
        prepare(cli.model, cli.datamodule, cli.config)
        run, suggested = Run(root_folder(cli.config), f"{cli.config.name}_tune"), []
        with contextlib.closing(run), cpu_threads(cli.config.num_threads):
            if "batch_size" in options.find:
                size = find_batch_size(cli, options.max_batch_size, run)
                suggested += ["--data.batch_size", str(size)]
            if "lr" in options.find:
                suggested += [f"--model.{lr_name}", f"{find_lr(cli, options, run):.2g}"]
        print(f"Plots: {short(run.folder)}\nSuggested flags: {' '.join(suggested)}")
        return suggested


def argument(config: Any, *names: str) -> str:
    """The first of `names` that the class of a config takes. Raises UserError."""
    for name in names:
        if name in config.get("init_args", {}):
            return name
    raise UserError(f"{config.class_path} has no argument {' or '.join(names)}")


def make_trainer(cli: TrainingCLI, run: Run, **options: Any) -> Trainer:
    """A Trainer without end, which writes only the weights that a finder restores afterwards."""
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


def plot(run: Run, name: str, unit: str, x: Any, y: Any, suggested: float) -> None:
    figure, axes = figures.new_figure(6, 4, f"suggested: {suggested or 'none'}", name, unit)
    axes.semilogx(x, y)
    axes.axvline(suggested or x[0], linestyle="--")
    figure.savefig(run.folder / f"{name}.png")


class TrialClock(Profiler):
    """Times each batch, from its loading to the end of its step, by batch size."""

    def __init__(self, model: LightningModule) -> None:
        super().__init__()
        self.model = model
        self.seconds: dict[int, list[float]] = {}

    def start(self, action_name: str) -> None:
        if action_name.endswith("train_dataloader_next"):
            self.since = time.perf_counter()

    def stop(self, action_name: str) -> None:
        if action_name == "run_training_batch":
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
            size: Any = lightning_getattr(self.model, "batch_size")
            self.seconds.setdefault(size, []).append(time.perf_counter() - self.since)


def find_batch_size(cli: TrainingCLI, limit: int | None, run: Run) -> int:
    """The suggested size, which the data module then has."""
    data: Any = cli.datamodule
    start = cli.config.data.init_args.batch_size
    clock = TrialClock(cli.model)
    trainer = make_trainer(cli, run, profiler=clock)
    is_on_cpu = trainer.strategy.root_device.type == "cpu"
    # Lightning's finder goes no further than 8192
    limit = min(limit or (max(1024, start) if is_on_cpu else 8192), 8192)
    if is_ours := isinstance(data, BaseDataModule):
        limit, drop_last = min(limit, len(data.splits["train"])), data.drop_last
        data.drop_last = False  # Lightning makes a loader of a size over the limit, too
    # at its max_val Lightning ends the search without a trial
    options: Any = {"steps_per_trial": 5, "init_val": start, "max_val": limit + 1}
    largest = Tuner(trainer).scale_batch_size(cli.model, datamodule=data, **options) or 0
    # the median is neither the first batch nor the smaller last one of an epoch
    times = {size: statistics.median(clock.seconds[size]) for size in sorted(clock.seconds)}
    speeds = {size: size / times[size] for size in times if size <= largest}
    if not speeds:
        raise UserError(f"no batch size from {start} to {limit} fits: give other limits", 2)
    best = min(size for size, speed in speeds.items() if speed >= 0.95 * max(speeds.values()))
    print("Batch size    samples/s")
    for size, speed in speeds.items():
        print(f"{size:>10}{speed:>13,.0f}{'  suggested' * (size == best)}")
    plot(run, "batch_size", "samples/s", [*speeds], [*speeds.values()], best)
    larger = "larger ones do not" if len(times) > len(speeds) else f"the limit is {limit}"
    print(f"{max(speeds)} fits; {larger}")
    lightning_setattr(cli.model, "batch_size", best)  # wherever the finder has set it
    if is_ours:
        data.drop_last = drop_last
    return best


def find_lr(cli: TrainingCLI, options: Namespace, run: Run) -> float:
    finder: Any = Tuner(make_trainer(cli, run)).lr_find(
        cli.model,
        datamodule=cli.datamodule,
        min_lr=options.min_lr,
        max_lr=options.max_lr,
        num_training=options.num_steps,
        update_attr=False,
    )
    rates, losses = np.array(finder.results["lr"]), np.array(finder.results["loss"])
    # Lightning 2.6 divides the i-th average by 1 - 0.98^(i+1); 1 - 0.98^i would be right
    steps = np.arange(1, len(losses) + 1)
    losses *= (1 - 0.98 ** (steps + 1)) / (1 - 0.98**steps)
    lowest = rates[np.nan_to_num(losses, nan=np.inf).argmin()]
    if lowest < 10 * options.min_lr or lowest == rates[-1]:
        lowest = 0.0
    plot(run, "lr", "smoothed loss", rates, losses, lowest / 10)
    if not lowest:
        what = f"no learning rate to suggest: see the plot in {short(run.folder)}"
        raise UserError(f"{what}\ngive another --min_lr or --max_lr, or more --num_steps")
    return float(lowest) / 10
