"""How fast training is, side by side with hand-written PyTorch and with Lightning as it is usually written.

python scripts/benchmark.py                            # all of it on generated data, about 20 minutes on 2 cores
python scripts/benchmark.py --parts mnist --rounds 3 --json speed.json
python scripts/benchmark.py --parts mnist cifar --data_dir data            # the real images

Contestants of the parts mnist and cifar, with the same network, batch size and number of steps:

  tutorial       a plain loop over torchvision's dataset with per-sample transforms, no workers
  tutorial, N w  the same with the best number of worker processes
  stock          Lightning as a careful user writes it: that dataset, self.log and a torchmetrics accuracy in every
                 step, TensorBoard, progress bar, checkpoint
  raw            hand-tuned PyTorch: data resident on the device, fused optimiser, channels_last, nothing logged, and as
                 many CPU threads as ours
  raw, graph     (GPU) the same as one CUDA graph
  ours           the shipped YAML through train.py, with logging, bar and checkpoints

They take turns in every round. A step's time is that between the first and the last step of an epoch, without what an
epoch or a validation costs once.
"""

import argparse
import contextlib
import copy
import datetime
import io
import json
import multiprocessing
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import lightning
import numpy as np
import torch
import torchmetrics
import torchvision
import yaml
from lightning import Callback, LightningModule, Trainer
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset
from torchvision import datasets, transforms

from project.base.datamodule import Batch, TensorDataModule
from project.base.errors import ScriptParser, output_file, short_errors, write_whole
from project.base.image_files import find_images, read_image
from project.base.sampler import EpochBatchSampler
from project.base.samples import ResumableLoader, TensorBatches, as_it_is
from project.data.cifar10 import CIFAR10
from project.data.image_folder import ImageFolder
from project.data.mnist import MNIST
from project.data.transforms import random_crop, random_flip, to_float
from project.engine.devices import cpu_threads
from project.engine.quiet import quiet_lightning
from project.engine.run import main as train
from project.models.cnn import CIFAR10CNN
from project.models.mlp import MLP

REPO = Path(__file__).parents[1]


class Generated(TensorDataModule):
    """Random images in the shapes of MNIST or CIFAR-10, and random labels: speed does not depend on what they show.

    image_shape: [1, 28, 28] or [3, 32, 32].
    """

    classes = [str(i) for i in range(10)]

    def __init__(
        self, image_shape: tuple[int, int, int] = (1, 28, 28), num_train: int = 60_000, num_test: int = 10_000, **kwargs
    ) -> None:
        super().__init__(**kwargs)
        self.image_shape = image_shape
        self.num = {"train": num_train, "test": num_test}

    def load(self, split: Literal["train", "test"]) -> Batch:
        generator = torch.Generator().manual_seed(0)
        images = torch.randint(256, (self.num[split], *self.image_shape), dtype=torch.uint8, generator=generator)
        return images, torch.randint(10, (self.num[split],), generator=generator)

    def normalize(self, inputs: Tensor) -> Tensor:
        return to_float(inputs, 0.5, 0.5) if self.image_shape[0] == 1 else to_float(inputs)


