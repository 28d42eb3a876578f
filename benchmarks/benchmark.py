"""How fast training is, side by side with hand-written PyTorch and with Lightning as it is usually
written.

python benchmarks/benchmark.py                            # all of it on generated data, about 12
minutes on 2 cores
python benchmarks/benchmark.py --parts mnist --rounds 5 --json speed.json
python benchmarks/benchmark.py --markdown docs/speed.md   # the page of tables
python benchmarks/benchmark.py --parts mnist cifar --data_dir data            # the real images

Contestants of the parts mnist and cifar, with the same network, batch size and number of steps:

  tutorial       a plain loop over torchvision's dataset with per-sample transforms, no workers
  tutorial, N w  the same with the best number of worker processes
  stock, N w     Lightning's Trainer as it comes: that dataset, self.log and torchmetrics in each
  step, TensorBoard, bar plain module   the same module through train.py, over a stock DataLoader of
  a TensorDataset; then with several steps
                 a call, with the data in a BaseDataModule, with both
  own step       a subclass of ours whose training_step calls self.log, the rest as in the YAML
  raw            hand-tuned PyTorch: data on the device, fused optimiser, channels_last, no logs,
  threads as in ours ours           the shipped YAML through train.py, with logging, bar and
  checkpoints; the rows below change one thing

They take turns in every round. A step's time is that between the first and the last call of an
epoch, without what an epoch or a validation costs once.
"""

import argparse
import contextlib
import io
import json
import multiprocessing
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import lightning
import numpy as np
import torch
import torchvision
from contestants import CONFIGS, Reference, StepClock, ours, plain, raw, run_train, stock, tutorial
from PIL import Image
from torch import Tensor
from torchvision import transforms

from lightbase.cli.script import ScriptParser, output_file, short_errors, starting
from lightbase.compat import quiet_lightning
from lightbase.data.batches import Batch, EpochBatchSampler, ResumableLoader, as_it_is
from lightbase.data.images import find_images, read_image
from lightbase.data.transforms import crop_and_flip
from lightbase.folder import write_whole
from lightbase.run import train as run
from lightbase.run.record import source

NUM_FILES = 4000
FOUND = "gpu" if torch.cuda.is_available() else "cpu"
TRAIN = str(Path(__file__).parents[1] / "scripts" / "train.py")
NOT_WATCHED = "--device_monitor false --step_timer false --figures_every_n_epochs 0"
COMPILED = "--model.compile_net inductor"
GRAPHS = f"{COMPILED} --model.compile_mode reduce-overhead"  # CUDA graphs
Rows = dict[str, dict[str, float]]


def turns(
    runs: Mapping[str, Callable[[], Any]], rounds: int, ratios: Sequence[tuple[str, str]] = ()
) -> Rows:
    """What the runs return, which take turns in every round; ratios: of the medians of two of
    them."""
    values: dict[str, list[float]] = {name: [] for name in runs}
    nowhere = io.StringIO()  # bars and lines are made, but not seen
    for _ in range(rounds):
        for name, measure in runs.items():
            with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
                values[name].append(measure())
    rows = {
        name: {"median": statistics.median(v), "min": min(v), "max": max(v)}
        for name, v in values.items()
    }
    return rows | {
        f"{a} / {b}": {"median": rows[a]["median"] / rows[b]["median"]} for a, b in ratios
    }


Contestant = Callable[[Reference, int], float]


