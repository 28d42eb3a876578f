"""Find a batch size and a learning rate for an experiment before training it.

python scripts/tune.py --config configs/mnist_mlp.yaml
python scripts/tune.py --config configs/mnist_mlp.yaml --find lr --min_lr 1e-5 --max_lr 1

Batch size: Lightning's finder doubles it, from --data.batch_size on, until the memory is full or
--max_batch_size is reached. The suggestion is the smallest size within 5 % of the highest speed: a
larger one only makes fewer steps of an epoch.

Learning rate: Lightning's finder raises it from --min_lr to --max_lr over --num_steps steps (Smith,
"Cyclical learning rates for training neural networks", 2017). The suggestion is a tenth of the
highest rate at which the loss is still about at its lowest, fastai's rule of thumb.

All flags of train.py work too. The last line has the flags to paste. The plots are in a run folder
NAME_tune, and in TensorBoard.
"""

import itertools
import math
import statistics
import time
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from lightning import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.profilers import Profiler
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities.parsing import lightning_setattr
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
from lightbase.watch import figures

LARGEST = 8192  # Lightning's finder goes no further
SMOOTHING = 0.98  # of the losses that Lightning's finder reports


def main(args: Sequence[str] | None = None) -> list[str]:
    """Returns the suggested flags."""
    parser = ScriptParser(description=__doc__)
    both = ["batch_size", "lr"]
    parser.add_argument("--find", nargs="+", choices=both, default=both, help="what to search")
    parser.add_argument("--max_batch_size", type=int, help="default: 1024 on a CPU, 8192 on a GPU")
    parser.add_argument("--min_lr", type=float, default=1e-5, help="the first learning rate")
    parser.add_argument("--max_lr", type=float, default=1.0, help="the last learning rate")
    parser.add_argument("--num_steps", type=int, default=500, help="steps from first to last")
    with short_errors():
        options, flags = parser.parse_known_args(args)
        check_options(options)
        quiet_lightning()
        cli = parse([*flags, "--steps_per_execution", "1"])  # the finders look at each step
        check_device(cli)
        if "lr" in options.find:
            lr_name, _ = argument(cli.model, "lr", "learning_rate")
        if "batch_size" in options.find:
            argument(cli.datamodule, "batch_size")
        cli.config_init.trainer.callbacks = None  # they would stop the training, or save
        if isinstance(cli.model, BaseModule):
            cli.model.scheduler, cli.model.scheduler_args = None, {}  # the finder has its own
            if cli.model.parameter_groups and "lr" in options.find:
                print(
                    "The search gives all parameter groups one rate, that of --model.lr: set "
                    "theirs in proportion"
                )
        prepare(cli.model, cli.datamodule, cli.config)
        run, suggested = Run(root_folder(cli.config), f"{cli.config.name}_tune"), []
        try:
            with cpu_threads(cli.config.num_threads):
                if "batch_size" in options.find:
                    size = find_batch_size(cli, options.max_batch_size, run)
                    suggested += ["--data.batch_size", str(size)]
                if "lr" in options.find:
                    suggested += [f"--model.{lr_name}", f"{find_lr(cli, options, run):.2g}"]
        finally:
            run.close()
            if suggested:
                print(f"Plots: {short(run.folder)}\nSuggested flags: {' '.join(suggested)}")
        return suggested


def check_options(options: Namespace) -> None:
    if not 0 < options.min_lr < options.max_lr < math.inf:
        rates = f"--min_lr {options.min_lr} --max_lr {options.max_lr}"
        raise UserError(f"{rates}: the first must be over 0 and smaller", 2)
    if options.num_steps < 50:
        what = f"--num_steps {options.num_steps}"
        raise UserError(f"{what}: 50 is the least, 500 gives a smoother curve", 2)


def check_device(cli: TrainingCLI) -> None:
    cli.check_devices()
    strategy, devices = cli.config.trainer.strategy, cli.config.trainer.devices
    if strategy not in ("auto", "single_device") or devices not in (1, "1", "auto"):
        what = "tune.py uses one device"
        raise UserError(f"{what}: leave --trainer.strategy and --trainer.devices out", 2)


def argument(owner: LightningModule | LightningDataModule, *names: str) -> tuple[str, Any]:
    """The first of `names` that is an attribute or hyper-parameter of the owner, and its value."""
    values = {**owner.hparams, **vars(owner)}
    for name in names:
        if name in values:
            return name, values[name]
    what = f"{type(owner).__name__} has no {' or '.join(names)}"
    raise UserError(f"{what}, neither as an attribute nor in its hparams")


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


# batch size


class TrialClock(Profiler):
    """Times each batch, from its loading to the end of its step, by batch size."""

    def __init__(self, data: LightningDataModule) -> None:
        super().__init__()
        self.data = data
        self.seconds: dict[int, list[float]] = {}

    def start(self, action_name: str) -> None:
        if action_name.endswith("train_dataloader_next"):
            self.since = time.perf_counter()

    def stop(self, action_name: str) -> None:
        if action_name == "run_training_batch":
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
            _, size = argument(self.data, "batch_size")
            self.seconds.setdefault(size, []).append(time.perf_counter() - self.since)


