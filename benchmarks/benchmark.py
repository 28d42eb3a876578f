"""Measure the speed of training, and compare it with other ways to train the same
network.

python benchmarks/benchmark.py > docs/speed.md

Three contestants train for one epoch. They have the same generated images, and the
network and the optimizer of a shipped YAML:

tutorial: The loop of PyTorch's tutorial. Its data set makes a PIL image and applies a
    transform for each sample, as the data sets of torchvision do.
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
"""{part of the benchmark: (file in configs/, shape of its images)}."""
BATCH_SIZE = 64
Rows = dict[str, list[float]]
"""{contestant: seconds for 100 batches in each round}."""


class SingleImages(Dataset[tuple[Tensor, int]]):
    """A data set that works as the data sets of torchvision: for each sample it makes a
    PIL image, and applies a transform.

    Args:
        images: uint8 (N, C, H, W), where C is 1 or 3.
        targets: Class numbers, int64 (N,).
    """

    def __init__(self, images: Tensor, targets: Tensor) -> None:
        # (N, H, W, 3), or (N, H, W) for grey images
        self.arrays = images.permute(0, 2, 3, 1).contiguous().squeeze(3).numpy()
        self.targets = targets.tolist()
        # the same mean and standard deviation as in SyntheticImages
        normalize = transforms.Normalize([0.5], [0.25])
        self.transform = transforms.Compose([transforms.ToTensor(), normalize])

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """Return an image, float32 (C, H, W), and its class number."""
        image = Image.fromarray(self.arrays[index])
        return self.transform(image), self.targets[index]


class StepClock(Callback):
    """Measures the time from the end of the first step of an epoch to the end of the
    last step. The first step is left out, because it contains the costs of a start.

    A loop by hand calls `mark`. In a run this object is a callback.
    """

    def __init__(self) -> None:
        self.marks: list[tuple[float, int]] = []  # seconds, and steps so far

    def mark(self, num_steps: int) -> None:
        """Note the time. Call this twice: after the first step and after the last one.
        On a GPU it waits until the queued work is done.

        num_steps: The number of steps since the epoch began.
        """
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        self.marks.append((time.perf_counter(), num_steps))

    @property
    def seconds(self) -> float:
        """The time of 100 steps in seconds, after both calls of `mark`."""
        (start, first), (end, last) = self.marks
        return 100 * (end - start) / (last - first)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, *args: Any
    ) -> None:
        """Note the time after the first and the last step of a run with one epoch."""
        if trainer.global_step == 1 or trainer.is_last_batch:
            self.mark(trainer.global_step)


class Reference:
    """The things that all contestants share: the network, the optimizer and the flags
    of a shipped YAML, with generated images in place of its data.

    Args:
        part: A key of EXPERIMENTS.
        num_batches: The number of training batches of BATCH_SIZE images.
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
            "--data.val_fraction=0",  # all generated images train
        ]
        loaded: Any = parse(self.flags)
        self.spec, self.model, self.data = loaded
        self.images, self.targets = self.data.load("train")


def tutorial(reference: Reference) -> float:
    """Train with the loop of PyTorch's tutorial. Return the seconds of 100 steps."""
    samples = SingleImages(reference.images, reference.targets)
    net = copy.deepcopy(reference.model.net)
    return train_by_hand(reference, net, DataLoader(samples, BATCH_SIZE, shuffle=True))


def raw(reference: Reference) -> float:
    """Train with a fast loop: it makes the batches on the device, has a fused optimizer
    and the memory layout channels_last, and logs nothing. Return the seconds of 100
    steps."""
    layout: Any = torch.channels_last
    images = reference.images.to(reference.device)
    targets = reference.targets.to(reference.device)

    def batches() -> Iterator[Batch]:
        """Yield the batches of an epoch in random order."""
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

    reference: Has the device, the optimizer and the learning rate.
    net: The network. Its weights change.
    batches: Pairs of inputs and class numbers, on any device.
    options: Other arguments of the optimizer.
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
    """Train as scripts/train.py does, with logs, checkpoints and the progress bar, in a
    temporary folder. Return the seconds of 100 steps."""
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
"""{name: function}. Each function trains one epoch and returns the seconds of 100
steps."""


def measure(part: str, accelerator: str, num_steps: int, rounds: int) -> Rows:
    """Call the contestants in turn, so that a change of the machine's speed affects all
    of them. Return their times. Their output is not printed.

    Args:
        part: A key of EXPERIMENTS.
        accelerator: "cpu" or "gpu".
        num_steps: The steps that are timed in each round. One more comes before them.
        rounds: How often each contestant is called.
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
    """Print a Markdown table. A row has the median of a contestant's rounds, the lowest
    and the highest round, the images per second, and the median divided by the median
    of "ours". Return the median of "ours"."""
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
    """Measure the parts on the CPU, and also on the GPU if there is one. Print the
    tables, and the CPU's time divided by the GPU's time.

    args: The words of the command line. By default they come from sys.argv.
    """
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
