"""Find a batch size and a learning rate for an experiment before training it.

python scripts/tune.py --config configs/mnist_mlp.yaml
python scripts/tune.py --config configs/mnist_mlp.yaml --find lr --min_lr 1e-5 --max_lr 1

Batch size: Lightning's finder doubles it, from --data.batch_size on, until the memory is full or --max_batch_size is
reached. Suggested is the smallest that trains within 5 % of the highest speed: a larger one would only make fewer steps
of an epoch. Learning rate: Lightning's finder raises it from --min_lr to --max_lr over --num_steps steps (Smith,
"Cyclical learning rates for training neural networks", 2017). Suggested is a tenth of the highest rate at which the
loss is about at its lowest, fastai's rule of thumb: beyond that one it soon runs away.

All flags of train.py work too. The last line has the flags to paste; the plots are in a run folder NAME_tune and in
TensorBoard's IMAGES.
"""

import contextlib
import functools
import itertools
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from lightning import Trainer
from lightning.pytorch.profilers import Profiler
from lightning.pytorch.tuner import Tuner, lr_finder
from torch.utils.tensorboard import SummaryWriter

from project.base.errors import ScriptParser, UserError, short_errors
from project.callbacks import charts
from project.engine.checkpoints import AtomicCheckpointIO
from project.engine.cli import TrainingCLI
from project.engine.devices import cpu_threads, describe_devices
from project.engine.folder import Run
from project.engine.quiet import quiet_lightning
from project.engine.run import parse, prepare, root_folder, short

STEPS_PER_SIZE = 5
LARGEST = 8192
"""Lightning's finder goes no further."""
SMOOTHING = 0.98
"""Of the losses that Lightning's finder reports."""


def main(args: Sequence[str] | None = None) -> list[str]:
    """Returns the suggested flags."""
    parser = ScriptParser(description=__doc__)
    parser.add_argument("--find", nargs="+", choices=["batch_size", "lr"], default=["batch_size", "lr"], help="what")
    parser.add_argument("--max_batch_size", type=int, help="1024 on a CPU, 8192 on a GPU, unless given")
    parser.add_argument("--min_lr", type=float, default=1e-5, help="where the learning rate starts")
    parser.add_argument("--max_lr", type=float, default=1.0, help="where it ends")
    parser.add_argument("--num_steps", type=int, default=500, help="steps from one to the other")
    with short_errors():
        known, flags = parser.parse_known_args(args)
        if not 0 < known.min_lr < known.max_lr < math.inf:
            raise UserError(f"--min_lr {known.min_lr} --max_lr {known.max_lr}: the first must be over 0 and smaller", 2)
        if known.num_steps < 50:
            raise UserError(f"--num_steps {known.num_steps}: 50 is the least, 500 gives a smoother curve", 2)
        quiet_lightning()
        cli = build(flags)
        run = Run(root_folder(cli.config), f"{cli.config.name}_tune")
        suggested: list[str] = []
        try:
            with cpu_threads(cli.config.num_threads), SummaryWriter(str(run.folder)) as writer:
                if "batch_size" in known.find:
                    size = find_batch_size(cli, known.max_batch_size, run, writer)
                    suggested += ["--data.batch_size", str(size)]
                    cli = build([*flags, *suggested], quietly=True)
                if "lr" in known.find:
                    rate = find_lr(cli, known.min_lr, known.max_lr, known.num_steps, run, writer)
                    suggested += ["--model.lr", f"{rate:.2g}"]
        finally:
            run.close()
            if suggested:
                print(f"Plots: {short(run.folder)}")
                print(f"Suggested flags: {' '.join(suggested)}", flush=True)
        return suggested


def build(flags: Sequence[str], quietly: bool = False) -> TrainingCLI:
    """Network and data of an experiment, loaded and tried."""
    # single steps: the finders look at each of them
    cli = parse([*flags, "--steps_per_execution", "1"])
    trainer = cli.config.trainer
    if trainer.strategy not in ("auto", "single_device") or trainer.devices not in (1, "1", "auto"):
        raise UserError("tune.py uses one device: leave --trainer.strategy and --trainer.devices out", 2)
    for flag, attribute, owner in (("model.lr", "lr", cli.model), ("data.batch_size", "batch_size", cli.datamodule)):
        if not hasattr(owner, attribute):
            raise UserError(f"{type(owner).__name__} has no {attribute!r}, so there is no --{flag} to find")
    model: Any = cli.model
    if hasattr(model, "scheduler"):
        model.scheduler = None  # the finder has its own
    cli.check_devices()
    with contextlib.redirect_stdout(None) if quietly else contextlib.nullcontext():
        prepare(cli.model, cli.datamodule)
    return cli