def contestants(accelerator: str, tried: Mapping[int, float]) -> dict[str, Contestant]:
    """tried: milliseconds of a tutorial's step by number of workers."""
    num_workers, faster = (
        min((num for num in tried if num), key=tried.__getitem__),
        min(tried, key=tried.__getitem__),
    )
    several = "--steps_per_execution 20"
    found: dict[str, Contestant] = {
        "tutorial": tutorial,
        f"tutorial, {num_workers} w": partial(tutorial, num_workers=num_workers),
        f"stock, {faster} w": partial(stock, num_workers=faster),
        "plain module": plain,
        "plain module, 20 steps a call": partial(plain, flags=several),
        "plain module, our data": partial(plain, data="Generated"),
        "plain module, both": partial(plain, data="Generated", flags=several),
        "own step": partial(ours, flags="--model contestants.OwnStep"),
        "raw": raw,
        "ours": ours,
        "ours, not watched": partial(ours, flags=NOT_WATCHED),
        "ours, one step a call": partial(ours, flags="--steps_per_execution 1"),
        "ours, bf16-mixed": partial(ours, flags="--trainer.precision bf16-mixed"),
    }
    if accelerator == "gpu":
        found |= {
            "raw, compiled": partial(raw, compile_mode="reduce-overhead"),
            "ours, compiled": partial(ours, flags=GRAPHS),
            "ours, compiled, bf16-mixed": partial(
                ours, flags=f"{GRAPHS} --trainer.precision bf16-mixed"
            ),
            "ours, not resident": partial(ours, flags="--data.resident false"),
            "ours, CPU": partial(ours, flags="--trainer.accelerator cpu"),
        }
    return found


def compare(name: str, options: argparse.Namespace) -> Rows:
    """Milliseconds a step."""
    num_steps = (
        options.steps if name == "mnist" or options.accelerator == "gpu" else -(-options.steps // 5)
    )
    reference = Reference(name, num_steps + 1, options.accelerator, options.data_dir)
    small = Reference(name, 60, options.accelerator, options.data_dir)
    counts = [0, *(2**i for i in range((os.cpu_count() or 1).bit_length()))]
    competing = contestants(options.accelerator, {num: tutorial(small, 1, num) for num in counts})
    turns({who: partial(train, small, 1) for who, train in competing.items()}, 1)  # warm-up
    num_epochs = -(-num_steps // (reference.num_batches - 1))
    rows = turns(
        {who: partial(train, reference, num_epochs) for who, train in competing.items()},
        options.rounds,
    )
    for row in rows.values():
        row["images/s"], row["/ ours"] = (
            64e3 / row["median"],
            row["median"] / rows["ours"]["median"],
        )
    return rows | {"ours / raw": {"median": rows["ours"]["median"] / rows["raw"]["median"]}}


def images_per_s(loader: Iterable[Batch], count: Callable[[Tensor], int] = len) -> float:
    start = time.perf_counter()
    return sum(count(x) for x, _ in loader) / (time.perf_counter() - start)


def loader(name: str, options: argparse.Namespace) -> Rows:
    """Images a second out of the loader alone, normalised, on the CPU, as they are or augmented."""
    reference = Reference(name, 300, "cpu", options.data_dir)
    samples, normalize = reference.samples, reference.normalize
    sampler = EpochBatchSampler(
        len(samples), 64, shuffle=True, batches_at_once=samples.batches_at_once(64)
    )
    # a batch
    own = ResumableLoader(samples, batch_sampler=sampler, collate_fn=as_it_is)  # type: ignore[arg-type]
    both = [
        transforms.RandomCrop(samples.inputs.shape[-1], padding=4),
        transforms.RandomHorizontalFlip(),
    ]
    runs = {
        "torchvision, plain": partial(images_per_s, reference.loader()),
        "ours, plain": partial(images_per_s, own, lambda x: len(normalize(x))),
        "torchvision, crop and flip": partial(images_per_s, reference.loader(augment=both)),
        "ours, crop and flip": partial(
            images_per_s, own, lambda x: len(normalize(crop_and_flip(x, 4, True)))
        ),
    }
    ratios = [(f"ours, {kind}", f"torchvision, {kind}") for kind in ("plain", "crop and flip")]
    return turns(runs, options.rounds, ratios)


def batch_size(name: str, options: argparse.Namespace) -> Rows:
    """Images a second of ours."""
    reference = Reference(
        name, 960 if name == "mnist" else 320, options.accelerator
    )  # several calls of large batches
    runs = {
        "batch 64": lambda: 64e3 / ours(reference, 1),
        "batch 1024": lambda: 1024e3 / ours(reference, 1, "--data.batch_size 1024"),
    }
    return turns(runs, options.rounds, [("batch 1024", "batch 64")])


def growth(name: str, options: argparse.Namespace) -> Rows:
    """Seconds an epoch of ours by the size of the data, with all that an epoch costs, and what each
    further sample costs, without; milliseconds a step by the number of classes."""
    num = 60 if name == "mnist" else 12  # batches
    references = {times: Reference(name, times * num, options.accelerator) for times in (1, 4, 16)}

    def epoch(times: int) -> float:
        ours(references[times], 4)
        return StepClock.newest.epoch_seconds

    def step(classes: int) -> float:
        net = f"--model.net.sizes [784,128,{classes}]" if name == "mnist" else ""
        return ours(references[16], 1, f"--data.of_classes {classes} {net}")

    rows = turns(
        {f"{times} x the data, s": partial(epoch, times) for times in references}, options.rounds
    )
    for fewer, more in ((1, 4), (4, 16)):
        seconds = rows[f"{more} x the data, s"]["median"] - rows[f"{fewer} x the data, s"]["median"]
        rows[f"{fewer} to {more} x, µs a sample"] = {
            "median": 1e6 * seconds / (64 * num * (more - fewer))
        }
    first, second = (row["median"] for label, row in rows.items() if "µs" in label)
    rows["second / first"] = {"median": second / first}
    by_classes = {
        f"{classes} classes, ms a step": partial(step, classes) for classes in (2, 10, 100)
    }
    return rows | turns(
        by_classes, options.rounds, [("100 classes, ms a step", "2 classes, ms a step")]
    )


def compiled(name: str, options: argparse.Namespace) -> Rows:
    """What `--model.compile_net inductor` brings on this device, and how long training waits for
    it."""
    if FOUND == "cpu" and not shutil.which("g++"):
        return {}
    reference = Reference(name, 400 if name == "mnist" else 100, options.accelerator)
    flags = {"ours": "", "ours, compiled": COMPILED}

    def first_call(flag: str) -> float:
        start = time.perf_counter()
        ours(reference, 1, flag)
        return StepClock.newest.marks[0][0] - start

    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=folder),
    ):
        rows = turns(
            {
                f"{who}, s to the first steps": partial(first_call, flag)
                for who, flag in flags.items()
            },
            1,
        )
        runs = {
            f"{who}, ms a step": partial(ours, reference, 1, flag) for who, flag in flags.items()
        }
        return rows | turns(
            runs, options.rounds, [("ours, compiled, ms a step", "ours, ms a step")]
        )


