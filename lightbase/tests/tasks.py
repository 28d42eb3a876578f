"""A module and a data module of every task, and plain ones of Lightning. Several test
files train them."""

from pathlib import Path
from typing import Any

import torch
from lightning import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightbase.data.module import BaseDataModule
from lightbase.model.metrics import Accumulator, collection
from lightbase.model.module import BaseModule


class Scale(nn.Module):
    """Outputs that are the inputs, as long as the learning rate is tiny."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Task(BaseModule):
    """A module of any task. Its steps return nothing."""

    def __init__(self, net: nn.Module, task: Any = None, **system: Any) -> None:
        super().__init__(net, nn.Identity(), **system)
        self.task = task

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0]).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.track("val", torch.zeros(()), self.net(batch[0]), batch[1])

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.track("test", torch.zeros(()), self.net(batch[0]), batch[1])

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        outputs = self.net(batch[0])
        return outputs.argmax(2) if self.task == "text" else outputs


class Parts(Task):
    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        outputs = self.net(batch[0])
        return {"mean": outputs.flatten(1).mean(1), "more": outputs + 1}


def measured(metrics: Any, criterion: Any = None) -> Task:
    """Return a module whose test has these metrics."""
    module = Task(Scale())
    module.curves_callback.means["test"] = Accumulator(collection(metrics), "test/")
    module.criterion = criterion or nn.Identity()
    return module


def ends_of(module: Task, outputs: Tensor, targets: Tensor, groups: Any = None) -> Any:
    """Return the intervals for samples of classes."""
    from lightbase.model.intervals import intervals  # other tests work without it

    _, support = targets.unique(return_counts=True)
    return intervals(module, outputs, targets, support, groups)


class Outputs(BaseDataModule):
    """Inputs that are the outputs, and targets, of a task."""

    def __init__(self, task: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.task = task
        if task == "segmentation":
            self.image_shape = (3, 8, 8)
        if task in ("multilabel", "segmentation"):
            self.classes = ["red", "green", "blue"]

    def load(self, split: str) -> Any:  # type: ignore[override]
        generator = torch.Generator().manual_seed(len(split))
        shapes = {"segmentation": (3, 8, 8), "text": (6, 5), "multilabel": (3,)}
        x = torch.randn(40, *shapes.get(self.task, (2,)), generator=generator)
        if self.task == "multilabel":
            return x, (x + torch.randn(40, 3, generator=generator) > 0).float()
        if self.task == "regression":
            return x, x + torch.randn(40, 2, generator=generator)
        y = x.argmax(2 if self.task == "text" else 1)
        y[:, 0] = -100  # which the loss ignores
        y[::3, 1] = 1
        return x, y

    def to_text(self, values: Tensor) -> str:
        return "".join("abcde"[i] for i in values)

    def read_inputs(self, path: Path) -> Any:
        for i, line in enumerate(path.read_text().splitlines()):
            yield f"{path.name}:{i}", torch.tensor([float(x) for x in line.split()])


def flags_of(task: str, model: str = "tasks.Task", data: str = "tasks.Outputs") -> str:
    """Return the flags of a training that leaves the network as it is."""
    return (
        f"--model {model} --model.task {task} --model.lr 1e-30 --model.net tasks.Scale "
        f"--data {data} --data.task {task} --data.batch_size 7 --trainer.max_epochs 1 "
        "--monitor val/loss"
    )


def outputs_of(task: str) -> tuple[Tensor, Tensor]:
    """Return the outputs and targets of its test."""
    return Outputs(task).load("test")  # type: ignore[no-any-return]


def ious(x: Tensor, y: Tensor) -> list[float]:
    """Return the IoU of each class. x: logits (N, classes, H, W). y: masks."""
    counted = y >= 0
    predicted, true = x.argmax(1)[counted], y[counted]
    pairs = [(predicted == i, true == i) for i in range(x.shape[1])]
    return [((a & b).sum() / (a | b).sum()).item() for a, b in pairs]


class Plain(LightningModule):
    """A module of Lightning's alone, with Lightning's own predict_step."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.scale.sum()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/acc", 0.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * x.mean((2, 3))[:, :2]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


class PlainWithStep(Plain):
    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0]) + 1


class PlainImages(LightningDataModule):
    """Images of a plain data module: nobody knows what its loaders do to a file's
    pixels."""

    def train_dataloader(self) -> DataLoader:
        images = torch.rand(32, 3, 8, 8)
        return DataLoader(TensorDataset(images, torch.arange(32) % 4), batch_size=8)

    val_dataloader = train_dataloader