class System:
    """One of the two reference systems, its data and its optimiser."""

    def __init__(self, name: str, data_dir: Path | None, num_train: int | None = None) -> None:
        self.name = name
        self.config = {"mnist": "mnist_mlp", "cifar": "cifar10_cnn"}[name]
        self.settings = yaml.safe_load((REPO / "configs" / f"{self.config}.yaml").read_text())
        self.shape = {"mnist": (1, 28, 28), "cifar": (3, 32, 32)}[name]
        self.data_dir = data_dir
        self.num_train = num_train or {"mnist": 60_000, "cifar": 50_000}[name]
        if data_dir is None:
            source: TensorDataModule = Generated(self.shape, self.num_train)
        else:
            source = (MNIST if name == "mnist" else CIFAR10)(data_dir=str(data_dir))
            source.prepare_data()
        self.images, self.labels = source.load("train")
        self.normalize = source.normalize

    def net(self) -> nn.Module:
        return MLP(sizes=[784, 128, 10]) if self.name == "mnist" else CIFAR10CNN()

    def optimizer(self, net: nn.Module, fused: bool | None = None) -> torch.optim.Optimizer:
        if self.name == "mnist":
            return torch.optim.Adam(net.parameters(), lr=0.001, fused=fused)
        return torch.optim.SGD(net.parameters(), lr=0.01, fused=fused)

    def part(self, num_batches: int) -> "System":
        """The same with so few batches."""
        small = copy.copy(self)
        small.num_train = 64 * num_batches
        small.images, small.labels = self.images[: small.num_train], self.labels[: small.num_train]
        return small

    def dataset(self, extra: Sequence[Any] = ()) -> Dataset:
        """torchvision's, over the same images: one PIL image and one transform a sample."""
        steps: list[Any] = [*extra, transforms.ToTensor()]
        if self.name == "mnist":
            steps.append(transforms.Normalize((0.5,), (0.5,)))
        kind: Any = datasets.MNIST if self.name == "mnist" else datasets.CIFAR10
        dataset = object.__new__(kind)  # without its files
        dataset.data = self.images[:, 0] if self.name == "mnist" else self.images.permute(0, 2, 3, 1).numpy()
        dataset.targets = self.labels if self.name == "mnist" else self.labels.tolist()
        dataset.transform, dataset.target_transform = transforms.Compose(steps), None
        return dataset

    def flags(self) -> list[str]:
        """For train.py: the shipped YAML on the same images."""
        config = ["--config", str(REPO / "configs" / f"{self.config}.yaml"), "--data.val_fraction", "0"]
        if self.data_dir is not None:
            return [*config, "--data.data_dir", str(self.data_dir)]
        shape = str(list(self.shape)).replace(" ", "")
        generated = ["--data", "benchmark.Generated", "--data.image_shape", shape]
        return [*config, *generated, "--data.num_train", str(self.num_train), "--data.val_fraction", "0"]


NOT_WATCHED = ("--device_monitor", "false", "--step_timer", "false", "--figures_every_n_epochs", "0")


class Clock:
    """Times the steps of a training loop, and what lies between its epochs."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.seconds = 0.0
        self.num_steps = 0
        self.train_seconds = 0.0
        """Of the whole training, as train.py reports it."""
        self.gaps: list[tuple[float, int]] = []
        """Seconds from the end of an epoch to that of the first call of the next, and the steps of that call."""
        self.first = self.last = (0.0, 0)

    def tick(self, num_steps: int, is_first: bool, is_last: bool) -> None:
        """At the end of a call that has made the epoch's steps up to `num_steps`."""
        if not (is_first or is_last):
            return
        if self.device == "cuda":
            torch.cuda.synchronize()
        now = (time.perf_counter(), num_steps)
        if is_first:
            if self.num_steps:
                self.gaps.append((now[0] - self.last[0], num_steps))
            self.first = now
        if is_last:
            self.seconds += now[0] - self.first[0]
            self.num_steps += num_steps - self.first[1]
            self.last = now

    @property
    def step_ms(self) -> float:
        return 1e3 * self.seconds / self.num_steps

    @property
    def epoch_ms(self) -> float:
        """What an epoch costs beside its steps."""
        return statistics.mean(1e3 * seconds - num * self.step_ms for seconds, num in self.gaps)


class StepClock(Callback):
    """A Clock within Lightning; `StepClock.newest` is that of the last run."""

    newest: Clock
    validation_ms: list[float]

    def __init__(self) -> None:
        self.clock = StepClock.newest = Clock("cpu")
        StepClock.validation_ms = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.clock.device = trainer.strategy.root_device.type

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.start = trainer.global_step

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        self.clock.tick(trainer.global_step - self.start, args[2] == 0, trainer.is_last_batch)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.validation_start = time.perf_counter()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        StepClock.validation_ms.append(1e3 * (time.perf_counter() - self.validation_start))


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Bars and lines go nowhere, but are made."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


