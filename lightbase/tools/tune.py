"""Find a batch size and a learning rate for an experiment before training it.

python scripts/tune.py --config configs/mnist_mlp.yaml
python scripts/tune.py --config configs/mnist_mlp.yaml --find lr --min_lr 1e-5 --max_lr 1

Batch size: Lightning's finder doubles it, from --data.batch_size on, until the memory is full or
--max_batch_size is reached. The suggestion is the smallest size within 5 % of the highest speed: a
larger one only makes fewer steps of an epoch.

Learning rate: Lightning's finder raises it from --min_lr to --max_lr over --num_steps steps (Smith,
"Cyclical learning rates for training neural networks", 2017), the same in all parameter groups. The
suggestion is a tenth of the highest rate at which the loss is still about at its lowest, fastai's
rule of thumb.

All flags of train.py work too. The last line has the flags to paste. The plots are in a run folder
NAME_tune, and in TensorBoard.
"""

import contextlib
import itertools
import math
import statistics
import time
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jsonargparse.typing import PositiveFloat, PositiveInt
from lightning import LightningModule, Trainer
from lightning.pytorch.profilers import Profiler
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities.parsing import lightning_getattr, lightning_setattr
from torch.utils.tensorboard import SummaryWriter

from lightbase.cli.script import ScriptParser, short_errors
from lightbase.cli.training_cli import TrainingCLI
from lightbase.compat import quiet_lightning
from lightbase.data.module import BaseDataModule
from lightbase.devices.devices import cpu_threads, describe_devices
from lightbase.errors import UserError
from lightbase.folder import Run, root_folder, short
from lightbase.module import BaseModule
from lightbase.resume.checkpoints import AtomicCheckpointIO
from lightbase.run.checks import prepare
from lightbase.run.train import parse
from lightbase.tools.sweep import check_one_device
from lightbase.watch import figures

LARGEST = 8192  # Lightning's finder goes no further
SMOOTHING = 0.98  # of the losses that Lightning's finder reports


def main(args: Sequence[str] | None = None) -> list[str]:
    """Returns the suggested flags."""
    parser = ScriptParser(description=__doc__)
    both = ["batch_size", "lr"]
    parser.add_argument("--find", nargs="+", choices=both, default=both, help="what to search")
    add = parser.add_argument
    add("--max_batch_size", type=PositiveInt, help="default: 1024 on a CPU, 8192 on a GPU")
    add("--min_lr", type=PositiveFloat, default=1e-5, help="the first learning rate")
    add("--max_lr", type=PositiveFloat, default=1.0, help="the last learning rate")
    add("--num_steps", type=PositiveInt, default=500, help="steps from first to last")
    with short_errors():
        options, flags = parser.parse_known_args(args)
        if options.min_lr >= options.max_lr:
            rates = f"--min_lr {options.min_lr} --max_lr {options.max_lr}"
            raise UserError(f"{rates}: the first must be smaller", 2)
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


def plot(run: Run, name: str, labels: tuple[str, str], x: Any, y: Any, best: int | None) -> None:
    """best: Index of the suggested value."""
    title = "no suggestion" if best is None else f"suggested: {x[best]:.4g}"
    figure, axes = figures.new_figure(6, 4, title, *labels)
    axes.semilogx(x, y, marker="." if len(x) < 20 else None, color=figures.COLOURS[0])
    if best is not None:
        axes.semilogx(x[best], y[best], "o", markersize=10, color=figures.COLOURS[3])
    figure.savefig(run.folder / f"{name}.png")
    with SummaryWriter(str(run.folder)) as writer:
        writer.add_figure(f"tune/{name}", figure, 0)


