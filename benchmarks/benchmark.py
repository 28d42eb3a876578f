"""Measure the speed of training, beside other ways to train the same network.

    python benchmarks/benchmark.py                  # about 8 minutes on 2 cores
    python benchmarks/benchmark.py --parts mnist --rounds 5
    python benchmarks/benchmark.py > docs/speed.md  # the tables are Markdown

These contestants train one network, in batches of 64, on the same generated images:

  tutorial  a plain loop over torchvision's dataset, with transforms per sample
  stock     the same dataset in Lightning's Trainer, with self.log and torchmetrics in each step
  raw       hand-tuned PyTorch without logs: data on the device, fused optimizer, channels_last
  ours      the shipped YAML through train.py, with logs, progress bar and checkpoints

"2 w" means two worker processes. Contestants take turns in every round. The time of a step does
not include what an epoch costs once.
"""

import argparse
import contextlib
import copy
import io
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torchmetrics
import torchvision
from lightning import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchvision import transforms

from lightbase import Batch, MayMissSteps
from lightbase.cli.script import ScriptParser, starting
from lightbase.compat import quiet_lightning
from lightbase.data.transforms import crop_and_flip
from lightbase.devices.devices import cpu_threads
from lightbase.run import train
from lightbase.run.record import describe_environment

REPO = Path(__file__).parents[1]
DATA = "project.data.synthetic.SyntheticImages"
PARTS = ("mnist", "cifar")
BATCH_SIZE = 64
GRAPHS = "--model.compile_net inductor --model.compile_mode reduce-overhead"  # CUDA graphs
NOT_WATCHED = "--device_monitor false --step_timer false --figures_every_n_epochs 0"

Rows = dict[str, list[float]]  # the values of all rounds, by contestant


class Reference:
    """Network, optimizer and flags of a shipped YAML, with `num_batches` batches of images."""

    def __init__(self, name: str, num_batches: int, accelerator: str) -> None:
        self.is_mnist = name == "mnist"
        self.num_batches = num_batches
        self.device = torch.device("cuda" if accelerator == "gpu" else "cpu")
        config = REPO / "configs" / ("mnist_mlp.yaml" if self.is_mnist else "cifar10_cnn.yaml")
        flags = f"--trainer.accelerator {accelerator} --data {DATA} --data.val_fraction 0 "
        flags += f"--data.image_shape {'[1,28,28]' if self.is_mnist else '[3,32,32]'} "
        flags += f"--data.num_train {BATCH_SIZE * num_batches} --data.num_test {BATCH_SIZE}"
        self.flags = ["--config", str(config), *flags.split()]
        self.cli = train.parse(self.flags)
        self.model: Any = self.cli.model
        self.data: Any = self.cli.datamodule
        self.images, self.targets = self.data.load("train")  # type: ignore[attr-defined]

    def net(self) -> Any:
        return copy.deepcopy(self.model.net).to(self.device)

    def optimizer(self, net: nn.Module, **options: Any) -> torch.optim.Optimizer:
        kind = getattr(torch.optim, self.model.optimizer)
        return kind(net.parameters(), lr=self.model.lr, **options)

    def torchvision_loader(self, num_workers: int = 0, augment: Sequence[Any] = ()) -> DataLoader:
        """torchvision's dataset of the same images: one PIL image, one transform per sample."""
        kind: Any = torchvision.datasets.MNIST if self.is_mnist else torchvision.datasets.CIFAR10
        dataset = object.__new__(kind)  # its constructor would read files
        images, targets = self.images, self.targets
        dataset.data = images[:, 0] if self.is_mnist else images.permute(0, 2, 3, 1).numpy()
        dataset.targets = targets if self.is_mnist else targets.tolist()
        normalize = transforms.Normalize([0.5], [0.25])  # as in DATA
        dataset.transform = transforms.Compose([*augment, transforms.ToTensor(), normalize])
        dataset.target_transform = None
        options: Any = {"num_workers": num_workers, "pin_memory": self.device.type == "cuda"}
        return DataLoader(dataset, BATCH_SIZE, shuffle=True, **options)