def find_batch_size(cli: TrainingCLI, limit: int | None, run: Run) -> int:
    """The suggested size, which the data module then has."""
    data: Any = cli.datamodule
    is_ours = isinstance(data, BaseDataModule)
    _, start = argument(data, "batch_size")
    clock = TrialClock(data)
    trainer = make_trainer(cli, run, profiler=clock)
    print(describe_devices(trainer))
    on_cpu = trainer.strategy.root_device.type == "cpu"
    limit = min(limit or (max(1024, start) if on_cpu else LARGEST), LARGEST)
    if is_ours:
        limit = min(limit, len(data.splits["train"]))
    if start > limit:
        what = f"--data.batch_size {start}, where the search starts"
        raise UserError(f"{what}, is over --max_batch_size {limit}", 2)
    drop_last = is_ours and data.drop_last
    if is_ours:
        # Lightning makes a loader of the next size before it compares that with the limit
        data.drop_last = False
    # at its max_val Lightning ends the search without a trial
    options: Any = {"steps_per_trial": 5, "init_val": start, "max_val": limit + 1}
    largest = Tuner(trainer).scale_batch_size(cli.model, datamodule=data, **options) or 0
    # the median is neither the first batch nor the smaller last one of an epoch
    tried = {size: size / statistics.median(times) for size, times in clock.seconds.items()}
    speeds = {size: tried[size] for size in sorted(tried) if size <= largest}
    if not speeds:
        what = f"no batch size fits, not even {min(tried)}"
        raise UserError(f"{what}: take a smaller network or smaller images")
    best = min(size for size, speed in speeds.items() if speed >= 0.95 * max(speeds.values()))
    show_speeds(speeds, best, run)
    does_not_fit = max(tried) > max(speeds)
    not_tried = f"fits; larger ones than {limit} were not tried"
    print(f"{max(speeds)} {'is the largest that fits' if does_not_fit else not_tried}")
    lightning_setattr(cli.model, "batch_size", best)  # wherever the finder has set it
    if is_ours:
        data.drop_last = drop_last
    return best


def show_speeds(speeds: dict[int, float], best: int, run: Run) -> None:
    """speeds: samples per second by batch size."""
    print("Batch size    samples/s")
    for size, speed in speeds.items():
        print(f"{size:>10}{speed:>13,.0f}{'  suggested' * (size == best)}")
    figure, axes = figures.new_figure(6, 4, f"suggested: {best}", "batch size", "samples/s")
    axes.semilogx([*speeds], [*speeds.values()], marker="o", color=figures.COLOURS[0])
    axes.semilogx(best, speeds[best], marker="o", markersize=10, color=figures.COLOURS[3])
    save(figure, "batch_size", run)


def save(figure: Any, name: str, run: Run) -> None:
    figure.savefig(run.folder / f"{name}.png")
    with SummaryWriter(str(run.folder)) as writer:
        figures.add_image(writer, f"tune/{name}", figure, 0)


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
    best, reason = choose(rates, losses, options.num_steps)
    if losses:
        show_losses(rates, smooth(losses), best, run)
    if best is None:
        what = f"no learning rate to suggest: {reason}"
        raise UserError(f"{what}\nthe plot is in {short(run.folder)}")
    print(reason)
    return rates[best]


def show_losses(rates: Sequence[float], curve: np.ndarray, best: int | None, run: Run) -> None:
    title = "no suggestion" if best is None else f"suggested: {rates[best]:.2g}"
    figure, axes = figures.new_figure(6, 4, title, "learning rate", "loss")
    axes.semilogx(rates, curve, color=figures.COLOURS[0])
    if best is not None:
        axes.semilogx(rates[best], curve[best], "o", markersize=10, color=figures.COLOURS[3])
    # without the end, where the loss runs away
    axes.set_ylim(curve.min() - 0.1 * curve[0], 1.5 * curve[0])
    save(figure, "lr", run)


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


def width(num_losses: int) -> float:
    """The standard deviation of the curve that `smooth` weights with, in steps."""
    return max(1.0, num_losses / 40)


def smooth(losses: Sequence[float]) -> np.ndarray:
    """Means of neighbours, weighted by a normal curve. One is a mean of about 3.5 widths."""
    position = np.arange(len(losses))
    weights = np.exp(-0.5 * ((position[:, None] - position) / width(len(losses))) ** 2)
    return weights @ np.asarray(losses) / weights.sum(1)


def choose(
    rates: Sequence[float], losses: Sequence[float], num_steps: int
) -> tuple[int | None, str]:
    """Index of the suggested rate, or None, and the reason.

    rates, losses: of each step, fewer than `num_steps` if the loss ran away. Lightning's own
    suggestion is the steepest fall over the rate, not over its logarithm: nearly always noise among
    the smallest rates.
    """
    if len(rates) <= 20:
        return None, "the loss is lost at once: give a smaller --min_lr"
    curve = smooth(losses)
    lowest = int(curve.argmin())
    fall = curve[0] - curve[lowest]
    deviation = float(np.std(losses[: lowest + 1] - curve[: lowest + 1]))
    noise = deviation / math.sqrt(3.5 * width(len(losses)))
    first, last = f"{rates[0]:.2g}", f"{rates[-1]:.2g}"
    if fall < max(5 * noise, 0.002 * abs(curve[0])):
        if len(rates) < num_steps - 1:
            what = f"the loss runs away at {last} before it falls"
            return None, f"{what}: give more --num_steps or a smaller --min_lr"
        what = f"the loss does not fall from {first} to {last}"
        return None, f"{what}: give a larger --max_lr or more --num_steps"
    # the valley is flat: take its far end, which still has 95 % of the fall
    end = int(np.flatnonzero(curve < curve[lowest] + 0.05 * fall)[-1])
    if end >= num_steps - 3:
        return None, f"the loss still falls at --max_lr {last}: give a larger one"
    rate = rates[end] / 10
    low_up_to = f"loss is low up to a learning rate of {rates[end]:.1e}"
    if rate < rates[0]:
        return None, f"the {low_up_to}, a tenth of which is below --min_lr {first}: lower that"
    return int(np.searchsorted(rates, rate)), f"The {low_up_to}, a tenth of which is safe"
