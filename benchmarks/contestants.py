"""Who competes in benchmark.py: the same network, batch size and number of steps, trained in other
people's ways."""

import copy
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import lightning
import numpy as np
import torch
import torchmetrics
import torchvision
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchvision import transforms

from lightbase.curves import MayMissSteps
from lightbase.data.batches import Batch
from lightbase.data.module import BaseDataModule
from lightbase.data.transforms import to_float
from lightbase.devices.devices import cpu_threads
from lightbase.run import train as run
from project.classifier import Classifier

CONFIGS = Path(__file__).parents[1] / "configs"


class Generated(BaseDataModule):
    """Random images in the shape of MNIST's or CIFAR-10's: speed does not depend on what they
    show."""

    image_shape: tuple[int, int, int]

    def __init__(
        self, image_shape: tuple[int, int, int], num_train: int, of_classes: int = 10, **kwargs
    ) -> None:
        super().__init__(**kwargs)
        self.image_shape = image_shape
        self.classes = [str(i) for i in range(of_classes)]
        self.num = {"train": num_train, "test": 10_000}

    def load(self, split: Literal["train", "test"]) -> Batch:
        generator = torch.Generator().manual_seed(0)
        images = torch.empty(self.num[split], *self.image_shape, dtype=torch.uint8).random_(
            generator=generator
        )
        return images, torch.randint(len(self.classes), (self.num[split],), generator=generator)

    def normalize(self, inputs: Tensor) -> Tensor:
        return to_float(inputs, 0.5, 0.5) if self.image_shape[0] == 1 else to_float(inputs)


class Reference:
    """One of the two reference systems, as its YAML has it, with `num_batches` batches of 64 images
    at most."""

    def __init__(
        self, name: str, num_batches: int, accelerator: str, data_dir: Path | None = None
    ) -> None:
        self.is_mnist = name == "mnist"
        self.device = torch.device("cuda" if accelerator == "gpu" else "cpu")
        config, shape = (
            ("mnist_mlp", "[1,28,28]") if self.is_mnist else ("cifar10_cnn", "[3,32,32]")
        )
        self.flags = [
            "--config",
            str(CONFIGS / f"{config}.yaml"),
            "--trainer.accelerator",
            accelerator,
        ]
        generated = (
            f"--data contestants.Generated --data.image_shape {shape} "
            f"--data.num_train {64 * num_batches}"
        )
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
        return getattr(torch.optim, self.cli.model.optimizer)(
            net.parameters(), lr=self.cli.model.lr, **options
        )

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
        options: Any = {
            "pin_memory": self.device.type == "cuda",
            "persistent_workers": num_workers > 0,
        }
        return DataLoader(
            dataset, 64, shuffle=True, drop_last=True, num_workers=num_workers, **options
        )


class StepClock(MayMissSteps):
    """Times the steps of a training loop, Lightning's as a callback; `StepClock.newest` is that of
    the last run."""

    newest: "StepClock"

    def __init__(self) -> None:
        self.marks: list[
            tuple[float, int]
        ] = []  # seconds, steps made: after the first and last call of each epoch
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

    @property
    def epoch_seconds(self) -> float:
        """From the end of the first epoch to that of the last, with what lies between epochs."""
        ends = [seconds for seconds, _ in self.marks[1::2]]
        return (ends[-1] - ends[0]) / (len(ends) - 1)

    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, *args: Any
    ) -> None:
        self.tick(trainer.global_step, trainer.is_last_batch)


# by hand


def tutorial(reference: Reference, num_epochs: int, num_workers: int = 0) -> float:
    return plain_loop(
        reference, num_epochs, reference.net(), partial(iter, reference.loader(num_workers))
    )


def raw(reference: Reference, num_epochs: int, compile_mode: str | None = None) -> float:
    """compile_mode: of torch.compile; "reduce-overhead" launches forward and backward as CUDA
    graphs, with torch's own care for streams and memory. Its optimiser stays one fused kernel
    outside of them."""
    samples = reference.samples.to(reference.device)
    layout: Any = torch.contiguous_format if reference.is_mnist else torch.channels_last

    def batches() -> Iterator[Batch]:
        for index in torch.randperm(len(samples), device=reference.device).split(64):
            yield (
                reference.normalize(samples.inputs[index]).contiguous(memory_format=layout),
                samples.targets[index],
            )

    net = reference.net().to(memory_format=layout)
    # networks of earlier runs count as variants of this one, of which it takes eight
    torch.compiler.reset()
    if compile_mode:
        net.compile(mode=compile_mode)
    with cpu_threads(reference.cli.config.num_threads):
        return plain_loop(reference, num_epochs, net, batches, fused=True)