class StepClock(MayMissSteps):
    """Times the steps of an epoch, from the end of its first call to the end of its last.

    What an epoch costs once is not counted. A call makes one step or several.
    """

    newest: "StepClock"  # the clock of the latest run: train.py constructs the callback itself

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
    def step_ms(self) -> float:
        (start, first), (end, last) = self.marks
        return 1e3 * (end - start) / (last - first)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        self.after_call(trainer.global_step, trainer.is_last_batch)


# Contestants. Each one trains one epoch and returns the milliseconds of a step.


def tutorial(reference: Reference, num_workers: int = 0) -> float:
    loader = reference.torchvision_loader(num_workers)
    net = reference.net()
    return train_by_hand(reference, net, reference.optimizer(net), loader)


def raw(reference: Reference, compile_mode: str | None = None) -> float:
    """compile_mode: of torch.compile; "reduce-overhead" launches the network as CUDA graphs."""
    images, targets = reference.images.to(reference.device), reference.targets.to(reference.device)
    layout: Any = torch.contiguous_format if reference.is_mnist else torch.channels_last

    def batches() -> Iterator[Batch]:
        for index in torch.randperm(len(images), device=reference.device).split(BATCH_SIZE):
            inputs = reference.data.normalize(images[index])
            yield inputs.contiguous(memory_format=layout), targets[index]

    net = reference.net().to(memory_format=layout)
    # torch.compile counts the networks of earlier runs as variants of this one, and takes eight
    torch.compiler.reset()
    if compile_mode:
        net.compile(mode=compile_mode)
    with cpu_threads(reference.cli.config.num_threads):
        return train_by_hand(reference, net, reference.optimizer(net, fused=True), batches())