def decode(file: Path) -> None:
    read_image(file, (3, 32, 32))


def image_folder(name: str, options: argparse.Namespace) -> Rows:
    """Images a second out of folders of JPEG files, 256 x 256: decoding alone, the loader, training
    the CNN on them."""
    num_workers, generator = os.cpu_count() or 1, np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        for i in range(NUM_FILES):
            path = Path(folder, "train", str(i % 10), f"{i}.jpg")
            path.parent.mkdir(parents=True, exist_ok=True)
            small = Image.fromarray(generator.integers(0, 256, (32, 32, 3), dtype=np.uint8))
            small.resize((256, 256), Image.Resampling.BICUBIC).save(path, quality=90)
        Path(folder, "test").symlink_to("train")
        own = ["--config", str(CONFIGS / "cifar10_cnn.yaml"), "--data.data_dir", folder]
        flags = (
            "--data lightbase.data.images.ImageFolder --data.image_shape [3,32,32] "
            "--data.val_fraction 0"
        )
        flags += " --trainer.max_epochs 2 --trainer.accelerator cpu"
        data: Any = run.parse([*own, *flags.split()]).datamodule
        data.setup("fit")
        how: Any = {
            "batch_sampler": EpochBatchSampler(NUM_FILES, 64, shuffle=True),
            "collate_fn": as_it_is,
        }
        loader = ResumableLoader(data.splits["train"], num_workers=num_workers, **how)

        def decoding() -> float:
            with multiprocessing.get_context("fork").Pool(num_workers) as pool:
                start = time.perf_counter()
                pool.map(decode, find_images([Path(folder, "train")])[0], chunksize=64)
                return NUM_FILES / (time.perf_counter() - start)

        def training() -> float:
            return 64e3 / run_train(own, flags)["step_ms"]

        runs: Any = {
            "decoding alone": decoding,
            "loader": partial(images_per_s, loader),
            "training": training,
        }
        return turns(
            runs, options.rounds, [("loader", "decoding alone"), ("training", "decoding alone")]
        )


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
        with subprocess.Popen(
            [sys.executable, *command], stdout=subprocess.PIPE, text=True
        ) as process:
            next(line for line in process.stdout or () if line.startswith("Epoch 1"))
            seconds = time.perf_counter() - start
            process.communicate()
        return seconds

    # Lightning says that the epoch is over after its validation
    flags = "--trainer.max_steps 1 --trainer.log_every_n_steps 1 --trainer.limit_val_batches 0"
    with tempfile.TemporaryDirectory() as folder:
        own = [
            TRAIN,
            *Reference("mnist", 10, "auto").flags,
            *flags.split(),
            "--trainer.default_root_dir",
            folder,
        ]
        runs = {
            "plain script": partial(first_step, "-c", PLAIN_SCRIPT),
            "ours": partial(first_step, *own),
        }
        return turns(runs, max(5, options.rounds), [("ours", "plain script")])


