"""Find a batch size and a learning rate for an experiment before training it.

python scripts/tune.py --config configs/mnist_mlp.yaml
python scripts/tune.py --config configs/mnist_mlp.yaml --find lr --min_lr 1e-5 --max_lr 1

Batch size: Lightning's finder doubles it, from --data.batch_size on, until the memory is full or
--max_batch_size is reached. Suggested is the smallest within 5 % of the highest speed: a larger one
only makes fewer steps of an epoch. Learning rate: Lightning's finder raises it from --min_lr to
--max_lr over --num_steps steps (Smith, "Cyclical learning rates for training neural networks",
2017). Suggested is a tenth of the highest rate at which the loss is about at its lowest, fastai's
rule of thumb: beyond that one it soon runs away.

All flags of train.py work too. The last line has the flags to paste, a run folder NAME_tune and
TensorBoard the plots.
"""

import functools
import itertools
import math
import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from lightning import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.profilers import Profiler
from lightning.pytorch.tuner import Tuner, lr_finder
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


def main(args: Sequence[str] | None = None) -> list[str]:
    """Returns the suggested flags."""
    parser = ScriptParser(description=__doc__)
    parser.add_argument(
        "--find", nargs="+", choices=["batch_size", "lr"], default=["batch_size", "lr"], help="what"
    )
    parser.add_argument(
        "--max_batch_size", type=int, help="1024 on a CPU, 8192 on a GPU, unless given"
    )
    parser.add_argument("--min_lr", type=float, default=1e-5, help="where the learning rate starts")
    parser.add_argument("--max_lr", type=float, default=1.0, help="where it ends")
    parser.add_argument("--num_steps", type=int, default=500, help="steps from one to the other")
    with short_errors():
        options, flags = parser.parse_known_args(args)
        low, high, num_steps = options.min_lr, options.max_lr, options.num_steps
        if not 0 < low < high < math.inf:
            raise UserError(
                f"--min_lr {low} --max_lr {high}: the first must be over 0 and smaller", 2
            )
        if num_steps < 50:
            raise UserError(
                f"--num_steps {num_steps}: 50 is the least, 500 gives a smoother curve", 2
            )
        quiet_lightning()
        lr_finder.tqdm = functools.partial(
            lr_finder.tqdm, disable=None, leave=False
        )  # its bar, in a terminal only
        cli = parse([*flags, "--steps_per_execution", "1"])  # the finders look at each step
        cli.check_devices()
        trainer: Any = cli.config.trainer
        if trainer.strategy not in ("auto", "single_device") or trainer.devices not in (
            1,
            "1",
            "auto",
        ):
            raise UserError(
                "tune.py uses one device: leave --trainer.strategy and --trainer.devices out", 2
            )
        lr = argument(cli.model, "lr", "learning_rate")[0] if "lr" in options.find else ""
        if "batch_size" in options.find:
            argument(cli.datamodule, "batch_size")
        cli.config_init.trainer.callbacks = None  # which would stop or save
        if isinstance(cli.model, BaseModule):
            cli.model.scheduler = None  # the finder has its own
            if cli.model.parameter_groups and "lr" in options.find:
                print(
                    "The search gives all parameter groups one rate, that of --model.lr: set "
                    "theirs in proportion"
                )
        prepare(cli.model, cli.datamodule, cli.config)
        run, suggested = Run(root_folder(cli.config), f"{cli.config.name}_tune"), []
        try:
            with cpu_threads(cli.config.num_threads), SummaryWriter(str(run.folder)) as writer:
                if "batch_size" in options.find:
                    suggested += [
                        "--data.batch_size",
                        str(find_batch_size(cli, options.max_batch_size, run, writer)),
                    ]
                if "lr" in options.find:
                    suggested += [
                        f"--model.{lr}",
                        f"{find_lr(cli, low, high, num_steps, run, writer):.2g}",
                    ]
        finally:
            run.close()
            if suggested:
                print(
                    f"Plots: {short(run.folder)}\nSuggested flags: {' '.join(suggested)}",
                    flush=True,
                )
        return suggested


