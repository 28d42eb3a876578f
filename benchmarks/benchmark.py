"""Measure the speed of training, and compare it with other ways to train the same
network.

python benchmarks/benchmark.py              # about 3 minutes on 2 cores
python benchmarks/benchmark.py > speed.md  # the tables are Markdown

The contestants train for one epoch. They have the same generated images, and the
network and the optimizer of a shipped YAML:

tutorial: The loop of PyTorch's tutorial. Its data set applies a transform to a PIL
    image for each sample, as the data sets of torchvision do.
plain Lightning: The same data set in Lightning's Trainer. The module logs in each step.
raw: A loop written by hand without logs. It makes its batches on the device.
bare Lightning: Lightning's Trainer with the loader of `ours`, and no logs.
ours: A run of scripts/train.py with the YAML, without validation and test.
ours, graphs: The same with --cuda_graphs true, on a GPU.

Read the functions with these names first, and then `measure`, which calls them in turn.
"""

import contextlib
import io
import statistics
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchmetrics.classification import MulticlassAccuracy
from torchvision import transforms

from lightbase import Batch
from lightbase.commands.flags import Args, Parser
from lightbase.commands.train import parse, train_parsed
from lightbase.compat import quiet_lightning
from lightbase.run.devices import cpu_threads
from lightbase.watch.environment import describe_environment
from lightbase.watch.log import LogFile

CONFIGS = Path(__file__).parents[1] / "configs"
EXPERIMENTS = {
    "mnist": ("mnist_mlp.yaml", "[1,28,28]"),
    "cifar": ("cifar10_cnn.yaml", "[3,32,32]"),
}
"""{part of the benchmark: (file in configs/, shape of its images)}."""
BATCH_SIZE = 64


class SingleImages(Dataset[Any]):
    """A data set that works as the data sets of torchvision: it applies a transform to
    a PIL image for each sample.

    images: uint8 (N, C, H, W), where C is 1 or 3.
    targets: Class numbers, int64 (N,).
    """

    # the same mean and standard deviation as in SyntheticImages
    transform = transforms.Compose(
        [transforms.ToTensor(), transforms.Normalize([0.5], [0.25])]
    )

    def __init__(self, images: Tensor, targets: Tensor) -> None:
        self.images = list(map(transforms.ToPILImage(), images))
        self.targets = targets

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Any:
        return self.transform(self.images[index]), self.targets[index]


class StepClock(Callback):
    """Measures the time of steps. A loop by hand calls `mark` after each step; its time
    begins after the first one, which contains the costs of a start. In a run this
    object is a callback that measures the last epoch.

    times: The times at the begin and after the last step, in seconds.
    num_timed: The number of steps between them.
    """

    def __init__(self, num_steps: int) -> None:
        self.num_steps = num_steps
        self.num_timed = num_steps - 1
        self.times: list[float] = []

    def mark(self, step: int) -> None:
        """Note the time after the first and the last step, counted from 1."""
        if step in (1, self.num_steps):
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
            self.times.append(time.perf_counter())

    def on_train_epoch_start(self, *_: Any) -> None:
        self.num_timed = self.num_steps
        self.times = []
        self.mark(1)

    def on_train_epoch_end(self, *_: Any) -> None:
        self.mark(self.num_steps)


class PlainModule(LightningModule):
    """A module as most templates write it: it logs the loss and the accuracy in each
    step."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.net, self.optimizer, self.lr = model.net, model.optimizer, model.lr
        self.accuracy = MulticlassAccuracy(num_classes=10)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, targets = batch
        outputs = self.net(inputs)
        loss = nn.functional.cross_entropy(outputs, targets)
        self.accuracy(outputs, targets)
        self.log("train/loss", loss, prog_bar=True)
        self.log("train/acc", self.accuracy, prog_bar=True)
        return loss

    def configure_optimizers(self) -> Any:
        return getattr(torch.optim, self.optimizer)(self.parameters(), lr=self.lr)


class BareModule(PlainModule):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    validation_step = training_step  # the data has validation samples: not used

    def configure_optimizers(self) -> Any:
        kind = getattr(torch.optim, self.optimizer)
        return kind(self.parameters(), lr=self.lr, fused=True)


def load(part: str, num_steps: int, root: str) -> Any:
    """Return the record, the model and the data of a shipped YAML, with generated
    images in place of its data, all of which train."""
    config, image_shape = EXPERIMENTS[part]
    flags = (
        "--data=project.data.synthetic.SyntheticImages --data.val_fraction=0 "
        f"--data.image_shape={image_shape} --data.num_train={BATCH_SIZE * num_steps} "
        f"--data.num_test={BATCH_SIZE} --trainer.max_epochs=2 "
        "--trainer.limit_val_batches=0 --trainer.limit_test_batches=0 "
        "--trainer.enable_progress_bar=true"
    )
    paths = [f"--config={CONFIGS / config}", f"--trainer.default_root_dir={root}"]
    return parse([*paths, *flags.split()])


def tutorial(spec: Any, model: Any, data: Any, clock: StepClock) -> None:
    """Train with the loop of PyTorch's tutorial."""
    batches = DataLoader(SingleImages(*data.load("train")), BATCH_SIZE, shuffle=True)
    train_by_hand(model, batches, torch.contiguous_format, clock)