PEAK = """
import re, sys
from pathlib import Path
from lightbase.run.train import main
main(sys.argv[1:])
# what the process itself had; resource.getrusage also counts that which started it
status = Path("/proc/self/status").read_text().expandtabs()
print("peak", re.search("VmHWM: *([0-9]+) kB", status)[1])
"""


def memory(name: str, options: argparse.Namespace) -> Rows:
    """Peak MiB of a run on images in the shape of MNIST's, a tenth of them for validation; on
    Linux."""

    def peak(num_batches: int) -> float:
        flags = [*Reference("mnist", 10, "cpu").flags, "--data.num_train", str(64 * num_batches)]
        flags += [
            "--data.val_fraction",
            "0.1",
            "--trainer.max_steps",
            "100",
            "--trainer.limit_val_batches",
            "100",
        ]
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-c", PEAK, *flags, "--trainer.default_root_dir", folder]
            how: Any = {
                "cwd": Path(__file__).parent,
                "capture_output": True,
                "text": True,
                "check": True,
            }
            return int(subprocess.run(command, **how).stdout.split()[-1]) / 1024

    if sys.platform != "linux":
        return {}
    few, many = 150, options.memory_batches
    rows = turns(
        {f"{64 * few:,} images": partial(peak, few), f"{64 * many:,} images": partial(peak, many)},
        1,
    )
    less, more = (row["median"] for row in rows.values())
    mib = 64 * (many - few) * (28 * 28 + 8) / 2**20  # with the target, int64
    return rows | {
        "the images between them": {"median": mib},
        "per byte of them": {"median": (more - less) / mib},
    }


SYSTEM = {
    "ms a step, batch 64": compare,
    "loader, images/s": loader,
    "batch size, images/s": batch_size,
    "growth": growth,
    "compiled": compiled,
}
TABLES = {
    "mnist": SYSTEM,
    "cifar": SYSTEM,
    "folder": {"images/s": image_folder},
    "launch": {"s": launch},
}
TABLES["memory"] = {"MiB at the peak": memory}
COLUMNS = ("median", "min", "max", "images/s", "/ ours")


def text_table(title: str, rows: Rows) -> str:
    lines = [f"{title:<34}" + "".join(f"{column:>11}" for column in COLUMNS)]
    for name, row in rows.items():
        cells = (f"{row[column]:>11.4g}" if column in row else " " * 11 for column in COLUMNS)
        lines.append(f"  {name:<32}{''.join(cells)}")
    return "\n".join(lines) + "\n"


def number(value: float) -> str:
    """Three digits that count: 1.19, 35.5, 62,300."""
    digits = max(0, 2 - int(np.floor(np.log10(abs(value) or 1))))
    return f"{round(value, 2 - int(np.floor(np.log10(abs(value) or 1)))):,.{digits}f}"