def make_trainer(cli: TrainingCLI, run: Run, **options: Any) -> Trainer:
    """One that goes on for ever and writes nothing but the weights that a finder restores at its
    end."""
    off = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "fast_dev_run"), False
    )
    options |= {
        "max_epochs": -1,
        "num_sanity_val_steps": 0,
        "check_val_every_n_epoch": 1_000_000,
        **off,
    }
    return cli.make_trainer(default_root_dir=run.folder, plugins=[AtomicCheckpointIO()], **options)


def find_batch_size(cli: TrainingCLI, limit: int | None, run: Run, writer: SummaryWriter) -> int:
    """The suggested one, which the data module then has."""
    data: Any = cli.datamodule
    start, clock, is_ours = (
        argument(data, "batch_size")[1],
        TrialClock(data),
        isinstance(data, BaseDataModule),
    )
    trainer = make_trainer(cli, run, profiler=clock)
    print(describe_devices(trainer))
    usual = max(1024, start) if trainer.strategy.root_device.type == "cpu" else LARGEST
    limit = min(limit or usual, len(data.splits["train"]) if is_ours else LARGEST, LARGEST)
    if start > limit:
        raise UserError(
            f"--data.batch_size {start}, where the search starts, is over --max_batch_size {limit}",
            2,
        )
    if (
        is_ours
    ):  # Lightning makes a loader of the next size before it sees that it is over the limit
        drop_last, data.drop_last = data.drop_last, False
    # at its max_val Lightning ends the search without a try
    how: Any = {"steps_per_trial": 5, "init_val": start, "max_val": limit + 1}
    largest = Tuner(trainer).scale_batch_size(cli.model, datamodule=data, **how)
    # the median is no first batch, nor the last and smaller one of an epoch
    rates = {size: size / statistics.median(times) for size, times in sorted(clock.seconds.items())}
    speeds = {
        size: speed for size, speed in rates.items() if size <= (largest or 0)
    }  # the others did not fit
    if not speeds:
        raise UserError(
            f"no batch size fits, not even {min(rates)}: take a smaller network or smaller images"
        )
    best = next(size for size, speed in speeds.items() if speed >= 0.95 * max(speeds.values()))
    print("Batch size    samples/s")
    for size, speed in speeds.items():
        print(f"{size:>10}{speed:>13,.0f}{'  suggested' * (size == best)}")
    end = (
        "is the largest that fits"
        if len(rates) > len(speeds)
        else f"fits; larger ones than {limit} were not tried"
    )
    print(f"{max(speeds)} {end}")
    x, y = list(speeds), list(speeds.values())
    show(
        draw_curve(x, y, x.index(best), "batch size", "samples/s", f"suggested: {best}"),
        "batch_size",
        run,
        writer,
    )
    lightning_setattr(cli.model, "batch_size", best)  # wherever the finder has found it
    if is_ours:
        data.drop_last = drop_last
    return best


def find_lr(
    cli: TrainingCLI, low: float, high: float, num_steps: int, run: Run, writer: SummaryWriter
) -> float:
    how: Any = {"min_lr": low, "max_lr": high, "num_training": num_steps, "update_attr": False}
    found: Any = Tuner(make_trainer(cli, run)).lr_find(cli.model, datamodule=cli.datamodule, **how)
    losses = batch_losses(found.results["loss"])
    rates = found.results["lr"][: len(losses)]
    best, reason = choose(rates, losses, num_steps)
    if losses:
        curve, title = (
            smooth(losses),
            "no suggestion" if best is None else f"suggested: {rates[best]:.2g}",
        )
        plot = draw_curve(rates, curve.tolist(), best, "learning rate", "loss", title)
        plot.axes[0].set_ylim(
            curve.min() - 0.1 * curve[0], 1.5 * curve[0]
        )  # where it runs away is no matter
        show(plot, "lr", run, writer)
    if best is None:
        raise UserError(
            f"no learning rate to suggest: {reason}\nthe plot is in {short(run.folder)}"
        )
    print(reason)
    return rates[best]


def show(figure: Any, name: str, run: Run, writer: SummaryWriter) -> None:
    figure.savefig(run.folder / f"{name}.png")
    figures.add_image(writer, f"tune/{name}", figure, 0)


SMOOTHING = 0.98  # of the losses that Lightning's finder reports


