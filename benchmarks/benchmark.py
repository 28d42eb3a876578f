"""Measure the speed of training, beside other ways to train the same network.

python benchmarks/benchmark.py > docs/speed.md

All train on the same generated images, with the network and the optimizer of a shipped
YAML, for one epoch:

tutorial: The loop of PyTorch's tutorial, over a data set that makes a PIL image and
    applies a transform for each sample, as torchvision's do.
raw: A loop by hand that logs nothing, over batches that are made on the device.
ours: The YAML, with all that a run has but validation and test.
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
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from PIL import Image
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
"""The YAML of each part, and the shape of its images."""
BATCH_SIZE = 64
Rows = dict[str, list[float]]
"""Seconds for 100 batches in each round, by contestant."""


class SingleImages(Dataset[tuple[Tensor, int]]):
    """Images as torchvision's data sets read them: a PIL image and a transform for each
    sample.

    Args:
        images: uint8 (N, C, H, W), where C is 1 or 3.
        targets: int64 (N,).
    """

    def __init__(self, images: Tensor, targets: Tensor) -> None:
        # (N, H, W) if they are grey
        self.arrays = images.permute(0, 2, 3, 1).contiguous().squeeze(3).numpy()
        self.targets = targets.tolist()
        normalize = transforms.Normalize([0.5], [0.25])  # as SyntheticImages
        self.transform = transforms.Compose([transforms.ToTensor(), normalize])

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = Image.fromarray(self.arrays[index])
        return self.transform(image), self.targets[index]


class StepClock(Callback):
    """Times an epoch, from the end of its first step to its end."""

    def __init__(self) -> None:
        self.marks: list[tuple[float, int]] = []  # seconds, and steps so far

    def mark(self, num_steps: int) -> None:
        """Note the time after the first step, and again after the last one.

        num_steps: Steps since the epoch began.
        """
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        self.marks.append((time.perf_counter(), num_steps))

    @property
    def seconds(self) -> float:
        """Seconds for 100 steps."""
        (start, first), (end, last) = self.marks
        return 100 * (end - start) / (last - first)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, *args: Any
    ) -> None:
        if trainer.global_step == 1 or trainer.is_last_batch:
            self.mark(trainer.global_step)


class Reference:
    """The network, the optimizer and the flags of a shipped YAML, with generated images
    in place of its data.

    Args:
        part: A key of EXPERIMENTS.
        num_batches: Training batches of BATCH_SIZE images.
        accelerator: "cpu" or "gpu".
    """

    def __init__(self, part: str, num_batches: int, accelerator: str) -> None:
        config, image_shape = EXPERIMENTS[part]
        self.device = torch.device("cuda" if accelerator == "gpu" else "cpu")
        self.flags = [
            f"--config={REPO}/configs/{config}",
            f"--trainer.accelerator={accelerator}",
            "--data=project.data.synthetic.SyntheticImages",
            f"--data.image_shape={image_shape}",
            f"--data.num_train={BATCH_SIZE * num_batches}",
            f"--data.num_test={BATCH_SIZE}",
            "--data.val_fraction=0",
        ]
        loaded: Any = parse(self.flags)
        self.spec, self.model, self.data = loaded
        self.images, self.targets = self.data.load("train")


def tutorial(reference: Reference) -> float:
    """Train by the loop of the tutorial."""
    samples = SingleImages(reference.images, reference.targets)
    net = copy.deepcopy(reference.model.net)
    return train_by_hand(reference, net, DataLoader(samples, BATCH_SIZE, shuffle=True))


def raw(reference: Reference) -> float:
    """Train by hand: batches made on the device, a fused optimizer, no logs."""
    layout: Any = torch.channels_last
    images = reference.images.to(reference.device)
    targets = reference.targets.to(reference.device)

    def batches() -> Iterator[Batch]:
        order = torch.randperm(len(images), device=reference.device)
        for index in order.split(BATCH_SIZE):
            inputs = reference.data.normalize(images[index])
            yield inputs.contiguous(memory_format=layout), targets[index]

    net = copy.deepcopy(reference.model.net).to(memory_format=layout)
    with cpu_threads(reference.spec.config.num_threads):
        return train_by_hand(reference, net, batches(), fused=True)


def train_by_hand(
    reference: Reference, net: nn.Module, batches: Iterable[Batch], **options: Any
) -> float:
    """Train for one epoch. Return the seconds of 100 steps.

    options: Further arguments of the optimizer.
    """
    net.to(reference.device)
    kind = getattr(torch.optim, reference.model.optimizer)
    optimizer = kind(net.parameters(), lr=reference.model.lr, **options)
    clock = StepClock()
    num_steps = 0
    for inputs, targets in batches:
        outputs = net(inputs.to(reference.device))
        loss = nn.functional.cross_entropy(outputs, targets.to(reference.device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        num_steps += 1
        if num_steps == 1:
            clock.mark(num_steps)
    clock.mark(num_steps)
    return clock.seconds


def ours(reference: Reference) -> float:
    """Train as scripts/train.py does, with the progress bar."""
    clock = StepClock()
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
    return clock.seconds


CONTESTANTS = {"tutorial": tutorial, "raw": raw, "ours": ours}
"""Each one trains one epoch and returns the seconds of 100 steps."""


def measure(part: str, accelerator: str, num_steps: int, rounds: int) -> Rows:
    """Call all contestants in turn. What they print is not shown.

    Args:
        part: A key of EXPERIMENTS.
        num_steps: Steps of each contestant in a round, after the first one.
        rounds: Number of turns.
    """
    reference = Reference(part, num_steps + 1, accelerator)
    rows: Rows = {name: [] for name in CONTESTANTS}
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        for _ in range(rounds):
            for name, contestant in CONTESTANTS.items():
                rows[name].append(contestant(reference))
    return rows


def print_table(title: str, rows: Rows) -> float:
    """Print medians, lowest and highest values, and each median divided by the median
    of ours. Return the median of ours."""
    print(f"| {title} | s for 100 batches of {BATCH_SIZE} | images/s | / ours |")
    print("|---|---|---|---|")
    medians = {name: statistics.median(values) for name, values in rows.items()}
    for name, median in medians.items():
        spread = f"{min(rows[name]):.3g} to {max(rows[name]):.3g}"
        speed = 100 * BATCH_SIZE / median
        ratio = median / medians["ours"]
        print(f"| {name} | {median:.3g} ({spread}) | {speed:,.0f} | {ratio:.3g} |")
    print(f"\nours / raw: {medians['ours'] / medians['raw']:.3g}\n", flush=True)
    return medians["ours"]


def main(args: Sequence[str] | None = None) -> None:
    """Measure the parts on the CPU, and on the GPU if there is one, and print the
    tables."""
    options, _ = arguments.benchmark().read(args)
    quiet_lightning()
    accelerators = ["cpu", "gpu"] if torch.cuda.is_available() else ["cpu"]
    reference = Reference("mnist", 2, accelerators[-1])
    trainer = make_trainer(reference.spec, reference.model, logger=False)
    rounds, steps = options.rounds, options.steps
    print(f"# Speed\n\n```\n{describe_environment(trainer)}```\n")
    print(f"Median (lowest to highest) of {rounds} rounds of {steps} steps.\n")
    for part in options.parts:
        medians = []
        for accelerator in accelerators:
            measure(part, accelerator, 60, 1)  # warm-up
            rows = measure(part, accelerator, steps, rounds)
            medians.append(print_table(f"{part}: training, {accelerator}", rows))
        if len(medians) == 2:
            print(f"CPU / GPU: {medians[0] / medians[1]:.3g}\n")