def plain_lightning(spec: Any, model: Any, data: Any, clock: StepClock) -> None:
    """Train as most templates do, without checkpoints."""
    batches = DataLoader(SingleImages(*data.load("train")), BATCH_SIZE, shuffle=True)
    trainer = Trainer(
        max_epochs=2,
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        callbacks=[clock],
    )
    trainer.fit(PlainModule(model), batches)


def bare_lightning(spec: Any, model: Any, data: Any, clock: StepClock) -> None:
    """Train by Lightning alone, with the loader of `ours`: nothing is logged."""
    trainer = Trainer(
        max_epochs=2,
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        callbacks=[clock],
        limit_val_batches=0,
    )
    with cpu_threads(spec.config.num_threads):
        trainer.fit(BareModule(model), datamodule=data)


def raw(spec: Any, model: Any, data: Any, clock: StepClock) -> None:
    """Train with a fast loop: it makes the batches on the device, has a fused optimizer
    and the memory layout channels_last, and logs nothing."""
    images, targets = (tensor.to(device()) for tensor in data.load("train"))
    indices = torch.randperm(len(images), device=device()).split(BATCH_SIZE)
    batches = ((data.normalize(images[index]), targets[index]) for index in indices)
    with cpu_threads(spec.config.num_threads):
        train_by_hand(model, batches, torch.channels_last, clock, fused=True)


def ours(spec: Any, model: Any, data: Any, clock: StepClock) -> None:
    """Train as scripts/train.py does, with logs, checkpoints and the progress bar."""
    spec.trainer["callbacks"] = [clock]
    train_parsed(spec, model, data, LogFile())


def ours_graphs(spec: Any, model: Any, data: Any, clock: StepClock) -> None:
    """Train with CUDA graphs, or print why not."""
    spec.config.cuda_graphs = True
    spec.trainer["callbacks"] = [clock]
    train_parsed(spec, model, data, LogFile())


def train_by_hand(
    model: Any,
    batches: Iterable[Batch],
    layout: torch.memory_format,
    clock: StepClock,
    **options: Any,
) -> None:
    """Train the network for one epoch, with the optimizer and the learning rate of the
    model. options: Further arguments of the optimizer."""
    net = model.net.to(device(), memory_format=layout)
    kind = getattr(torch.optim, model.optimizer)
    optimizer = kind(net.parameters(), lr=model.lr, **options)
    for step, (inputs, targets) in enumerate(batches, 1):
        outputs = net(inputs.to(device(), memory_format=layout))
        loss = nn.functional.cross_entropy(outputs, targets.to(device()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        clock.mark(step)


def device() -> torch.device:
    """Return the GPU if there is one, else the CPU."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator or torch.device("cpu")


CONTESTANTS: dict[str, Any] = {
    "tutorial": tutorial,
    "plain Lightning": plain_lightning,
    "bare Lightning": bare_lightning,
    "raw": raw,
    "ours": ours,
    "ours, graphs": ours_graphs,
}
"""{name: function}. Each function trains one epoch, or a run two. Those with a graph
need a GPU of CUDA."""


def measure(part: str, num_steps: int, rounds: int) -> dict[str, list[float]]:
    """Call the contestants in turn, so that a change of the machine's speed affects all
    of them. Return {contestant: µs a step of each round}."""
    results: dict[str, list[float]] = {
        name: []
        for name in CONTESTANTS
        if "graph" not in name or device().type == "cuda"
    }
    with (
        contextlib.redirect_stdout(io.StringIO()),
        tempfile.TemporaryDirectory() as root,
    ):
        for _ in range(rounds):
            for name, times in results.items():
                clock = StepClock(num_steps + 1)
                CONTESTANTS[name](*load(part, num_steps + 1, root), clock)
                start, end = clock.times
                times.append(1e6 * (end - start) / clock.num_timed)
    return results


def main(args: Args = None) -> None:
    """Measure the parts, on the GPU if there is one, and print a Markdown table for
    each: the median, the lowest and the highest round, and the median divided by that
    of "ours"."""
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--parts", nargs="+", choices=[*EXPERIMENTS], default=[*EXPERIMENTS])
    add("--rounds", type=int, default=3, help="turns of each contestant")
    add("--steps", type=int, default=400, help="of each contestant, in a round")
    options = parser.parse_args(args)
    quiet_lightning()
    print(f"# Speed\n\n```\n{describe_environment(Trainer(logger=False))}```\n")
    print(f"Median (lowest to highest) of {options.rounds} rounds.\n")
    for part in options.parts:
        results = measure(part, options.steps, options.rounds)
        print(f"| {part}, batches of {BATCH_SIZE} | µs a step | / ours |")
        print("|---|---|---|")
        ours_us = statistics.median(results["ours"])
        for name, times in results.items():
            median = statistics.median(times)
            spread = f"{min(times):,.0f} to {max(times):,.0f}"
            ratio = f"{median / ours_us:.2f}"
            print(f"| {name} | {median:,.0f} ({spread}) | {ratio} |")
        print(flush=True)


if __name__ == "__main__":
    main()
