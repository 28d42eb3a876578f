"""Measure the speed of training, and compare it with other ways to train the same
network.

python benchmarks/benchmark.py > docs/speed.md

Three contestants train for one epoch. They have the same generated images, and the
network and the optimizer of a shipped YAML:

tutorial: The loop of PyTorch's tutorial. Its data set applies a transform to a PIL
    image for each sample, as the data sets of torchvision do.
raw: A loop written by hand without logs. It makes its batches on the device.
ours: A run of scripts/train.py with the YAML, without validation and test.

Read the functions with these names first, and then `measure`, which calls them in turn.
"""

from lightbase.commands.script import starting

if __name__ == "__main__":  # before the imports below, which take seconds
    with starting(__file__, default_model="project.classifier.Classifier"):
        import benchmark

        benchmark.main()
        raise SystemExit

import contextlib
import copy
import io
import statistics
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from lightning import Callback, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms

from lightbase import Batch
from lightbase.commands import arguments
from lightbase.commands.train import parse, train
from lightbase.core.build import make_trainer
from lightbase.core.compat import quiet_lightning
from lightbase.core.devices import cpu_threads
from lightbase.core.record import describe_environment

REPO = Path(__file__).parents[1]
EXPERIMENTS = {
    "mnist": ("mnist_mlp.yaml", "[1,28,28]"),
    "cifar": ("cifar10_cnn.yaml", "[3,32,32]"),
}
"""{part of the benchmark: (file in configs/, shape of its images)}."""
BATCH_SIZE = 64
Rows = dict[str, list[float]]
"""{contestant: seconds of 100 steps in each round}."""


class SingleImages(Dataset[Any]):
    """A data set that works as the data sets of torchvision: it applies a transform to
    a PIL image for each sample. The PIL images are there before.

    Args:
        images: uint8 (N, C, H, W), where C is 1 or 3.
        targets: Class numbers, int64 (N,).
    """

    # the same mean and standard deviation as in SyntheticImages
    transform = transforms.Compose(
        [transforms.ToTensor(), transforms.Normalize([0.5], [0.25])]
    )

    def __init__(self, images: Tensor, targets: Tensor) -> None:
        to_pil_image = transforms.ToPILImage()
        self.samples = [*zip(map(to_pil_image, images), targets, strict=True)]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        """Return an image, float32 (C, H, W), and its class number."""
        image, target = self.samples[index]
        return self.transform(image), target


class StepClock(Callback):
    """Measures the time from the end of the first step of an epoch to the end of the
    last step. The first step is left out, because it contains the costs of a start.

    A loop by hand calls `mark` after each step. In a run this object is a callback.

    Args:
        num_steps: The number of steps in the epoch.
    """

    def __init__(self, num_steps: int) -> None:
        self.num_steps = num_steps
        self.times: list[float] = []  # in seconds, after the first and the last step

    def mark(self, step: int) -> None:
        """Note the time after the first and the last step, counted from 1. On a GPU
        wait until the queued work is done."""
        if step in (1, self.num_steps):
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
            self.times.append(time.perf_counter())

    def seconds(self) -> float:
        """Return the time of 100 steps in seconds, after the last step."""
        start, end = self.times
        return 100 * (end - start) / (self.num_steps - 1)

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        self.mark(trainer.global_step)


class Reference:
    """The things that all contestants share: the network, the optimizer and the flags
    of a shipped YAML, with generated images in place of its data. The device is the GPU
    if there is one.

    Args:
        part: A key of EXPERIMENTS.
        num_steps: The number of training batches of BATCH_SIZE images.
    """

    def __init__(self, part: str, num_steps: int) -> None:
        config, image_shape = EXPERIMENTS[part]
        self.num_steps = num_steps
        self.flags = [
            f"--config={REPO}/configs/{config}",
            "--data=project.data.synthetic.SyntheticImages",
            f"--data.image_shape={image_shape}",
            f"--data.num_train={BATCH_SIZE * num_steps}",
            f"--data.num_test={BATCH_SIZE}",
            "--data.val_fraction=0",  # all generated images train
        ]
        loaded: Any = parse(self.flags)
        self.spec, self.model, self.data = loaded
        self.images, self.targets = self.data.load("train")
        self.trainer = make_trainer(self.spec, self.model, logger=False)
        self.device = self.trainer.strategy.root_device


