"""How fast training is, side by side with hand-written PyTorch and with Lightning as it is usually written.

python scripts/benchmark.py                            # all of it on generated data, about 20 minutes on 2 cores
python scripts/benchmark.py --parts mnist --rounds 3 --json speed.json
python scripts/benchmark.py --parts mnist cifar --data_dir data            # the real images

Contestants of the parts mnist and cifar, with the same network, batch size and number of steps:

  tutorial       a plain loop over torchvision's dataset with per-sample transforms, no workers
  tutorial, N w  the same with the best number of worker processes
  stock, N w     Lightning as usual: that dataset, self.log and torchmetrics in each step, TensorBoard, bar, checkpoint
  raw            hand-tuned PyTorch: data on the device, fused optimiser, channels_last, no logs, threads as in ours
  ours           the shipped YAML through train.py, with logging, bar and checkpoints

They take turns in every round. A step's time is that between the first and the last step of an epoch, without what an
epoch or a validation costs once.
"""

import argparse
import contextlib
import copy
import io
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from project.engine.script import ScriptParser, output_file, short_errors, write_whole  # isort: skip  # first: it hears Ctrl-C

import lightning
import numpy as np
import torch
import torchmetrics
import torchvision
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchvision import transforms

from project.base.callback import MayMissSteps
from project.base.datamodule import Batch, TensorDataModule
from project.base.image_files import find_images, read_image
from project.base.sampler import EpochBatchSampler
from project.base.samples import ResumableLoader, as_it_is
from project.data.transforms import crop_and_flip, to_float
from project.engine import run
from project.engine.devices import cpu_threads
from project.engine.quiet import quiet_lightning

CONFIGS = Path(__file__).parents[1] / "configs"
NUM_FILES = 4000
FOUND = "gpu" if torch.cuda.is_available() else "cpu"
Rows = dict[str, dict[str, float]]


class Generated(TensorDataModule):
    """Random images in the shape of MNIST's or CIFAR-10's: speed does not depend on what they show."""

    classes = [str(i) for i in range(10)]
    image_shape: tuple[int, int, int]

    def __init__(self, image_shape: tuple[int, int, int], num_train: int, **kwargs) -> None:
        super().__init__(**kwargs)
        self.image_shape = image_shape
        self.num = {"train": num_train, "test": 10_000}

    def load(self, split: Literal["train", "test"]) -> Batch:
        generator = torch.Generator().manual_seed(0)
        images = torch.randint(256, (self.num[split], *self.image_shape), dtype=torch.uint8, generator=generator)
        return images, torch.randint(10, (self.num[split],), generator=generator)

    def normalize(self, inputs: Tensor) -> Tensor:
        return to_float(inputs, 0.5, 0.5) if self.image_shape[0] == 1 else to_float(inputs)