def plain_loop(
    reference: Reference, num_epochs: int, net: Any, batches: Any, **options: Any
) -> float:
    optimizer, clock = reference.optimizer(net, **options), StepClock()
    for _ in range(num_epochs):
        for step, (x, y) in enumerate(batches(), 1):
            x, y = (
                x.to(reference.device, non_blocking=True),
                y.to(reference.device, non_blocking=True),
            )
            loss = nn.functional.cross_entropy(net(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            clock.tick(step, step == reference.num_batches)
    return clock.step_ms


# in Lightning


class PlainModule(lightning.LightningModule):
    """As Lightning's own pages write it: loss and accuracy by self.log in every step."""

    def __init__(self, net: nn.Module, optimizer: str = "Adam", lr: float = 0.001) -> None:
        super().__init__()
        self.net, self.optimizer, self.lr = net, optimizer, lr
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
        return getattr(torch.optim, self.optimizer)(self.parameters(), lr=self.lr)


class PlainData(lightning.LightningDataModule):
    """A stock DataLoader over a TensorDataset of floats, normalised once."""

    def __init__(self, image_shape: tuple[int, int, int], num_train: int) -> None:
        super().__init__()
        data = Generated(image_shape, num_train)
        images, targets = data.load("train")
        self.dataset = TensorDataset(data.normalize(images), targets)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.dataset, batch_size=64, shuffle=True, drop_last=True)


class OwnStep(Classifier):
    """Ours, with a training_step in the common style."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x, y = batch
        loss = self.criterion(self.net(x), y)
        self.log("train_loss", loss, prog_bar=True)
        return loss


def stock(reference: Reference, num_epochs: int, num_workers: int = 0) -> float:
    """Lightning's Trainer as it comes, over torchvision's dataset."""
    with tempfile.TemporaryDirectory() as folder:
        options: Any = {
            "accelerator": reference.device.type,
            "devices": 1,
            "enable_model_summary": False,
        }
        trainer = lightning.Trainer(
            max_epochs=num_epochs, callbacks=[StepClock()], default_root_dir=folder, **options
        )
        module = PlainModule(reference.net(), reference.cli.model.optimizer, reference.cli.model.lr)
        trainer.fit(module, reference.loader(num_workers))
    return StepClock.newest.step_ms


# through train.py


def plain(reference: Reference, num_epochs: int, data: str = "PlainData", flags: str = "") -> float:
    """PlainModule on generated images, of PlainData or Generated."""
    if reference.is_mnist:
        own = "--model.net project.models.mlp.MLP --model.net.sizes [784,128,10] --num_threads 1"
    else:
        own = "--model.net project.models.cnn.CIFAR10CNN --model.optimizer SGD --model.lr 0.01"
    shape = "[1,28,28]" if reference.is_mnist else "[3,32,32]"
    own += (
        f" --data contestants.{data} --data.image_shape {shape} --data.num_train "
        f"{64 * reference.num_batches}"
    )
    own += " --data.val_fraction 0" if data == "Generated" else ""
    own += f" --trainer.accelerator {'gpu' if reference.device.type == 'cuda' else 'cpu'}"
    experiment = ["--model", "contestants.PlainModule", *own.split()]
    return run_train(experiment, f"--trainer.max_epochs {num_epochs} {flags}")["step_ms"]


def ours(reference: Reference, num_epochs: int, flags: str = "") -> float:
    return run_train(reference.flags, f"--trainer.max_epochs {num_epochs} {flags}")["step_ms"]


def run_train(experiment: Sequence[str], flags: str) -> dict[str, Any]:
    """What metrics.json holds, and step_ms; without a validation and a test."""
    torch.compiler.reset()  # as above
    flags += (
        " --trainer.limit_val_batches 0 --trainer.limit_test_batches 0 "
        "--trainer.enable_progress_bar true"
    )
    with tempfile.TemporaryDirectory() as folder:
        own = ["--trainer.default_root_dir", folder, "--trainer.callbacks", "contestants.StepClock"]
        return run.main([*experiment, *own, *flags.split()]) | {"step_ms": StepClock.newest.step_ms}
