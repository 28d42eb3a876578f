"""What is refused before a run has a folder, because of its data, its network or its
flags. And a training that trains nothing."""

from pathlib import Path
from typing import Any

import pytest
import torch
from example.classifier import Classifier
from given import Given
from lightning import LightningModule
from paths import ACCELERATOR, Train, argv, fails, script
from torch import Tensor, nn
from written import equal, refused, weights

from lightbase.data.module import BaseDataModule
from lightbase.watch.dry_run import (
    check_outputs,
    load_data,
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


@pytest.mark.parametrize(
    ("flags", "status", "words"),
    [
        ("--model.net.sizes [192,1000000000000,4]", 1, "allocate memory"),
        ("--model.net.sizes [192,3]", 1, "MLP has 3 outputs for the 4 classes of Synt"),
        ("--model.net.sizes [191,4]", 2, "bias=True) got torch.float32 (2, 192)"),
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


class NeverALoss(Classifier):
    """It skips each batch."""

    threshold = 0.0

    def training_step(self, batch, batch_idx: int):
        loss = super().training_step(batch, batch_idx)
        return loss if loss < self.threshold else None


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_single_batches_may_have_no_loss_but_not_all(train, capsys, monkeypatch):
    flags = f"--model {ME}.NeverALoss {ONE_EPOCH}"
    error = fails(capsys, 1, lambda: train(flags))
    assert "training_step of NeverALoss returned None in all batches of epoch" in error
    monkeypatch.setattr(NeverALoss, "threshold", 1.4)  # the first batches have more
    assert train(flags)["test/acc"] > 0


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


def change_all(self, batch, training: bool):
    first, *others = batch
    return [first / 2, *others]


def train_on(folder: Path, shapes: str):
    """Train without tiny.yaml."""
    quiet = "--step_timer false --device_monitor false --figures_every_n_epochs 0"
    flags = f"--model {ME}.Anything --data {ME}.Parts --data.batch_size 10 {quiet}"
    flags += f" {ONE_EPOCH} --trainer.accelerator {ACCELERATOR} --data.shapes {shapes}"
    words = argv(flags, "--trainer.default_root_dir", folder)
    return script("train").main([*words, "--trainer.log_every_n_steps", "1"])


@pytest.mark.parametrize("shapes", ["[[3,4,4],[3,4,4]]", "[[4],[1],[]]"])
def test_parts_that_would_stay_unchanged_are_refused(
    tmp_path, capsys, monkeypatch, shapes
):
    error = refused(capsys, tmp_path, lambda: train_on(tmp_path, shapes))
    assert "override transform_batch" in error
    monkeypatch.setattr(Parts, "transform_batch", change_all)
    assert train_on(tmp_path, shapes)["epochs"] == 1
    assert train_on(tmp_path, "[[1],[1]]")["epochs"] == 1  # targets are no inputs


# the trial of the network, and the metric that compares epochs


def test_classes_without_samples_are_said(capsys):
    x, y = torch.zeros(50, 3), torch.arange(50) % 2
    targets = y.clone()
    targets[0] = 2  # nothing is of class d
    load_data(Given((x, targets), (x[:9], y[:9]), (*"abcd",)), with_test=True)
    line = capsys.readouterr().out.splitlines()[1]
    assert line.startswith("Classes: no val sample of ")
    assert "; at most one train sample of c, d (2 in all); no test sample of" in line


def test_softmax_before_cross_entropy_is_said():
    model = Classifier(nn.Linear(3, 4), num_classes=4)
    data = Given(None)
    probabilities = torch.full((2, 4), 0.25)
    assert "CrossEntropyLoss has its own softmax" in check_outputs(
        probabilities, model, data
    )
    assert not check_outputs(probabilities.log(), model, data)


@pytest.mark.parametrize("sign", [-1, 1])
def test_nll_loss_on_outputs_that_are_no_logarithms_is_said(sign):
    model = Classifier(nn.Linear(3, 4), criterion=nn.NLLLoss(), num_classes=4)
    logits = sign * torch.randn(2, 4)
    assert "outputs are no log-probabilities" in check_outputs(
        logits, model, Given(None)
    )
    assert not check_outputs(logits.log_softmax(1), model, Given(None))
