"""Measure the speed of training, beside other ways to train the same network.

    python benchmarks/benchmark.py                  # all parts, about 6 minutes on 2 cores
    python benchmarks/benchmark.py --parts mnist --rounds 5
    python benchmarks/benchmark.py > docs/speed.md  # the tables are Markdown

These contestants train one network, in batches of 64, on the same generated images:

  tutorial      a plain loop over torchvision's dataset, with transforms per sample
  stock         the same dataset in Lightning's Trainer, with self.log and torchmetrics in each step
  plain module  the same module through train.py, over a DataLoader of a TensorDataset
  raw           hand-tuned PyTorch without logs: data on the device, fused optimizer, channels_last
  ours          the shipped YAML through train.py, with logs, progress bar and checkpoints

"2 w" means two worker processes. Contestants take turns in every round. The time of a step does
not include what an epoch costs once. The part launch is the time to the end of the first step.
"""

import argparse
import contextlib
import io
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

import lightning
import torch
import torchvision
from contestants import Reference, ours, plain, raw, stock, tutorial
from torch import Tensor
from torchvision import transforms

from lightbase.cli.script import starting
from lightbase.compat import quiet_lightning
from lightbase.data.transforms import crop_and_flip

HERE = Path(__file__).parent
GRAPHS = "--model.compile_net inductor --model.compile_mode reduce-overhead"  # CUDA graphs
NOT_WATCHED = "--device_monitor false --step_timer false --figures_every_n_epochs 0"

Rows = dict[str, list[float]]  # the values of all rounds, by contestant
Contestant = Callable[[Reference], float]


def measure(contestants: Mapping[str, Callable[[], float]], rounds: int) -> Rows:
    """Call all contestants in turn, `rounds` times. What they print is not shown."""
    rows: Rows = {name: [] for name in contestants}
    output = io.StringIO()
    for _ in range(rounds):
        for name, contestant in contestants.items():
            with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
                rows[name].append(contestant())
    return rows


def add_ratio(rows: Rows, a: str, b: str) -> None:
    rows[f"{a} / {b}"] = [statistics.median(rows[a]) / statistics.median(rows[b])]