class Reference:
    """One of the two reference systems, as its YAML has it, with `num_batches` batches of 64 images at most."""

    def __init__(self, name: str, num_batches: int, accelerator: str, data_dir: Path | None = None) -> None:
        self.is_mnist = name == "mnist"
        self.device = torch.device("cuda" if accelerator == "gpu" else "cpu")
        config, shape = ("mnist_mlp", "[1,28,28]") if self.is_mnist else ("cifar10_cnn", "[3,32,32]")
        self.flags = ["--config", str(CONFIGS / f"{config}.yaml"), "--trainer.accelerator", accelerator]
        generated = f"--data benchmark.Generated --data.image_shape {shape} --data.num_train {64 * num_batches}"
        self.flags += ["--data.data_dir", str(data_dir)] if data_dir else generated.split()
        self.flags += ["--data.val_fraction", "0"]
        self.cli: Any = run.parse(self.flags)
        data: Any = self.cli.datamodule
        data.prepare_data()
        data.setup("fit")
        self.num_batches = min(num_batches, len(data.splits["train"]) // 64)
        self.samples = data.splits["train"].select(torch.arange(64 * self.num_batches))
        self.normalize = data.normalize

    def net(self) -> Any:
        return copy.deepcopy(self.cli.model.net).to(self.device)

    def optimizer(self, net: nn.Module, **options: Any) -> torch.optim.Optimizer:
        return getattr(torch.optim, self.cli.model.optimizer)(net.parameters(), lr=self.cli.model.lr, **options)

    def loader(self, num_workers: int = 0, augment: Sequence[Any] = ()) -> DataLoader:
        """torchvision's dataset over the same images: one PIL image and one transform a sample."""
        images, targets = self.samples.inputs, self.samples.targets
        kind: Any = torchvision.datasets.MNIST if self.is_mnist else torchvision.datasets.CIFAR10
        dataset = object.__new__(kind)  # without its files
        dataset.data = images[:, 0] if self.is_mnist else images.permute(0, 2, 3, 1).numpy()
        dataset.targets = targets if self.is_mnist else targets.tolist()
        normalize = [transforms.Normalize((0.5,), (0.5,))] if self.is_mnist else []
        dataset.transform = transforms.Compose([*augment, transforms.ToTensor(), *normalize])
        dataset.target_transform = None
        options: Any = {"pin_memory": self.device.type == "cuda", "persistent_workers": num_workers > 0}
        return DataLoader(dataset, 64, shuffle=True, drop_last=True, num_workers=num_workers, **options)


class StepClock(MayMissSteps):
    """Times the steps of a training loop, Lightning's as a callback; `StepClock.newest` is that of the last run."""

    newest: "StepClock"

    def __init__(self) -> None:
        self.marks: list[tuple[float, int]] = []  # seconds, steps made: after the first and last call of each epoch
        StepClock.newest = self

    def tick(self, num_steps: int, is_last: bool) -> None:
        """At the end of a call that may make several steps; is_last: of an epoch."""
        is_first = len(self.marks) % 2 == 0
        if (is_first or is_last) and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        self.marks += [(time.perf_counter(), num_steps)] * (is_first + is_last)

    @property
    def step_ms(self) -> float:
        seconds, num_steps = np.diff(self.marks, axis=0)[::2].sum(0)
        return 1e3 * float(seconds / num_steps)

    def on_train_batch_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, *args: Any) -> None:
        self.tick(trainer.global_step, trainer.is_last_batch)


def tutorial(reference: Reference, num_epochs: int, num_workers: int = 0) -> float:
    return plain_loop(reference, num_epochs, reference.net(), partial(iter, reference.loader(num_workers)))


def raw(reference: Reference, num_epochs: int) -> float:
    samples = reference.samples.to(reference.device)
    layout: Any = torch.contiguous_format if reference.is_mnist else torch.channels_last

    def batches() -> Iterator[Batch]:
        for index in torch.randperm(len(samples), device=reference.device).split(64):
            yield reference.normalize(samples.inputs[index]).contiguous(memory_format=layout), samples.targets[index]

    with cpu_threads(reference.cli.config.num_threads):
        return plain_loop(reference, num_epochs, reference.net().to(memory_format=layout), batches, fused=True)


