"""What is refused before a run has a folder, because of its data, its network or its
flags. And a training that trains nothing."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attached import attach
from example.classifier import Classifier
from given import Given
from lightning import LightningModule
from paths import ACCELERATOR, Train, argv, script
from torch import Tensor, nn
from torchvision.datasets import FakeData
from torchvision.transforms import v2
from written import equal, refused, weights

from lightbase.data.module import BaseDataModule
from lightbase.watch.dry_run import (
    check_outputs,
    load_data,
    try_network,
)

ME = "test_checks"
IMAGES = "example.data.synthetic.SyntheticImages"
ONE_EPOCH = "--trainer.max_epochs 1"


class Silent(nn.Module):
    """A network without `return`."""

    def forward(self, x: Tensor):
        x.flatten(1)


class Random(nn.Module):
    """A network that draws random numbers, in eval mode as well."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3)
        self.dropout = nn.Dropout()
        self.head = nn.Linear(192, 4)

    def forward(self, x: Tensor):
        noisy = self.norm(x).flatten(1) + torch.rand(192, device=x.device)
        return self.head(self.dropout(noisy))


CALLBACKS = "--trainer.callbacks lightning.pytorch.callbacks"
PRUNING = "--trainer.callbacks.pruning_fn torch.nn.utils.prune"


@pytest.mark.parametrize(
    ("flags", "status", "words"),
    [
        ("--model.net.sizes [192,1000000000000,4]", 1, "allocate memory"),
        (f"{CALLBACKS}.ModelPruning {PRUNING}.l1_unstructured", 2, "pruning_fn"),
        (
            "--model.net.sizes [192,3]",
            1,
            "MLP has 3 outputs for the 4 classes of Synthetic",
        ),
        (
            "--model.net.sizes [191,4]",
            2,
            "Linear(in_features=191, out_features=4, bias=True) got torch.float32 (2, 192)",
        ),
        (f"--model.net {ME}.Silent", 2, "Silent.forward returns nothing"),
        (
            "--model.metrics.unfit torchmetrics.classification.BinaryF1Score",
            1,
            "the metric unfit got ((32, 4), (32,)); does it fit the task?",
        ),
    ],
)
def test_a_mistake_is_named_before_the_run_has_a_folder(
    train, tmp_path, capsys, flags, status, words
):
    assert words in refused(capsys, tmp_path, lambda: train(flags), status)
    assert not list(tmp_path.iterdir())


def test_the_trial_changes_nothing(train: Train, tmp_path: Path):
    train("--model.net test_checks.Random --name tried")
    train("--model.net test_checks.Random --name not_tried --try_network false")
    folders = tmp_path / "tried" / "version_0", tmp_path / "not_tried" / "version_0"
    assert equal(*map(weights, folders))


# a training_step that returns no loss


class Forgets(Classifier):
    def training_step(self, batch, batch_idx):
        self.criterion(self.net(batch[0]), batch[1])