# batch size


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
    is_ours = isinstance(data, BaseDataModule)
    start = cli.config.data.init_args.batch_size
    clock = TrialClock(cli.model)
    trainer = make_trainer(cli, run, profiler=clock)
    print(describe_devices(trainer))
    on_cpu = trainer.strategy.root_device.type == "cpu"
    limit = min(limit or (max(1024, start) if on_cpu else LARGEST), LARGEST)
    if is_ours:
        limit = min(limit, len(data.splits["train"]))
    if start > limit:
        what = f"the search starts at --data.batch_size {start}, over --max_batch_size"
        raise UserError(f"{what} {limit}", 2)
    drop_last = is_ours and data.drop_last
    if is_ours:
        data.drop_last = False  # Lightning makes a loader of a size over the limit, too
    # at its max_val Lightning ends the search without a trial
    options: Any = {"steps_per_trial": 5, "init_val": start, "max_val": limit + 1}
    largest = Tuner(trainer).scale_batch_size(cli.model, datamodule=data, **options) or 0
    # the median is neither the first batch nor the smaller last one of an epoch
    tried = {size: size / statistics.median(times) for size, times in clock.seconds.items()}
    speeds = {size: tried[size] for size in sorted(tried) if size <= largest}
    if not speeds:
        raise UserError(f"no batch size fits, not even {min(tried)}: take a smaller network")
    best = min(size for size, speed in speeds.items() if speed >= 0.95 * max(speeds.values()))
    print("Batch size    samples/s")
    for size, speed in speeds.items():
        print(f"{size:>10}{speed:>13,.0f}{'  suggested' * (size == best)}")
    sizes, labels = list(speeds), ("batch size", "samples/s")
    plot(run, "batch_size", labels, sizes, list(speeds.values()), sizes.index(best))
    not_tried = f"fits; larger ones than {limit} were not tried"
    print(max(speeds), "is the largest that fits" if max(tried) > max(speeds) else not_tried)
    lightning_setattr(cli.model, "batch_size", best)  # wherever the finder has set it
    if is_ours:
        data.drop_last = drop_last
    return best


# learning rate


def find_lr(cli: TrainingCLI, options: Namespace, run: Run) -> float:
    finder: Any = Tuner(make_trainer(cli, run)).lr_find(
        cli.model,
        datamodule=cli.datamodule,
        min_lr=options.min_lr,
        max_lr=options.max_lr,
        num_training=options.num_steps,
        update_attr=False,
    )
    losses = batch_losses(finder.results["loss"])
    rates = finder.results["lr"][: len(losses)]
    best = choose(rates, losses, options.num_steps)
    if losses:
        curve = smooth(losses)
        curve = np.minimum(curve, 1.5 * curve[0])  # without the end, where the loss runs away
        plot(run, "lr", ("learning rate", "loss"), rates, curve, best)
    if best is None:
        what = f"no learning rate to suggest: see the plot in {short(run.folder)}"
        raise UserError(f"{what}\ngive another --min_lr or --max_lr, or more --num_steps")
    return rates[best]


def batch_losses(smoothed: Sequence[float]) -> list[float]:
    """The loss of each batch, from the averages that Lightning's finder reports.

    They lag by some 50 batches. They start at half the loss: Lightning 2.6 divides the i-th average
    by 1 - 0.98^(i+1), where 1 - 0.98^i would be right. The list ends before the first loss that is
    not finite.
    """
    sums = [loss * (1 - SMOOTHING ** (i + 2)) for i, loss in enumerate(smoothed)]
    pairs = itertools.pairwise([0.0, *sums])
    losses = [(this - SMOOTHING * before) / (1 - SMOOTHING) for before, this in pairs]
    return list(itertools.takewhile(math.isfinite, losses))


def smooth(losses: Sequence[float]) -> np.ndarray:
    """Means of neighbours, weighted by a normal curve: of about 1/11 of the losses each."""
    position = np.arange(len(losses))
    width = max(1.0, len(losses) / 40)  # the standard deviation, in steps
    weights = np.exp(-0.5 * ((position[:, None] - position) / width) ** 2)
    return weights @ np.asarray(losses) / weights.sum(1)


def choose(rates: Sequence[float], losses: Sequence[float], num_steps: int) -> int | None:
    """Index of the suggested rate; None if the loss falls nowhere, or still falls at the end.

    rates, losses: of each step, fewer than `num_steps` if the loss ran away. Lightning's own
    suggestion is the steepest fall over the rate, not over its logarithm: nearly always noise among
    the smallest rates.
    """
    if len(rates) <= 20:
        return None
    curve = smooth(losses)
    lowest = int(curve.argmin())
    fall = curve[0] - curve[lowest]
    deviation = float(np.std(losses[: lowest + 1] - curve[: lowest + 1]))
    noise = deviation / math.sqrt(len(losses) / 11)
    # the valley is flat: take its far end, which still has 95 % of the fall
    end = int(np.flatnonzero(curve < curve[lowest] + 0.05 * fall)[-1])
    falls = fall >= max(5 * noise, 0.002 * abs(curve[0]))
    still_falls = end >= num_steps - 3
    if not falls or still_falls or rates[end] / 10 < rates[0]:
        return None
    return int(np.searchsorted(rates, rates[end] / 10))