def contestants(accelerator: str) -> dict[str, Contestant]:
    workers = os.cpu_count() or 1
    by_name: dict[str, Contestant] = {
        "tutorial": tutorial,
        f"tutorial, {workers} w": partial(tutorial, num_workers=workers),
        "stock, 0 w": stock,
        f"stock, {workers} w": partial(stock, num_workers=workers),
        "plain module": plain,
        "plain module, 20 steps a call": partial(plain, num_steps=20),
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


def compare(name: str, options: argparse.Namespace) -> Rows:
    """Milliseconds a step."""
    competing = contestants(options.accelerator)
    warm_up = Reference(name, 60, options.accelerator)
    measure({who: partial(train, warm_up) for who, train in competing.items()}, 1)
    # on a CPU the CNN needs some 30 ms for a step
    is_slow = name == "cifar" and options.accelerator == "cpu"
    num_steps = options.steps // 5 if is_slow else options.steps
    reference = Reference(name, num_steps + 1, options.accelerator)
    rows = measure(
        {who: partial(train, reference) for who, train in competing.items()}, options.rounds
    )
    add_ratio(rows, "ours", "raw")
    for other in ("tutorial", "stock, 0 w", "plain module"):
        add_ratio(rows, other, "ours")
    return rows


def images_per_s(batches: Iterable[Tensor]) -> float:
    start = time.perf_counter()
    num_images = sum(len(images) for images in batches)
    return num_images / (time.perf_counter() - start)


def loader(name: str, options: argparse.Namespace) -> Rows:
    """Images a second of the loaders alone, cropped, mirrored and normalised, on the CPU."""
    reference = Reference(name, 300, "cpu")
    data = reference.data
    data.trainer = reference.cli.make_trainer(logger=False)
    data.setup("fit")
    tensors = data.train_dataloader()
    crop = transforms.RandomCrop(reference.images.shape[-1], padding=4)
    files = reference.torchvision_loader(augment=[crop, transforms.RandomHorizontalFlip()])
    competing = {
        "torchvision": lambda: images_per_s(x for x, _ in files),
        "ours": lambda: images_per_s(data.normalize(crop_and_flip(x, 4, True)) for x, _ in tensors),
    }
    rows = measure(competing, options.rounds)
    add_ratio(rows, "ours", "torchvision")
    return rows


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
        program = [sys.executable, *command]
        with subprocess.Popen(program, cwd=HERE, stdout=subprocess.PIPE, text=True) as process:
            next(line for line in process.stdout or () if line.startswith("Epoch 1"))
            seconds = time.perf_counter() - start
            process.communicate()
        return seconds

    # without a validation, after which the line of an epoch is printed
    flags = "--trainer.max_steps 1 --trainer.log_every_n_steps 1 --trainer.limit_val_batches 0"
    with tempfile.TemporaryDirectory() as folder:
        experiment = [*Reference("mnist", 10, "auto").flags, *flags.split()]
        train = [str(HERE.parent / "scripts" / "train.py"), *experiment]
        commands = {
            "plain script": partial(first_step, "-c", PLAIN_SCRIPT),
            "ours": partial(first_step, *train, "--trainer.default_root_dir", folder),
        }
        rows = measure(commands, options.rounds)
    add_ratio(rows, "ours", "plain script")
    return rows


PARTS = {
    "mnist": {"ms a step, batch 64": compare, "loader, images/s": loader},
    "cifar": {"ms a step, batch 64": compare, "loader, images/s": loader},
    "launch": {"s": launch},
}


def number(value: float) -> str:
    """Three digits: 1.19, 35.5, 62,300."""
    return f"{float(f'{value:.3g}'):,.9g}"


def markdown_table(title: str, rows: Rows) -> str:
    lines = [f"| {title} |  |", "|---|---|"]
    for name, values in rows.items():
        spread = f" ({number(min(values))} to {number(max(values))})" if len(values) > 1 else ""
        lines.append(f"| {name} | {number(statistics.median(values))}{spread} |")
    return "\n".join(lines) + "\n"


def environment(accelerator: str) -> str:
    info = Path("/proc/cpuinfo")
    models = re.findall(r"model name\s*: (.*)", info.read_text()) if info.exists() else []
    processor = f"{os.cpu_count()} cores of {models[0] if models else platform.processor()}"
    device = torch.cuda.get_device_name() if accelerator == "gpu" else "cpu"
    git = ["git", "-C", str(HERE), "describe", "--always", "--dirty", "--abbrev=40"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    modules = (torch, torchvision, lightning)
    packages = ", ".join(f"{module.__name__} {module.__version__}" for module in modules)
    return f"{time.strftime('%Y-%m-%d')}, commit {commit}, {processor}, device {device}, {packages}"


def main(args: Sequence[str] | None = None) -> None:
    best = "gpu" if torch.cuda.is_available() else "cpu"
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--rounds", type=int, default=3, help="turns of each contestant")
    parser.add_argument("--steps", type=int, default=1000, help="a fifth for CIFAR-10 on a CPU")
    parser.add_argument("--accelerator", choices=["cpu", "gpu"], default=best)
    options = parser.parse_args(args)
    quiet_lightning()
    command = f"python benchmarks/benchmark.py --rounds {options.rounds} --steps {options.steps}"
    print(f"# Speed\n\nWritten by `{command}`: {environment(options.accelerator)}.")
    print("Median (lowest to highest) of the rounds.\n", flush=True)
    for part in options.parts:
        for title, function in PARTS[part].items():
            print(markdown_table(f"{part}: {title}", function(part, options)), flush=True)


if __name__ == "__main__":
    with starting(__file__, default_model="project.classifier.Classifier"):
        main()