def argument(owner: LightningModule | LightningDataModule, *names: str) -> tuple[str, Any]:
    """The first of the names that is one of its attributes or hyper-parameters, and the value.
    Raises UserError."""
    known = {**owner.hparams, **vars(owner)}
    for name in names:
        if name in known:
            return name, known[name]
    raise UserError(
        f"{type(owner).__name__} has no {' or '.join(names)}, neither as an attribute nor in "
        "its hparams"
    )


class TrialClock(Profiler):
    """Times every batch, from its loading to the end of its step, by batch size."""

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
            self.seconds.setdefault(argument(self.data, "batch_size")[1], []).append(
                time.perf_counter() - self.since
            )


def batch_losses(smoothed: Sequence[float]) -> list[float]:
    """The loss of each batch, out of the means that Lightning's finder reports: they lag behind by
    some 50 batches, and they start at half the loss, since 2.6 divides the i-th mean by 1 -
    0.98^(i+1) where 1 - 0.98^i would be right. From a loss that is not finite on there are none."""
    sums = [loss * (1 - SMOOTHING ** (i + 2)) for i, loss in enumerate(smoothed)]
    losses = [
        (this - SMOOTHING * before) / (1 - SMOOTHING)
        for before, this in itertools.pairwise([0.0, *sums])
    ]
    return list(itertools.takewhile(math.isfinite, losses))


def width(num_losses: int) -> float:
    return max(1.0, num_losses / 40)


def smooth(losses: Sequence[float]) -> np.ndarray:
    """Each a mean of its neighbours, weighted by a normal curve, so of about 3.5 times its
    width."""
    position = np.arange(len(losses))
    weights = np.exp(-0.5 * ((position[:, None] - position) / width(len(losses))) ** 2)
    return weights @ np.asarray(losses) / weights.sum(1)


def choose(
    rates: Sequence[float], losses: Sequence[float], num_steps: int
) -> tuple[int | None, str]:
    """Index of the suggested rate, or None, and the reason.

    rates, losses: of each step, fewer than `num_steps` where the loss ran away.
    Lightning's own suggestion is where the loss falls most steeply over the rate, not over its
    logarithm: nearly always on noise among the smallest rates.
    """
    if len(rates) <= 20:
        return None, "the loss is lost at once: give a smaller --min_lr"
    curve = smooth(losses)
    lowest = int(curve.argmin())
    fall = curve[0] - curve[lowest]
    noise = float(np.std(losses[: lowest + 1] - curve[: lowest + 1])) / math.sqrt(
        3.5 * width(len(losses))
    )
    first, last = f"{rates[0]:.2g}", f"{rates[-1]:.2g}"
    if fall < max(5 * noise, 0.002 * abs(curve[0])):
        if len(rates) < num_steps - 1:
            return (
                None,
                f"the loss runs away at {last} before it falls: give more --num_steps or a "
                "smaller --min_lr",
            )
        return (
            None,
            f"the loss does not fall from {first} to {last}: give a larger --max_lr or more "
            "--num_steps",
        )
    # the valley is flat: its far end, where 95 % of the fall is still there
    end = int(np.flatnonzero(curve < curve[lowest] + 0.05 * fall)[-1])
    if end >= num_steps - 3:
        return None, f"the loss still falls at --max_lr {last}: give a larger one"
    if rates[end] / 10 < rates[0]:
        return (
            None,
            f"the loss is low up to {rates[end]:.1e}, a tenth of which is below --min_lr "
            f"{first}: lower that",
        )
    best = int(np.searchsorted(rates, rates[end] / 10))
    return (
        best,
        f"The loss is low up to a learning rate of {rates[end]:.1e}, a tenth of which is safe",
    )


def draw_curve(
    x: Sequence[float],
    y: Sequence[float],
    chosen: int | None,
    x_label: str,
    y_label: str,
    title: str,
) -> Any:
    """y over x on a logarithmic axis, one point marked."""
    figure, axes = figures.new_figure(6, 4, title, x_label, y_label)
    axes.plot(x, y, marker="o" if len(x) < 30 else None, markersize=4, color=figures.COLOURS[0])
    if chosen is not None:
        axes.plot(x[chosen], y[chosen], marker="o", markersize=10, color=figures.COLOURS[3])
    axes.set_xscale("log")
    return figure
