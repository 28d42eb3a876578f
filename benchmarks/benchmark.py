"""Measure the speed of training, beside other ways to train the same network."""

from lightbase.commands.script import starting

if __name__ == "__main__":  # before the imports below, which take seconds
    with starting(__file__, default_model="project.classifier.Classifier"):
        import benchmark  # by this name train.py imports the class below

        benchmark.main()
        raise SystemExit

import contextlib
import copy
import io
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torchvision
from lightning import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader
from torchvision import transforms

from lightbase import Batch, MayMissSteps
from lightbase.commands import arguments
from lightbase.core import run as train
from lightbase.core.compat import quiet_lightning
from lightbase.core.devices import cpu_threads
from lightbase.core.record import describe_environment

REPO = Path(__file__).parents[1]
DATA = "project.data.synthetic.SyntheticImages"
CONFIGS = {"mnist": "mnist_mlp.yaml", "cifar": "cifar10_cnn.yaml"}
BATCH_SIZE = 64
Rows = dict[str, list[float]]  # seconds for 100 batches in each round, by contestant


class Reference:
    """Network, optimizer and flags of a shipped YAML, with `num_batches` batches of
    images."""

    def __init__(self, name: str, num_batches: int, accelerator: str) -> None:
        self.is_mnist = name == "mnist"
        self.num_batches = num_batches
        self.device = torch.device("cuda" if accelerator == "gpu" else "cpu")
        flags = f"--config {REPO}/configs/{CONFIGS[name]} --trainer.accelerator {accelerator} "
        flags += f"--data {DATA} --data.val_fraction 0 "
        flags += f"--data.image_shape {'[1,28,28]' if self.is_mnist else '[3,32,32]'} "
        flags += (
            f"--data.num_train {BATCH_SIZE * num_batches} --data.num_test {BATCH_SIZE}"
        )
        self.flags = flags.split()
        self.cli = train.parse(self.flags)
        self.model: Any = self.cli.model
        self.data: Any = self.cli.datamodule
        self.images, self.targets = self.data.load("train")  # type: ignore[attr-defined]

    def torchvision_loader(self, num_workers: int = 0) -> DataLoader:
        """torchvision's dataset of the same images: one PIL image, one transform per
        sample."""
        kind: Any = (
            torchvision.datasets.MNIST
            if self.is_mnist
            else torchvision.datasets.CIFAR10
        )
        dataset = object.__new__(kind)  # its constructor would read files
        images, targets = self.images, self.targets
        dataset.data = (
            images[:, 0] if self.is_mnist else images.permute(0, 2, 3, 1).numpy()
        )
        dataset.targets = targets if self.is_mnist else targets.tolist()
        normalize = transforms.Normalize([0.5], [0.25])  # as in DATA
        dataset.transform = transforms.Compose([transforms.ToTensor(), normalize])
        dataset.target_transform = None
        options: Any = {
            "num_workers": num_workers,
            "pin_memory": self.device.type == "cuda",
        }
        return DataLoader(dataset, BATCH_SIZE, shuffle=True, **options)


class StepClock(MayMissSteps):
    """Times an epoch, from the end of its first call, of one step or several, to its
    end."""

    # the clock of the latest run: train.py constructs the callback itself
    newest: "StepClock"

    def __init__(self) -> None:
        self.marks: list[tuple[float, int]] = []  # seconds, and steps so far
        StepClock.newest = self

    def after_call(self, num_steps: int, is_last: bool) -> None:
        """num_steps: since the epoch began. is_last: whether the epoch ends here."""
        if self.marks and not is_last:
            return
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        self.marks.append((time.perf_counter(), num_steps))

    @property
    def seconds(self) -> float:
        """Of 100 steps."""
        (start, first), (end, last) = self.marks
        return 100 * (end - start) / (last - first)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, *args: Any
    ) -> None:
        self.after_call(trainer.global_step, trainer.is_last_batch)


# Contestants. Each one trains one epoch and returns the seconds of 100 steps.