def plain_loop(reference: Reference, num_epochs: int, net: Any, batches: Any, **options: Any) -> float:
    optimizer, clock = reference.optimizer(net, **options), StepClock()
    for _ in range(num_epochs):
        for step, (x, y) in enumerate(batches(), 1):
            x, y = x.to(reference.device, non_blocking=True), y.to(reference.device, non_blocking=True)
            loss = nn.functional.cross_entropy(net(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            clock.tick(step, step == reference.num_batches)
    return clock.step_ms


class StockModule(lightning.LightningModule):
    def __init__(self, reference: Reference) -> None:
        super().__init__()
        self.reference = reference
        self.net = reference.net()
        self.accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=10)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self.net(x)
        loss = nn.functional.cross_entropy(logits, y)
        self.accuracy(logits, y)
        self.log("train_loss", loss, prog_bar=True)
        self.log("train_acc", self.accuracy)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.reference.optimizer(self.net)


def stock(reference: Reference, num_epochs: int, num_workers: int = 0) -> float:
    with tempfile.TemporaryDirectory() as folder:
        options: Any = {"accelerator": reference.device.type, "devices": 1, "enable_model_summary": False}
        trainer = lightning.Trainer(max_epochs=num_epochs, callbacks=[StepClock()], default_root_dir=folder, **options)
        trainer.fit(StockModule(reference), reference.loader(num_workers))
    return StepClock.newest.step_ms


def ours(reference: Reference, num_epochs: int, flags: str = "") -> float:
    return run_train(reference.flags, f"--trainer.max_epochs {num_epochs} {flags}")["step_ms"]


def run_train(experiment: Sequence[str], flags: str) -> dict[str, Any]:
    flags += " --trainer.limit_val_batches 0 --trainer.limit_test_batches 0 --trainer.enable_progress_bar true"
    with tempfile.TemporaryDirectory() as folder:
        own = ["--trainer.default_root_dir", folder, "--trainer.callbacks", "benchmark.StepClock"]
        return run.main([*experiment, *own, *flags.split()]) | {"step_ms": StepClock.newest.step_ms}


def turns(runs: Mapping[str, Callable[[], Any]], rounds: int, ratios: Sequence[tuple[str, str]] = ()) -> Rows:
    """What the runs return, which take turns in every round; ratios: of the medians of two of them."""
    values: dict[str, list[float]] = {name: [] for name in runs}
    nowhere = io.StringIO()  # bars and lines are made, but not seen
    for _ in range(rounds):
        for name, measure in runs.items():
            with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
                values[name].append(measure())
    rows = {name: {"median": statistics.median(v), "min": min(v), "max": max(v)} for name, v in values.items()}
    return rows | {f"{a} / {b}": {"median": rows[a]["median"] / rows[b]["median"]} for a, b in ratios}


def compare(name: str, options: argparse.Namespace) -> Rows:
    """Milliseconds a step."""
    reference = Reference(name, options.steps + 1, options.accelerator, options.data_dir)
    small = Reference(name, 100, options.accelerator, options.data_dir)
    counts = [0, *(2**i for i in range((os.cpu_count() or 1).bit_length()))]
    tried = {num: tutorial(small, 1, num) for num in counts}
    num_workers, faster = min(counts[1:], key=tried.__getitem__), min(counts, key=tried.__getitem__)
    not_watched = "--device_monitor false --step_timer false --figures_every_n_epochs 0"
    contestants: dict[str, Callable[[Reference, int], float]] = {
        "tutorial": tutorial,
        f"tutorial, {num_workers} w": partial(tutorial, num_workers=num_workers),
        f"stock, {faster} w": partial(stock, num_workers=faster),
        "raw": raw,
        "ours": ours,
        "ours, not watched": partial(ours, flags=not_watched),
        "ours, one step a call": partial(ours, flags="--steps_per_execution 1"),
        "ours, bf16-mixed": partial(ours, flags="--trainer.precision bf16-mixed"),
    }
    if options.accelerator == "gpu":
        contestants["ours, CPU"] = partial(ours, flags="--trainer.accelerator cpu")
    turns({who: partial(train, small, 1) for who, train in contestants.items()}, 1)  # warm-up
    num_epochs = -(-options.steps // (reference.num_batches - 1))
    rows = turns({who: partial(train, reference, num_epochs) for who, train in contestants.items()}, options.rounds)
    for row in rows.values():
        row["images/s"], row["ms per 100 steps"] = 64e3 / row["median"], 100 * row["median"]
        row["/ ours"] = row["median"] / rows["ours"]["median"]
    return rows


def images_per_s(loader: Iterable[Batch], count: Callable[[Tensor], int] = len) -> float:
    start = time.perf_counter()
    return sum(count(x) for x, _ in loader) / (time.perf_counter() - start)


def loader(name: str, options: argparse.Namespace) -> Rows:
    """Images a second out of the loader alone, normalised, on the CPU, as they are or augmented."""
    reference = Reference(name, 300, "cpu", options.data_dir)
    samples, normalize = reference.samples, reference.normalize
    sampler = EpochBatchSampler(len(samples), 64, shuffle=True, batches_at_once=samples.batches_at_once(64))
    own = ResumableLoader(samples, batch_sampler=sampler, collate_fn=as_it_is)  # type: ignore[arg-type]  # a batch
    both = [transforms.RandomCrop(samples.inputs.shape[-1], padding=4), transforms.RandomHorizontalFlip()]
    runs = {
        "torchvision, plain": partial(images_per_s, reference.loader()),
        "ours, plain": partial(images_per_s, own, lambda x: len(normalize(x))),
        "torchvision, crop and flip": partial(images_per_s, reference.loader(augment=both)),
        "ours, crop and flip": partial(images_per_s, own, lambda x: len(normalize(crop_and_flip(x, 4, True)))),
    }
    ratios = [(f"ours, {kind}", f"torchvision, {kind}") for kind in ("plain", "crop and flip")]
    return turns(runs, options.rounds, ratios)


def growth(name: str, options: argparse.Namespace) -> Rows:
    """How ours grows with the batch size, images a second, and with the data, seconds."""
    reference, once, four_times = (Reference(name, num, options.accelerator) for num in (960, 150, 600))
    runs = {
        "batch 64, images/s": lambda: 64e3 / ours(reference, 1),
        "batch 1024, images/s": lambda: 1024e3 / ours(reference, 1, "--data.batch_size 1024"),
        "4 x the data": lambda: run_train(four_times.flags, "--trainer.max_epochs 2")["train_seconds"],
        "1 x": lambda: run_train(once.flags, "--trainer.max_epochs 2")["train_seconds"],
    }
    return turns(runs, min(3, options.rounds), [("4 x the data", "1 x")])


def decode(file: Path) -> None:
    read_image(file, (3, 32, 32))


def image_folder(name: str, options: argparse.Namespace) -> Rows:
    """Images a second out of folders of JPEG files, 256 x 256: decoding alone, the loader, training the CNN on them."""
    num_workers, generator = os.cpu_count() or 1, np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        for i in range(NUM_FILES):
            path = Path(folder, "train", str(i % 10), f"{i}.jpg")
            path.parent.mkdir(parents=True, exist_ok=True)
            small = Image.fromarray(generator.integers(0, 256, (32, 32, 3), dtype=np.uint8))
            small.resize((256, 256), Image.Resampling.BICUBIC).save(path, quality=90)
        Path(folder, "test").symlink_to("train")
        own = ["--config", str(CONFIGS / "cifar10_cnn.yaml"), "--data.data_dir", folder]
        flags = "--data project.data.image_folder.ImageFolder --data.image_shape [3,32,32] --data.val_fraction 0"
        flags += " --trainer.max_epochs 2 --trainer.accelerator cpu"
        data: Any = run.parse([*own, *flags.split()]).datamodule
        data.setup("fit")
        how: Any = {"batch_sampler": EpochBatchSampler(NUM_FILES, 64, shuffle=True), "collate_fn": as_it_is}
        loader = ResumableLoader(data.splits["train"], num_workers=num_workers, **how)

        def decoding() -> float:
            with multiprocessing.get_context("fork").Pool(num_workers) as pool:
                start = time.perf_counter()
                pool.map(decode, find_images([Path(folder, "train")])[0], chunksize=64)
                return NUM_FILES / (time.perf_counter() - start)

        def training() -> float:
            return 64e3 / run_train(own, flags)["step_ms"]

        runs: Any = {"decoding alone": decoding, "loader": partial(images_per_s, loader), "training": training}
        return turns(runs, options.rounds, [("loader", "decoding alone"), ("training", "decoding alone")])


PLAIN_SCRIPT = """
import torch, torchvision
from torch import nn
data = torchvision.datasets.FakeData(640, (1, 28, 28), 10, torchvision.transforms.ToTensor())
net = nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.Adam(net.parameters())
x, y = next(iter(torch.utils.data.DataLoader(data, 64, shuffle=True)))
loss = nn.functional.cross_entropy(net(x), torch.as_tensor(y))
optimizer.zero_grad(); loss.backward(); optimizer.step()
print("Epoch 1", flush=True)
"""


def launch(name: str, options: argparse.Namespace) -> Rows:
    """Seconds from the command to the end of the first training step, MNIST's network."""

    def first_step(*command: str) -> float:
        start = time.perf_counter()
        with subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True) as process:
            next(line for line in process.stdout or () if line.startswith("Epoch 1"))
            seconds = time.perf_counter() - start
            process.communicate()
        return seconds

    # Lightning says that the epoch is over after its validation
    flags = "--trainer.max_steps 1 --trainer.log_every_n_steps 1 --trainer.limit_val_batches 0"
    with tempfile.TemporaryDirectory() as folder:
        own = [str(Path(__file__).with_name("train.py")), *Reference("mnist", 10, "auto").flags, *flags.split()]
        own += ["--trainer.default_root_dir", folder]
        runs = {"plain script": partial(first_step, "-c", PLAIN_SCRIPT), "ours": partial(first_step, *own)}
        return turns(runs, options.rounds, [("ours", "plain script")])


SYSTEM = {"ms a step, batch 64": compare, "loader, images/s": loader, "growth": growth}
TABLES = {"mnist": SYSTEM, "cifar": SYSTEM, "folder": {"images/s": image_folder}, "launch": {"s": launch}}
COLUMNS = ("median", "min", "max", "images/s", "/ ours")


def main(args: Sequence[str] | None = None) -> dict[str, Any]:
    parser = ScriptParser(description=__doc__)
    parser.add_argument("--parts", nargs="+", choices=TABLES, default=list(TABLES), help="what to measure")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each contestant")
    parser.add_argument("--steps", type=int, default=1000, help="steps of a turn, at least")
    parser.add_argument("--data_dir", type=Path, help="the real MNIST and CIFAR-10; generated images unless given")
    parser.add_argument("--accelerator", choices=["cpu", "gpu"], default=FOUND, help="the GPU if there is one")
    parser.add_argument("--json", type=output_file, help="write the results to a file too")
    with short_errors():
        options = parser.parse_args(args)
        quiet_lightning()
        environment = {
            "date": time.strftime("%Y-%m-%d"),
            "processor": f"{os.cpu_count()} cores, {torch.backends.cpu.get_cpu_capability()}",
            "device": torch.cuda.get_device_name() if options.accelerator == "gpu" else "cpu",
            "python": sys.version.split()[0],
            **{module.__name__: module.__version__ for module in (torch, torchvision, lightning)},
        }
        print("\n".join(f"{name}: {value}" for name, value in environment.items()), end="\n\n")
        results: dict[str, Any] = {"environment": environment, "rounds": options.rounds, "steps": options.steps}
        for part in options.parts:
            for title, measure in TABLES[part].items():
                rows = results[f"{part}: {title}"] = measure(part, options)
                print(f"{f'{part}: {title}':<30}" + "".join(f"{column:>11}" for column in COLUMNS))
                for name, row in rows.items():
                    cells = (f"{row[column]:>11.4g}" if column in row else " " * 11 for column in COLUMNS)
                    print(f"  {name:<28}{''.join(cells)}")
                print(flush=True)
        if options.json:
            write_whole(options.json, json.dumps(results, indent=2) + "\n")
    return results


if __name__ == "__main__":
    from benchmark import main  # by the name under which train.py finds StepClock and Generated

    main()