@contextlib.contextmanager
def trainer_for(cli: TrainingCLI, **arguments: Any) -> Iterator[Trainer]:
    """A Trainer that leaves no file behind: Lightning's finders save a checkpoint first, and restore it at the end."""
    with tempfile.TemporaryDirectory() as folder:
        yield cli.make_trainer(
            default_root_dir=folder,
            plugins=[AtomicCheckpointIO()],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            max_epochs=-1,
            fast_dev_run=False,
            num_sanity_val_steps=0,
            check_val_every_n_epoch=1_000_000,
            **arguments,
        )


class TrialClock(Profiler):
    """Times every batch, from its loading to the end of its step, by batch size."""

    def __init__(self, data: Any) -> None:
        super().__init__()
        self.data = data
        self.seconds: dict[int, list[float]] = {}

    def start(self, action_name: str) -> None:
        if action_name.endswith("train_dataloader_next"):
            self.since = time.perf_counter()

    def stop(self, action_name: str) -> None:
        if action_name == "run_training_batch":
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.seconds.setdefault(self.data.batch_size, []).append(time.perf_counter() - self.since)


def find_batch_size(cli: TrainingCLI, limit: int | None, run: Run, writer: SummaryWriter) -> int:
    data: Any = cli.datamodule
    start, clock = data.batch_size, TrialClock(data)
    with trainer_for(cli, profiler=clock) as trainer:
        print(describe_devices(trainer))
        on_cpu = trainer.strategy.root_device.type == "cpu"
        num_train = len(data.splits["train"]) if getattr(data, "splits", None) else 2**16
        limit = min(limit or (max(1024, start) if on_cpu else LARGEST), num_train, LARGEST)
        if start > limit:
            raise UserError(f"--data.batch_size {start}, where the search starts, is over --max_batch_size {limit}", 2)
        data.drop_last = False  # Lightning makes a loader of the next size before it sees that it is over the limit
        # at its max_val Lightning ends the search without a try
        options: Any = {"steps_per_trial": STEPS_PER_SIZE, "init_val": start, "max_val": limit + 1}
        found = Tuner(trainer).scale_batch_size(cli.model, datamodule=data, **options)
    # the size that did not fit has times too; the median is no first batch, nor the last and smaller one of an epoch
    speeds = {size: size / statistics.median(times) for size, times in clock.seconds.items() if size <= (found or 0)}
    speeds = dict(sorted(speeds.items()))
    if not speeds:
        raise UserError(f"no batch size fits, not even {min(clock.seconds)}: take a smaller network or smaller images")
    best = next(size for size, speed in speeds.items() if speed >= 0.95 * max(speeds.values()))
    largest = max(speeds)
    print("Batch size    samples/s")
    for size, speed in speeds.items():
        print(f"{size:>10}{speed:>13,.0f}{'  suggested' * (size == best)}")
    is_full = any(size > largest for size in clock.seconds)
    print(
        f"{largest} is the largest that fits" if is_full else f"{largest} fits; larger ones than {limit} were not tried"
    )
    sizes, values = list(speeds), list(speeds.values())
    title = f"suggested: {best}"
    show(charts.curve(sizes, values, sizes.index(best), "batch size", "samples/s", title), "batch_size", run, writer)
    return best