class Anything(LightningModule):
    """Takes any batch."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def training_step(self, batch, batch_idx: int):
        return (self.scale * batch[0].float().mean()).square()

    def validation_step(self, batch, batch_idx: int):
        self.log("val/loss", Anything.training_step(self, batch, batch_idx))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def train_plain(folder: Path, model: str, data: str, *flags: str):
    """Train without tiny.yaml."""
    quiet = "--step_timer false --device_monitor false --figures_every_n_epochs 0"
    words = argv("--model", f"{ME}.{model}", "--data", data, quiet, ONE_EPOCH, *flags)
    words += ["--trainer.accelerator", ACCELERATOR]
    words += ["--trainer.default_root_dir", str(folder)]
    return script("train").main(words)


class NeverALoss(Classifier):
    """It skips each batch."""

    threshold = 0.0

    def training_step(self, batch, batch_idx: int):
        loss = super().training_step(batch, batch_idx)
        return loss if loss < self.threshold else None


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
@pytest.mark.parametrize(
    ("name", "flag"),
    [
        ("NeverALoss", "--trainer.accumulate_grad_batches 4"),
    ],
)
def test_a_training_in_which_no_batch_has_a_loss_fails(
    train, tmp_path, capsys, name, flag
):
    model = f"--model {ME}.{name}"
    error = refused(capsys, tmp_path, lambda: train(model, ONE_EPOCH, flag), status=1)
    assert f"training_step of {name} returned None in all batches of epoch 1" in error


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_single_batches_may_have_no_loss_but_not_all(
    train, tmp_path, capsys, monkeypatch
):
    model = f"--model {ME}.NeverALoss"
    short = "--trainer.max_steps 3"
    error = refused(capsys, tmp_path, lambda: train(model, short), status=1)
    assert "nothing was trained" in error
    monkeypatch.setattr(NeverALoss, "threshold", 1.4)  # the first batches have more
    assert train(model, ONE_EPOCH)["test/acc"] > 0


# parts of a batch that normalize and augment do not get


class Parts(BaseDataModule):
    """Zeros: inputs and other parts of these shapes."""

    def __init__(self, shapes: list[list[int]], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.shapes = shapes

    def load(self, split):
        return tuple(torch.zeros(40, *shape) for shape in self.shapes)

    def normalize(self, inputs: Tensor):
        return inputs / 2


class ManyLabels(Parts):
    def load(self, split):
        inputs, labels = super().load(split)
        return inputs, labels.long()


def change_all(self, batch, training: bool):
    first, *others = batch
    return [first / 2, *others]


def train_on(folder: Path, name: str, shapes: str):
    flags = ("--data.batch_size 10 --trainer.log_every_n_steps 1 --data.shapes", shapes)
    return train_plain(folder, "Anything", f"{ME}.{name}", *flags)


@pytest.mark.parametrize("shapes", ["[[3,4,4],[3,4,4]]", "[[4],[4]]", "[[4],[1],[]]"])
def test_parts_that_would_stay_unchanged_are_refused(
    tmp_path, capsys, monkeypatch, shapes
):
    error = refused(capsys, tmp_path, lambda: train_on(tmp_path, "Parts", shapes))
    assert "override transform_batch" in error
    monkeypatch.setattr(Parts, "transform_batch", change_all)
    assert train_on(tmp_path, "Parts", shapes)["epochs"] == 1


@pytest.mark.parametrize(
    ("name", "shapes"), [("Parts", "[[1],[1]]"), ("ManyLabels", "[[4],[4]]")]
)
def test_targets_that_are_no_inputs_are_not_refused(tmp_path, name, shapes):
    assert train_on(tmp_path, name, shapes)["epochs"] == 1


# the trial of the network, and the metric that compares epochs


def test_classes_without_samples_are_said(capsys):
    x, y = torch.zeros(50, 3), torch.arange(50) % 2
    targets = y.clone()
    targets[0] = 2  # nothing is of class d
    test = x[:9], y[:9]
    load_data(Given((x, targets), test, ("a", "b", "c", "d")), with_test=True)
    line = capsys.readouterr().out.splitlines()[1]
    assert line.startswith("Classes: no val sample of ")
    assert "; at most one train sample of c, d (2 in all); no test sample of" in line
    load_data(Given((x, y), classes=("a", "b")), with_test=True)
    assert "Classes:" not in capsys.readouterr().out
    # a Dataset whose attribute `targets` has other numbers than its samples
    merged = FakeData(50, (3, 4, 4), 10, v2.PILToTensor(), lambda target: target // 5)
    merged.targets = [9] * 50
    load_data(Given(merged, classes=("a", "b")), with_test=True)
    assert "Classes:" not in capsys.readouterr().out


def test_a_network_that_is_not_tried_is_said(capsys):
    x = torch.zeros(50, 3)
    data: BaseDataModule = attach(Given((x, x, x)))
    flags: Any = SimpleNamespace(accelerator="cpu", strategy="auto", deterministic=0)
    try_network(Classifier(nn.Linear(3, 2), num_classes=2), data, flags)
    assert "Network: not tried" in capsys.readouterr().out


def test_softmax_before_cross_entropy_is_said():
    model = Classifier(nn.Linear(3, 4), num_classes=4)
    data = Given(None)
    probabilities = torch.full((2, 4), 0.25)
    assert "CrossEntropyLoss has its own softmax" in check_outputs(
        probabilities, model, data
    )
    assert not check_outputs(probabilities.log(), model, data)