def tutorial(system: System, num_epochs: int, device: str, num_workers: int = 0, batch_size: int = 64) -> Clock:
    """The loop of a tutorial: torchvision's dataset, per-sample transforms, one step after the other."""
    options: dict[str, Any] = {"num_workers": num_workers, "persistent_workers": num_workers > 0}
    loader = DataLoader(
        system.dataset(), batch_size, shuffle=True, drop_last=True, pin_memory=device == "cuda", **options
    )
    net = system.net().to(device)
    optimizer = system.optimizer(net)
    clock = Clock(device)
    for _ in range(num_epochs):
        for index, (x, y) in enumerate(loader):
            x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
            loss = functional.cross_entropy(net(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            clock.tick(index + 1, index == 0, index == len(loader) - 1)
    return clock


class StockModule(LightningModule):
    """What a careful user of Lightning writes."""

    def __init__(self, system: System) -> None:
        super().__init__()
        self.net = system.net()
        self.system = system
        self.accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=10)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self.net(x)
        loss = functional.cross_entropy(logits, y)
        self.accuracy(logits, y)
        self.log("train_loss", loss, prog_bar=True)
        self.log("train_acc", self.accuracy)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.system.optimizer(self.net)


def stock(system: System, num_epochs: int, device: str, num_workers: int = 0) -> Clock:
    options: dict[str, Any] = {"num_workers": num_workers, "persistent_workers": num_workers > 0}
    loader = DataLoader(system.dataset(), 64, shuffle=True, drop_last=True, pin_memory=device == "cuda", **options)
    with tempfile.TemporaryDirectory() as folder, quiet():
        trainer = Trainer(
            max_epochs=num_epochs, accelerator="gpu" if device == "cuda" else "cpu", devices=1,
            default_root_dir=folder, callbacks=[StepClock()], enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(StockModule(system), loader)
    return StepClock.newest


def raw(system: System, num_epochs: int, device: str, batch_size: int = 64, graph: bool = False) -> Clock:
    """Hand-tuned: resident data, one indexing call a batch, fused optimiser; with `graph` a step is one launch."""
    with cpu_threads(system.settings.get("num_threads")):
        return raw_loop(system, num_epochs, device, batch_size, graph)


def raw_loop(system: System, num_epochs: int, device: str, batch_size: int, graph: bool) -> Clock:
    images, labels = system.images.to(device), system.labels.to(device)
    net = system.net().to(device)
    if system.name == "cifar":
        net = net.to(memory_format=torch.channels_last)
    optimizer = system.optimizer(net, fused=True)
    index = torch.zeros(batch_size, dtype=torch.long, device=device)

    def step() -> None:
        x = system.normalize(images[index])
        if system.name == "cifar":
            x = x.contiguous(memory_format=torch.channels_last)
        loss = functional.cross_entropy(net(x), labels[index])
        optimizer.zero_grad(set_to_none=not graph)
        loss.backward()
        optimizer.step()

    replay: Callable[[], None] = step
    if graph:
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):  # before a capture everything must have run once
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(side)
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            step()
        replay = captured.replay
    clock = Clock(device)
    num_batches = len(images) // batch_size
    for _ in range(num_epochs):
        order = torch.randperm(len(images), device=device)[: num_batches * batch_size].view(num_batches, batch_size)
        for i in range(num_batches):
            index.copy_(order[i])
            replay()
            clock.tick(i + 1, i == 0, i == num_batches - 1)
    return clock


def ours(system: System, num_epochs: int, device: str, *flags: str, validate: bool = False) -> Clock:
    accelerator = "gpu" if device == "cuda" else "cpu"
    flags = flags if validate else ("--trainer.limit_val_batches", "0", *flags)
    with tempfile.TemporaryDirectory() as folder, quiet():
        result = train(
            [
                *system.flags(),
                *("--trainer.max_epochs", str(num_epochs), "--trainer.accelerator", accelerator),
                *("--trainer.limit_test_batches", "0", "--trainer.default_root_dir", folder),
                *("--trainer.enable_progress_bar", "true"),
                *("--trainer.callbacks", "benchmark.StepClock", *flags),
            ]
        )
    clock = newest_clock()
    clock.train_seconds = result["train_seconds"]
    return clock


def newest_clock() -> Clock:
    # train.py imports this file anew, by its name
    return sys.modules["benchmark"].StepClock.newest


# the parts


def best_num_workers(system: System, device: str) -> int:
    """Of 1, 2, 4, ... up to the number of cores, by a short run each."""
    counts = [1]
    while counts[-1] * 2 <= (os.cpu_count() or 1):
        counts.append(counts[-1] * 2)
    return min(counts, key=lambda num: tutorial(system.part(200), 1, device, num).step_ms)


def compare(name: str, device: str, options: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds a step of each contestant, in each round."""
    system = System(name, options.data_dir, 64 * (options.steps + 1))
    num_epochs = -(-options.steps // (len(system.images) // 64 - 1))
    num_workers = best_num_workers(system, device)
    faster = min((0, num_workers), key=lambda num: tutorial(system.part(200), 1, device, num).step_ms)
    contestants: dict[str, Callable[[System, int], Clock]] = {
        "tutorial": lambda s, n: tutorial(s, n, device),
        f"tutorial, {num_workers} w": lambda s, n: tutorial(s, n, device, num_workers),
        f"stock, {faster} w": lambda s, n: stock(s, n, device, faster),
        "raw": lambda s, n: raw(s, n, device),
        "ours": lambda s, n: ours(s, n, device),
    }
    contestants["ours, not watched"] = lambda s, n: ours(s, n, device, *NOT_WATCHED)
    if device == "cuda":
        contestants["raw, graph"] = lambda s, n: raw(s, n, device, graph=True)
    if name == "mnist":
        contestants["ours, 1 step a call"] = lambda s, n: ours(s, n, device, "--steps_per_execution", "1")
    else:
        contestants["ours, bf16-mixed"] = lambda s, n: ours(s, n, device, "--trainer.precision", "bf16-mixed")
    times: dict[str, list[float]] = {contestant: [] for contestant in contestants}
    for run in contestants.values():
        run(system.part(100), 1)  # warm-up
    for _ in range(options.rounds):
        for contestant, run in contestants.items():
            times[contestant].append(run(system, num_epochs).step_ms)
    rows = {contestant: spread(values) for contestant, values in times.items()}
    for row in rows.values():
        row["ms per 100 steps"] = 100 * row["median"]
        row["contestant / ours"] = row["median"] / rows["ours"]["median"]
    return rows


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def once(name: str, device: str, options: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds that ours takes for an epoch beside its steps, and for a validation of 10,000 images."""
    system = System(name, options.data_dir, 64 * 201)
    ours(system, 4, device, validate=True)
    clock, validations = newest_clock(), sys.modules["benchmark"].StepClock.validation_ms
    validation = spread(validations[1:])
    epochs = [1e3 * seconds - num * clock.step_ms - validation["median"] for seconds, num in clock.gaps]
    return {"epoch (checkpoints, loader)": spread(epochs), "validation of 10,000": validation}


def loader(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Images a second out of the loader alone, normalised, on the CPU; with crop and flip for CIFAR-10."""
    system = System(name, options.data_dir, 64 * 300)
    rows: dict[str, Any] = {}
    for augmented in (False, True) if name == "cifar" else (False,):
        extra = [transforms.RandomCrop(32, padding=4), transforms.RandomHorizontalFlip()] if augmented else []
        theirs = DataLoader(system.dataset(extra), 64, shuffle=True, drop_last=True)
        sampler = EpochBatchSampler(len(system.images), 64, shuffle=True, drop_last=True)
        batches: Any = TensorBatches(system.images, system.labels)
        own = ResumableLoader(batches, batch_sampler=sampler, collate_fn=as_it_is)  # type: ignore[arg-type]  # a batch

        def run_own(own: Any = own, augmented: bool = augmented) -> None:
            for x, _ in own:
                system.normalize(random_flip(random_crop(x, 4)) if augmented else x)

        def run_theirs(theirs: Any = theirs) -> None:
            for _ in theirs:
                pass

        kind = "crop and flip" if augmented else "plain"
        for who, run in (("torchvision", run_theirs), ("ours", run_own)):
            speeds = []
            for _ in range(options.rounds):
                start = time.perf_counter()
                run()
                speeds.append(64 * len(own) / (time.perf_counter() - start))
            rows[f"{who}, {kind}"] = spread(speeds)
        rows[f"{kind}: ours / torchvision"] = {
            "median": rows[f"ours, {kind}"]["median"] / rows[f"torchvision, {kind}"]["median"]
        }
    return rows


def growth(name: str, device: str, options: argparse.Namespace) -> dict[str, Any]:
    """How the time of training grows: batch 1024 against 64 (images a second), four times the data against once."""
    rows: dict[str, Any] = {}
    system = System(name, options.data_dir, 1024 * 60)
    for batch_size in (64, 1024):
        flags = ("--data.batch_size", str(batch_size))
        speeds = [1e3 * batch_size / ours(system, 1, device, *flags).step_ms for _ in range(min(3, options.rounds))]
        rows[f"images/s, batch {batch_size}"] = spread(speeds)
    seconds: dict[int, list[float]] = {1: [], 4: []}
    for _ in range(min(3, options.rounds)):
        for times in seconds:
            seconds[times].append(ours(System(name, None, 64 * 150 * times), 2, device).train_seconds)
    rows["4 x the data / 1 x"] = {"median": statistics.median(seconds[4]) / statistics.median(seconds[1])}
    return rows


PLAIN_SCRIPT = """
import torch, torchvision
from torch import nn
from torchvision import transforms
data = torchvision.datasets.FakeData(64 * 10, (1, 28, 28), 10, transforms.ToTensor())
loader = torch.utils.data.DataLoader(data, 64, shuffle=True)
net = nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.Adam(net.parameters())
for x, y in loader:
    loss = nn.functional.cross_entropy(net(x), torch.as_tensor(y))
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    print("Epoch 1", flush=True)
    break
"""


def launch(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds from the command to the first training step, MNIST's network."""
    system = System("mnist", None, 640)
    seconds: dict[str, list[float]] = {"plain script": [], "ours": []}
    with tempfile.TemporaryDirectory() as folder:
        flags = [*system.flags(), "--trainer.max_steps", "1", "--trainer.default_root_dir", folder]
        flags += ["--trainer.limit_val_batches", "0"]  # Lightning says that the epoch is over after its validation
        commands = {
            "plain script": [sys.executable, "-c", PLAIN_SCRIPT],
            "ours": [sys.executable, str(REPO / "scripts" / "train.py"), *flags, "--trainer.log_every_n_steps", "1"],
        }
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
        for _ in range(options.rounds):
            for who, command in commands.items():
                start = time.perf_counter()
                with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
                    assert process.stdout
                    next(line for line in process.stdout if line.startswith("Epoch 1"))
                    seconds[who].append(time.perf_counter() - start)
                    process.stdout.read()
    rows: dict[str, Any] = {who: spread(values) for who, values in seconds.items()}
    rows["ours / plain script"] = {"median": rows["ours"]["median"] / rows["plain script"]["median"]}
    return rows


def folder(options: argparse.Namespace) -> dict[str, Any]:
    """Images a second out of folders of JPEG files, 256 x 256: decoding alone, and training the CNN on them."""
    num_files, num_workers = NUM_FILES, os.cpu_count() or 1
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        generator = np.random.default_rng(0)
        for split, num in (("train", num_files), ("test", 10)):
            for i in range(num):
                path = root / "data" / split / str(i % 10) / f"{i}.jpg"
                path.parent.mkdir(parents=True, exist_ok=True)
                small = generator.integers(0, 256, (32, 32, 3), dtype=np.uint8)
                Image.fromarray(small).resize((256, 256), Image.Resampling.BICUBIC).save(path, quality=90)
        files, _ = find_images([root / "data" / "train"])
        flags = [
            "--config",
            str(REPO / "configs" / "cifar10_cnn.yaml"),
            "--data",
            "project.data.image_folder.ImageFolder",
        ]
        flags += ["--data.data_dir", str(root / "data"), "--data.image_shape", "[3,32,32]", "--data.val_fraction", "0"]
        flags += ["--trainer.limit_val_batches", "0", "--trainer.limit_test_batches", "0", "--trainer.max_epochs", "2"]
        flags += ["--trainer.default_root_dir", str(root), "--trainer.accelerator", "cpu"]
        flags += ["--trainer.callbacks", "benchmark.StepClock"]
        samples = ImageFolder(str(root / "data"), image_shape=(3, 32, 32)).samples("train")
        rows: dict[str, list[float]] = {"decoding alone": [], "loader": [], "training": []}
        for _ in range(options.rounds):
            with multiprocessing.get_context("fork").Pool(num_workers) as pool:
                start = time.perf_counter()
                list(pool.imap_unordered(decode, files, chunksize=64))
                rows["decoding alone"].append(num_files / (time.perf_counter() - start))
            sampler = EpochBatchSampler(len(samples), 64, shuffle=True)
            how: Any = {"collate_fn": as_it_is, "num_workers": num_workers}
            batches = ResumableLoader(samples, batch_sampler=sampler, **how)
            start = time.perf_counter()
            for _ in batches:
                pass
            rows["loader"].append(num_files / (time.perf_counter() - start))
            with quiet():
                train(flags)
            rows["training"].append(64e3 / newest_clock().step_ms)
    result: dict[str, Any] = {f"{who}, {num_workers} workers": spread(values) for who, values in rows.items()}
    for who in ("loader", "training"):
        shares = [own / alone for own, alone in zip(rows[who], rows["decoding alone"], strict=True)]
        result[f"{who} / decoding alone"] = spread(shares)
    return result


def decode(file: Path) -> None:
    read_image(file, (3, 32, 32))


NUM_FILES = 4000
PARTS = ("mnist", "cifar", "folder", "launch")


def main(args: Sequence[str] | None = None) -> dict[str, Any]:
    parser = ScriptParser(description=__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to measure")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each contestant")
    parser.add_argument("--steps", type=int, default=1000, help="steps of a turn, at least")
    parser.add_argument("--data_dir", type=Path, help="the real MNIST and CIFAR-10; generated images unless given")
    parser.add_argument("--accelerator", choices=["cpu", "gpu"], help="the GPU if there is one, unless given")
    parser.add_argument("--json", type=output_file, help="write the results to a file too")
    with short_errors():
        options = parser.parse_args(args)
        sys.path.insert(0, str(Path(__file__).parent))  # train.py finds what it needs of this file by its name
        quiet_lightning()
        device = {"cpu": "cpu", "gpu": "cuda"}.get(options.accelerator) or (
            "cuda" if torch.cuda.is_available() else "cpu"
        )
        results: dict[str, Any] = {"environment": environment(device), "rounds": options.rounds, "steps": options.steps}
        for part in options.parts:
            if part in ("mnist", "cifar"):
                results[f"{part}: ms a step, batch 64"] = show(f"{part}, ms a step", compare(part, device, options))
                results[f"{part}: ms once"] = show(f"{part}, ms once", once(part, device, options))
                results[f"{part}: loader, images/s"] = show(f"{part} loader, images/s", loader(part, options))
                results[f"{part}: growth"] = show(f"{part}, growth", growth(part, device, options))
                if device == "cuda":
                    results[f"{part}: CPU / GPU"] = show(f"{part}, CPU / GPU", cpu_to_gpu(part, options))
                print(where_it_goes(part, results))
            else:
                title = {"folder": "image folder, images/s", "launch": "launch to the first step, s"}[part]
                results[title] = show(title, (folder if part == "folder" else launch)(options))
        if options.json:
            write_whole(options.json, json.dumps(results, indent=2) + "\n")
    return results


def cpu_to_gpu(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds for 100 steps on both, and the ratio."""
    system = System(name, options.data_dir, 64 * 301)
    rows = {device: spread([100 * ours(system, 1, device).step_ms for _ in range(3)]) for device in ("cpu", "cuda")}
    return {**rows, "cpu / cuda": {"median": rows["cpu"]["median"] / rows["cuda"]["median"]}}


def where_it_goes(name: str, results: dict[str, Any]) -> str:
    rows, speeds = results[f"{name}: ms a step, batch 64"], results[f"{name}: loader, images/s"]
    own, by_hand = rows["ours"]["median"], rows["raw"]["median"]
    loading = 64e3 / speeds["ours, plain"]["median"]
    return (
        f"Where the time of ours goes: {own:.2f} ms a step. By hand it would be {by_hand:.2f}, "
        f"of which loading and normalising are about {min(loading, by_hand):.2f};\n"
        f"{own - by_hand:.2f} are Lightning's loop, metrics, logging and the bar.\n"
    )


def show(title: str, rows: dict[str, Any]) -> dict[str, Any]:
    print(f"{title:<28}{'median':>11}{'min':>11}{'max':>11}{'/ ours':>9}")
    for name, row in rows.items():
        cells = [f"{row[key]:>11.4g}" if key in row else " " * 11 for key in ("median", "min", "max")]
        ratio = f"{row['contestant / ours']:>9.2f}" if "contestant / ours" in row else ""
        print(f"  {name:<26}{''.join(cells)}{ratio}")
    print(flush=True)
    return rows


def environment(device: str) -> dict[str, Any]:
    found = {
        "date": datetime.date.today().isoformat(),
        "processor": f"{os.cpu_count()} cores, {torch.backends.cpu.get_cpu_capability()}, {platform.machine()}",
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "python": platform.python_version(),
        **{module.__name__: module.__version__ for module in (torch, torchvision, lightning)},
    }
    print("\n".join(f"{name}: {value}" for name, value in found.items()), end="\n\n")
    return found


if __name__ == "__main__":
    main()