def find_lr(cli: TrainingCLI, low: float, high: float, num_steps: int, run: Run, writer: SummaryWriter) -> float:
    with trainer_for(cli) as trainer, quiet_bar():
        options: Any = {"min_lr": low, "max_lr": high, "num_training": num_steps, "update_attr": False}
        found = Tuner(trainer).lr_find(cli.model, datamodule=cli.datamodule, **options)
    assert found is not None
    rates, losses = found.results["lr"], batch_losses(found.results["loss"])
    num = next((i for i, loss in enumerate(losses) if not math.isfinite(loss)), len(losses))
    rates, losses = rates[:num], losses[:num]
    best, reason = choose(rates, losses, low, high, num_steps) if num > 20 else (None, "the loss is lost at once")
    losses = smooth(losses)
    title = f"suggested: {rates[best]:.2g}" if best is not None else "no suggestion"
    plot = charts.curve(rates, losses, best, "learning rate", "loss", title)
    start = losses[0] if num else 1.0
    plot.axes[0].set_ylim(min(losses, default=0.0) - 0.1 * start, 1.5 * start)  # where it runs away is no matter
    show(plot, "lr", run, writer)
    if best is None:
        raise UserError(f"no learning rate to suggest: {reason}\nthe plot is in {short(run.folder)}")
    print(reason)
    return rates[best]


def choose(
    rates: Sequence[float], losses: Sequence[float], low: float, high: float, num_steps: int
) -> tuple[int | None, str]:
    """Index of the suggested rate, or None, and the reason.

    rates, losses: of each step. Lightning's own suggestion is where the loss falls most steeply over the rate, not over
    its logarithm: nearly always on noise among the smallest rates.
    """
    curve = smooth(losses)
    lowest = int(np.argmin(curve))
    noise = float(np.std(np.asarray(losses[: lowest + 1]) - curve[: lowest + 1])) / math.sqrt(3.5 * width(len(losses)))
    if curve[0] - curve[lowest] < max(5 * noise, 0.002 * abs(curve[0])):
        if len(rates) < num_steps - 1:
            return None, (
                f"the loss runs away at {rates[-1]:.1e} before it has fallen: "
                f"give more --num_steps than {num_steps}, or another --min_lr than {low:g}"
            )
        return None, f"the loss does not fall from {low:g} to {high:g}: give a larger --max_lr or more --num_steps"
    # the valley is flat: its far end, where 95 % of the fall is still there
    fallen = np.asarray(curve) < curve[lowest] + 0.05 * (curve[0] - curve[lowest])
    lowest = int(np.flatnonzero(fallen)[-1])
    if lowest >= num_steps - 3:
        return None, f"the loss still falls at --max_lr {high:g}: give a larger one"
    target = rates[lowest] / 10
    if target < low:
        return (
            None,
            f"the loss is low up to {rates[lowest]:.1e}, a tenth of which is below --min_lr {low:g}: lower that",
        )
    return next(i for i, rate in enumerate(rates) if rate >= target), (
        f"The loss is low up to a learning rate of {rates[lowest]:.1e}, a tenth of which is safe"
    )


def batch_losses(smoothed: Sequence[float]) -> list[float]:
    """The loss of each batch, out of the means that Lightning's finder reports: they lag behind by some 50 batches, and
    they start at half the loss, since 2.6 divides the i-th mean by 1 - 0.98^(i+1) where 1 - 0.98^i would be right."""
    sums = [loss * (1 - SMOOTHING ** (i + 2)) for i, loss in enumerate(smoothed)]
    return [(this - SMOOTHING * before) / (1 - SMOOTHING) for before, this in itertools.pairwise([0.0, *sums])]


def width(num_steps: int) -> float:
    return max(1.0, num_steps / 40)


def smooth(losses: Sequence[float]) -> list[float]:
    """Each a mean of its neighbours, weighted by a normal curve, so of about 3.5 times its width."""
    position = np.arange(len(losses))
    weights = np.exp(-0.5 * ((position[:, None] - position) / width(len(losses))) ** 2)
    return [float(loss) for loss in weights @ np.asarray(losses) / weights.sum(1)]


@contextlib.contextmanager
def quiet_bar() -> Iterator[None]:
    """Lightning's bar of the search, which has no flag, in a terminal only."""
    original = lr_finder.tqdm
    lr_finder.tqdm = functools.partial(original, disable=not sys.stderr.isatty(), leave=False)
    try:
        yield
    finally:
        lr_finder.tqdm = original


def show(figure: Any, name: str, run: Run, writer: SummaryWriter) -> None:
    figure.savefig(run.folder / f"{name}.png")
    charts.write(writer, f"tune/{name}", figure, 0)


if __name__ == "__main__":
    main()