def tutorial(reference: Reference) -> float:
    """Train with the loop of PyTorch's tutorial. Return the seconds of 100 steps."""
    samples = SingleImages(reference.images, reference.targets)
    batches = DataLoader(samples, BATCH_SIZE, shuffle=True)
    return train_by_hand(reference, batches, torch.contiguous_format)


def raw(reference: Reference) -> float:
    """Train with a fast loop: it makes the batches on the device, has a fused optimizer
    and the memory layout channels_last, and logs nothing. Return the seconds of 100
    steps."""
    images = reference.images.to(reference.device)
    targets = reference.targets.to(reference.device)
    indices = torch.randperm(len(images), device=reference.device).split(BATCH_SIZE)
    normalize = reference.data.normalize
    batches = ((normalize(images[index]), targets[index]) for index in indices)
    with cpu_threads(reference.spec.config.num_threads):
        return train_by_hand(reference, batches, torch.channels_last, fused=True)


def train_by_hand(
    reference: Reference,
    batches: Iterable[Batch],
    layout: torch.memory_format,
    **options: Any,
) -> float:
    """Train a copy of the network for one epoch. Return the seconds of 100 steps.

    batches: Pairs of inputs and class numbers, on any device.
    layout: The memory layout of the network and the inputs.
    options: Further arguments of the optimizer.
    """
    net: nn.Module = copy.deepcopy(reference.model.net)
    net.to(reference.device, memory_format=layout)  # type: ignore[call-overload]
    kind = getattr(torch.optim, reference.model.optimizer)
    optimizer = kind(net.parameters(), lr=reference.model.lr, **options)
    clock = StepClock(reference.num_steps)
    for step, (inputs, targets) in enumerate(batches, 1):
        outputs = net(inputs.to(reference.device, memory_format=layout))
        loss = nn.functional.cross_entropy(outputs, targets.to(reference.device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        clock.mark(step)
    return clock.seconds()


def ours(reference: Reference) -> float:
    """Train as scripts/train.py does, with logs, checkpoints and the progress bar, in a
    temporary folder. Return the seconds of 100 steps."""
    clock = StepClock(reference.num_steps)
    with tempfile.TemporaryDirectory() as folder:
        flags = [
            f"--trainer.default_root_dir={folder}",
            "--trainer.max_epochs=1",
            "--trainer.limit_val_batches=0",
            "--trainer.limit_test_batches=0",
            "--trainer.enable_progress_bar=true",
        ]
        spec, model, data = parse([*reference.flags, *flags])
        spec.trainer["callbacks"] = [clock]
        train(spec, model, data)
    return clock.seconds()


CONTESTANTS = {"tutorial": tutorial, "raw": raw, "ours": ours}
"""{name: function}. Each function trains one epoch and returns the seconds of 100
steps."""


def measure(reference: Reference, rounds: int) -> Rows:
    """Call the contestants in turn, so that a change of the machine's speed affects all
    of them. Return their times. Their output is not printed."""
    rows: Rows = {name: [] for name in CONTESTANTS}
    with contextlib.redirect_stdout(io.StringIO()):
        for _ in range(rounds):
            for name, contestant in CONTESTANTS.items():
                rows[name].append(contestant(reference))
    return rows


def print_table(title: str, rows: Rows) -> None:
    """Print a Markdown table. A row has the median of a contestant's rounds, the lowest
    and the highest round, and the median divided by the median of "ours"."""
    print(f"| {title} | s for 100 batches of {BATCH_SIZE} | / ours |\n|---|---|---|")
    ours_median = statistics.median(rows["ours"])
    for name, seconds in rows.items():
        median = statistics.median(seconds)
        spread = f"{min(seconds):.3g} to {max(seconds):.3g}"
        print(f"| {name} | {median:.3g} ({spread}) | {median / ours_median:.3g} |")
    print(flush=True)


def main(args: arguments.Args = None) -> None:
    """Measure the parts, on the GPU if there is one, and print the tables.

    args: The arguments of the script.
    """
    options = arguments.benchmark().parse_args(args)
    quiet_lightning()
    reference = Reference("mnist", 2)
    measure(reference, 1)  # warm-up
    print(f"# Speed\n\n```\n{describe_environment(reference.trainer)}```\n")
    print(f"Median (lowest to highest) of {options.rounds} rounds.\n")
    for part in options.parts:
        reference = Reference(part, options.steps + 1)
        print_table(part, measure(reference, options.rounds))