def train_by_hand(
    reference: Reference, net: nn.Module, optimizer: Any, batches: Iterable[Batch]
) -> float:
    clock = StepClock()
    for step, (inputs, targets) in enumerate(batches, 1):
        x = inputs.to(reference.device, non_blocking=True)
        y = targets.to(reference.device, non_blocking=True)
        loss = nn.functional.cross_entropy(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        clock.after_call(step, step == reference.num_batches)
    return clock.step_ms


class StockModule(LightningModule):
    """Loss and accuracy by self.log in every step, as Lightning's pages show it."""

    def __init__(self, net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__()
        self.net, self.optimizer = net, optimizer
        self.accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=10)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self.net(x)
        loss = nn.functional.cross_entropy(logits, y)
        self.log("train_loss", loss, prog_bar=True)
        self.log("train_acc", self.accuracy(logits, y))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer


def stock(reference: Reference, num_workers: int = 0) -> float:
    net, clock = reference.net(), StepClock()
    module = StockModule(net, reference.optimizer(net))
    options: Any = {"accelerator": reference.device.type, "devices": 1, "max_epochs": 1}
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(callbacks=[clock], default_root_dir=folder, **options)
        trainer.fit(module, reference.torchvision_loader(num_workers))
    return clock.step_ms


def ours(reference: Reference, flags: str = "") -> float:
    torch.compiler.reset()  # as in `raw`
    flags += " --trainer.max_epochs 1 --trainer.limit_val_batches 0 --trainer.limit_test_batches 0"
    flags += " --trainer.enable_progress_bar true --trainer.callbacks benchmark.StepClock"
    with tempfile.TemporaryDirectory() as folder:
        train.main([*reference.flags, *flags.split(), "--trainer.default_root_dir", folder])
    return StepClock.newest.step_ms


def contestants(accelerator: str) -> dict[str, Callable[[Reference], float]]:
    workers = os.cpu_count() or 1
    by_name: dict[str, Any] = {
        "tutorial": tutorial,
        f"tutorial, {workers} w": partial(tutorial, num_workers=workers),
        "stock, 0 w": stock,
        f"stock, {workers} w": partial(stock, num_workers=workers),
        "raw": raw,
        "ours": ours,
        "ours, not watched": partial(ours, flags=NOT_WATCHED),
        "ours, one step a call": partial(ours, flags="--steps_per_execution 1"),
        "ours, bf16-mixed": partial(ours, flags="--trainer.precision bf16-mixed"),
    }
    if accelerator == "gpu":
        by_name["raw, compiled"] = partial(raw, compile_mode="reduce-overhead")
        by_name["ours, compiled"] = partial(ours, flags=GRAPHS)
        by_name["ours, not resident"] = partial(ours, flags="--data.resident false")
    return by_name


# Measurements


def measure(competing: Mapping[str, Callable[[], float]], rounds: int) -> Rows:
    """Call all contestants in turn, `rounds` times. What they print is not shown."""
    rows: Rows = {name: [] for name in competing}
    output = io.StringIO()
    for _ in range(rounds):
        for name, contestant in competing.items():
            with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
                rows[name].append(contestant())
    return rows


def steps(name: str, options: argparse.Namespace) -> Rows:
    """Milliseconds a step."""
    competing = contestants(options.accelerator)
    for num_steps, rounds in ((60, 1), (options.steps, options.rounds)):  # warm-up first
        reference = Reference(name, num_steps + 1, options.accelerator)
        rows = measure({who: partial(f, reference) for who, f in competing.items()}, rounds)
    return rows


def loader(name: str, options: argparse.Namespace) -> Rows:
    """Images a second of the loaders alone, cropped, mirrored and normalised, on the CPU."""
    reference = Reference(name, 300, "cpu")
    data = reference.data
    data.trainer = reference.cli.make_trainer(logger=False)
    data.setup("fit")
    crop = transforms.RandomCrop(reference.images.shape[-1], padding=4)
    theirs = reference.torchvision_loader(augment=[crop, transforms.RandomHorizontalFlip()])
    batches = data.train_dataloader()
    competing = {
        "torchvision": lambda: images_per_s(x for x, _ in theirs),
        "ours": lambda: images_per_s(data.normalize(crop_and_flip(x, 4, True)) for x, _ in batches),
    }
    return measure(competing, options.rounds)


def images_per_s(batches: Iterable[Tensor]) -> float:
    start = time.perf_counter()
    num_images = sum(len(images) for images in batches)
    return num_images / (time.perf_counter() - start)


def number(value: float) -> str:
    """Three digits: 1.19, 35.5, 62,300."""
    return f"{float(f'{value:.3g}'):,.9g}"


def markdown_table(title: str, rows: Rows) -> str:
    """Medians, lowest and highest values, and the ratios of the medians to that of ours."""
    lines = [f"| {title} |  | / ours |", "|---|---|---|"]
    for name, values in rows.items():
        median = statistics.median(values)
        spread = f"{number(min(values))} to {number(max(values))}"
        ratio = number(median / statistics.median(rows["ours"]))
        lines.append(f"| {name} | {number(median)} ({spread}) | {ratio} |")
    return "\n".join(lines) + "\n"


def processor() -> str:
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.exists() else ""
    return text.partition("model name\t: ")[2].partition("\n")[0] or platform.processor()


def main(args: Sequence[str] | None = None) -> None:
    best = "gpu" if torch.cuda.is_available() else "cpu"
    parser = ScriptParser(description=__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--rounds", type=int, default=3, help="turns of each contestant")
    parser.add_argument("--steps", type=int, default=400, help="of each contestant, in a round")
    parser.add_argument("--accelerator", choices=["cpu", "gpu"], default=best)
    options = parser.parse_args(args)
    quiet_lightning()
    cli = Reference("mnist", 2, options.accelerator).cli
    print(f"# Speed\n\n```\n{describe_environment(cli.make_trainer(logger=False))}```\n")
    what = f"Median (lowest to highest) of {options.rounds} rounds of {options.steps} steps."
    print(f"{what} Processor: {processor()}.\n", flush=True)
    for part in options.parts:
        print(markdown_table(f"{part}: ms a step, batch 64", steps(part, options)), flush=True)
        print(markdown_table(f"{part}: loader, images/s", loader(part, options)), flush=True)


if __name__ == "__main__":
    with starting(__file__, default_model="project.classifier.Classifier"):
        import benchmark  # by this name train.py imports the classes above

        benchmark.main()
