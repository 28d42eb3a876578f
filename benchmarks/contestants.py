"""Who competes in benchmark.py: ways to train one network on the same images.

Each contestant trains one epoch and returns the milliseconds of a step.
"""

import copy
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, cast

import torch
import torchmetrics
import torchvision
from lightning import LightningDataModule, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchvision import transforms

from lightbase import BaseDataModule, Batch, MayMissSteps
from lightbase.data.transforms import to_float
from lightbase.devices.devices import cpu_threads
from lightbase.run import train

CONFIGS = Path(__file__).parents[1] / "configs"
BATCH_SIZE = 64


class Generated(BaseDataModule):
    """Random images in the shape of MNIST or CIFAR-10. The speed does not depend on the content."""

    def __init__(self, image_shape: tuple[int, int, int], num_train: int, **kwargs: Any) -> None:
        super().__init__(val_fraction=0, **kwargs)
        self.image_shape = image_shape
        self.classes = [str(i) for i in range(10)]
        self.num_train = num_train

    def load(self, split: Literal["train", "test"]) -> Batch:
        generator = torch.Generator().manual_seed(0)
        num = self.num_train if split == "train" else 10_000
        shape = (num, *(self.image_shape or ()))
        images = torch.randint(256, shape, dtype=torch.uint8, generator=generator)
        return images, torch.randint(10, (num,), generator=generator)

    def normalize(self, inputs: Tensor) -> Tensor:
        return to_float(inputs, 0.5, 0.5) if inputs.shape[1] == 1 else to_float(inputs)


class Reference:
    """Network, optimizer and flags of a shipped YAML, with `num_batches` batches of images."""

    def __init__(self, name: str, num_batches: int, accelerator: str) -> None:
        self.is_mnist = name == "mnist"
        self.num_batches = num_batches
        self.device = torch.device("cuda" if accelerator == "gpu" else "cpu")
        config = "mnist_mlp.yaml" if self.is_mnist else "cifar10_cnn.yaml"
        shape = "[1,28,28]" if self.is_mnist else "[3,32,32]"
        size = f"--data.image_shape {shape} --data.num_train {BATCH_SIZE * num_batches}"
        self.size_flags = ["--trainer.accelerator", accelerator, *size.split()]
        self.flags = ["--config", str(CONFIGS / config), "--data", "contestants.Generated"]
        self.flags += self.size_flags
        self.cli = train.parse(self.flags)
        self.model: Any = self.cli.model
        self.data = cast(Generated, self.cli.datamodule)
        self.images, self.targets = self.data.load("train")

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
        normalize = [transforms.Normalize((0.5,), (0.5,))] if self.is_mnist else []
        dataset.transform = transforms.Compose([*augment, transforms.ToTensor(), *normalize])
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


# loops by hand


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


# Lightning as its pages show it


class PlainModule(LightningModule):
    """Loss and accuracy by self.log in every step."""

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


class PlainData(LightningDataModule):
    """A DataLoader of a TensorDataset of floats, which are normalised once."""

    def __init__(self, image_shape: tuple[int, int, int], num_train: int) -> None:
        super().__init__()
        data = Generated(image_shape, num_train)
        images, targets = data.load("train")
        self.train_set = TensorDataset(data.normalize(images), targets)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train_set, BATCH_SIZE, shuffle=True)


def stock(reference: Reference, num_workers: int = 0) -> float:
    """PlainModule on torchvision's dataset, in a Trainer with default options."""
    module = PlainModule(reference.net(), reference.model.optimizer, reference.model.lr)
    options: Any = {"accelerator": reference.device.type, "devices": 1, "max_epochs": 1}
    clock = StepClock()
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(callbacks=[clock], default_root_dir=folder, **options)
        trainer.fit(module, reference.torchvision_loader(num_workers))
    return clock.step_ms


# through train.py


def plain(reference: Reference, num_steps: int = 1) -> float:
    """PlainModule on PlainData, `num_steps` in a call."""
    if reference.is_mnist:
        net = "--model.net project.models.mlp.MLP --model.net.sizes [784,128,10] --num_threads 1"
    else:
        net = "--model.net project.models.cnn.CIFAR10CNN --model.optimizer SGD --model.lr 0.01"
    flags = f"--model contestants.PlainModule {net} --data contestants.PlainData"
    flags += f" --steps_per_execution {num_steps}"
    return run_train([*flags.split(), *reference.size_flags])


def ours(reference: Reference, flags: str = "") -> float:
    return run_train([*reference.flags, *flags.split()])


def run_train(experiment: Sequence[str]) -> float:
    torch.compiler.reset()  # as in `raw`
    flags = "--trainer.max_epochs 1 --trainer.limit_val_batches 0 --trainer.limit_test_batches 0"
    flags += " --trainer.enable_progress_bar true --trainer.callbacks contestants.StepClock"
    with tempfile.TemporaryDirectory() as folder:
        train.main([*experiment, *flags.split(), "--trainer.default_root_dir", folder])
    return StepClock.newest.step_ms