def raw(reference: Reference) -> float:
    images, targets = (
        reference.images.to(reference.device),
        reference.targets.to(reference.device),
    )
    layout: Any = torch.contiguous_format if reference.is_mnist else torch.channels_last

    def batches() -> Iterator[Batch]:
        for index in torch.randperm(len(images), device=reference.device).split(
            BATCH_SIZE
        ):
            inputs = reference.data.normalize(images[index])
            yield inputs.contiguous(memory_format=layout), targets[index]

    with cpu_threads(reference.cli.config.num_threads):
        return train_by_hand(reference, batches(), layout, fused=True)


def train_by_hand(
    reference: Reference,
    batches: Iterable[Batch],
    layout: Any = torch.contiguous_format,
    **options: Any,
) -> float:
    """The loop of the tutorial. options: of the optimizer."""
    net = copy.deepcopy(reference.model.net).to(reference.device, memory_format=layout)
    kind = getattr(torch.optim, reference.model.optimizer)
    optimizer = kind(net.parameters(), lr=reference.model.lr, **options)
    clock = StepClock()
    for step, (inputs, targets) in enumerate(batches, 1):
        x = inputs.to(reference.device, non_blocking=True)
        y = targets.to(reference.device, non_blocking=True)
        loss = nn.functional.cross_entropy(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        clock.after_call(step, step == reference.num_batches)
    return clock.seconds


def ours(reference: Reference) -> float:
    flags = "--trainer.max_epochs 1 --trainer.limit_val_batches 0 --trainer.limit_test_batches 0 "
    flags += (
        "--trainer.enable_progress_bar true --trainer.callbacks benchmark.StepClock"
    )
    with tempfile.TemporaryDirectory() as folder:
        train.main(
            [*reference.flags, *flags.split(), "--trainer.default_root_dir", folder]
        )
    return StepClock.newest.seconds


def measure(name: str, accelerator: str, num_steps: int, rounds: int) -> Rows:
    """Call all contestants in turn, `rounds` times. What they print is not shown."""
    reference = Reference(name, num_steps + 1, accelerator)
    contestants: dict[str, Callable[[], float]] = {}
    for num_workers in (0, os.cpu_count() or 1):
        label = f"tutorial, {num_workers} w" if num_workers else "tutorial"
        loader = reference.torchvision_loader(num_workers)
        contestants[label] = partial(train_by_hand, reference, loader)
    contestants |= {"raw": partial(raw, reference), "ours": partial(ours, reference)}
    rows: Rows = {label: [] for label in contestants}
    output = io.StringIO()
    for _ in range(rounds):
        for label, contestant in contestants.items():
            with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
                rows[label].append(contestant())
    return rows


def print_table(title: str, rows: Rows) -> None:
    """Medians, lowest and highest values, and the ratios of the medians to that of
    ours."""
    print(f"| {title} | s for 100 batches of {BATCH_SIZE} | images/s | / ours |")
    print("|---|---|---|---|")
    for name, values in rows.items():
        median = statistics.median(values)
        seconds = f"{median:.3g} ({min(values):.3g} to {max(values):.3g})"
        speed = f"{100 * BATCH_SIZE / median:,.0f}"
        print(
            f"| {name} | {seconds} | {speed} | {median / statistics.median(rows['ours']):.3g} |"
        )
    print(flush=True)


def main(args: Sequence[str] | None = None) -> None:
    options, _ = arguments.benchmark().read(args)
    quiet_lightning()
    accelerators = ["cpu", "gpu"] if torch.cuda.is_available() else ["cpu"]
    trainer = Reference("mnist", 2, accelerators[-1]).cli.make_trainer(logger=False)
    print(f"# Speed\n\n```\n{describe_environment(trainer)}```\n")
    print(
        f"Median (lowest to highest) of {options.rounds} rounds of {options.steps} steps.\n"
    )
    for part in options.parts:
        medians = []
        for accelerator in accelerators:
            measure(part, accelerator, 60, 1)  # warm-up
            rows = measure(part, accelerator, options.steps, options.rounds)
            print_table(f"{part}: training, {accelerator}", rows)
            medians.append(statistics.median(rows["ours"]))
            print(f"ours / raw: {medians[-1] / statistics.median(rows['raw']):.3g}\n")
        if len(medians) == 2:
            print(f"CPU / GPU: {medians[0] / medians[1]:.3g}\n")