def markdown_table(title: str, rows: Rows) -> str:
    """Medians, with the lowest and the highest behind them."""
    extra = [column for column in COLUMNS[3:] if any(column in row for row in rows.values())]
    lines = [f"| {' | '.join([title, '', *extra])} |", f"|{'---|' * (2 + len(extra))}"]
    for name, row in rows.items():
        spread = f" ({number(row['min'])} to {number(row['max'])})" if "min" in row else ""
        cells = [number(row[column]) if column in row else "" for column in extra]
        lines.append(f"| {' | '.join([name, number(row['median']) + spread, *cells])} |")
    return "\n".join(lines) + "\n"


def environment(accelerator: str) -> dict[str, str]:
    info = Path("/proc/cpuinfo")
    names = [
        line.partition(": ")[2]
        for line in info.read_text().splitlines()
        if line.startswith("model name")
    ]
    name = names[0] if names else platform.processor()
    commit, changes = source()
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": f"{commit}{', changed' if changes else ''}",
        "processor": f"{os.cpu_count()} cores of {name}, {torch.backends.cpu.get_cpu_capability()}",
        "device": torch.cuda.get_device_name() if accelerator == "gpu" else "cpu",
        "python": platform.python_version(),
        **{module.__name__: module.__version__ for module in (torch, torchvision, lightning)},
    }


def main(args: Sequence[str] | None = None) -> dict[str, Any]:
    parser = ScriptParser(description=__doc__)
    parser.add_argument(
        "--parts", nargs="+", choices=TABLES, default=list(TABLES), help="what to measure"
    )
    parser.add_argument("--rounds", type=int, default=3, help="turns of each contestant")
    parser.add_argument(
        "--steps",
        type=int,
        default=1000,
        help="steps of a turn, at least; a fifth for CIFAR-10 on a CPU",
    )
    parser.add_argument(
        "--data_dir", type=Path, help="the real MNIST and CIFAR-10; generated images unless given"
    )
    parser.add_argument(
        "--accelerator", choices=["cpu", "gpu"], default=FOUND, help="the GPU if there is one"
    )
    parser.add_argument(
        "--memory_batches", type=int, default=15_000, help="of the larger run of the part memory"
    )
    parser.add_argument("--json", type=output_file, help="write the results to a file too")
    parser.add_argument("--markdown", type=output_file, help="write the tables to a file too")
    with short_errors():
        options = parser.parse_args(args)
        quiet_lightning()
        found = environment(options.accelerator)
        print("\n".join(f"{name}: {value}" for name, value in found.items()), end="\n\n")
        results: dict[str, Any] = {
            "environment": found,
            "rounds": options.rounds,
            "steps": options.steps,
        }
        words = ", ".join(f"{name} {value}" for name, value in found.items())
        own_args = " ".join(
            ["python benchmarks/benchmark.py", *(sys.argv[1:] if args is None else args)]
        )
        how = (
            f"Median (lowest to highest) of {options.rounds} rounds; images generated "
            "unless --data_dir is given."
        )
        page = [
            "# Speed\n",
            f"Written by `{own_args}`, {options.steps} steps a turn: {words}. {how}\n",
        ]
        start = time.monotonic()
        for part in options.parts:
            for title, measure in TABLES[part].items():
                rows = results[f"{part}: {title}"] = measure(part, options)
                print(text_table(f"{part}: {title}", rows), flush=True)
                page.append(markdown_table(f"{part}: {title}", rows))
        results["minutes"] = (time.monotonic() - start) / 60
        print(f"{results['minutes']:.1f} minutes")
        if options.json:
            write_whole(options.json, json.dumps(results, indent=2) + "\n")
        if options.markdown:
            write_whole(
                options.markdown,
                "\n".join([*page, f"{results['minutes']:.1f} minutes in all."]) + "\n",
            )
    return results


if __name__ == "__main__":
    with starting(__file__, default_model="project.classifier.Classifier"):
        main()
