"""A loss or a weight that is NaN or infinite: the run ends, and what was saved stays
finite."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from example.classifier import Classifier
from example.data.synthetic import SyntheticImages
from paths import ACCELERATOR, fails
from plain import PlainModule
from torch import Tensor
from torch.utils.data import Subset, TensorDataset
from written import checkpoint, refused

HERE = "test_finite"
STEPS = "--trainer.log_every_n_steps 5"


class Breaks(Classifier):
    """Its loss breaks in one batch of 19 an epoch, counted from 1 over all epochs."""

    at_batch = 25
    value = float("nan")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if 19 * self.current_epoch + batch_idx + 1 == self.at_batch:
            loss = loss * self.value
        return loss


class PlainByHand(PlainModule):
    """Optimizes by hand. Its step returns no loss, and logs it."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        super().training_step(batch, batch_idx).backward()
        optimizer.step()
        if self.current_epoch == 1:
            self.layer.weight.data.fill_(torch.nan)


def assert_kept(folder: Path, epoch: int) -> None:
    """Both checkpoints are finite and of this epoch."""
    for name in ("best", "last"):
        saved = checkpoint(folder, name)
        assert all(value.isfinite().all() for value in saved["state_dict"].values())
        assert saved["epoch"] == epoch


@pytest.mark.parametrize(
    ("at_batch", "value", "flags", "message"),
    [
        (25, "nan", STEPS, "the training loss is NaN or infinite after step 30"),
        # the last one of an epoch: no log step comes after it
        (38, "inf", STEPS, "a weight is NaN or infinite after step 38, in epoch 2"),
    ],
)
def test_a_loss_that_is_no_number_ends_the_run_on_the_next_log_step(
    train, tmp_path, capsys, monkeypatch, at_batch, value, flags, message
):
    monkeypatch.setattr(Breaks, "at_batch", at_batch)
    monkeypatch.setattr(Breaks, "value", float(value))
    error = fails(capsys, 1, lambda: train(f"--model {HERE}.Breaks", flags))
    assert message in error
    assert_kept(tmp_path / "tiny" / "version_0", epoch=0)
    assert train(f"--model {HERE}.Breaks --stop_on_nan false")["epochs"] == 2


def test_a_weight_of_a_plain_module_is_watched_as_well(train, tmp_path, capsys):
    config = tmp_path / "plain.yaml"
    config.write_text(f"model: {HERE}.PlainByHand\ndata: plain.PlainData\n")
    flags = f"--monitor val_loss --trainer.accelerator {ACCELERATOR}"
    flags += " --step_timer false --device_monitor false"
    error = fails(capsys, 1, lambda: train(flags, config=str(config)))
    assert "a weight is NaN or infinite after step 38, in epoch 2" in error


class Unknown(Classifier):
    """A metric of the first validation, and a loss of training that is only looked at,
    are not defined."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("train/other_loss", torch.tensor(torch.nan))
        return super().training_step(batch, batch_idx)

    def on_validation_epoch_end(self) -> None:
        values = torch.tensor([torch.nan, -1.0])
        self.log("val/odd", values[self.current_epoch])


def test_a_metric_that_is_nan_counts_as_the_worst(train, tmp_path):
    train(f"--model {HERE}.Unknown --monitor val/odd --monitor_mode max")
    assert_kept(tmp_path / "tiny" / "version_0", epoch=1)


class BrokenImages(SyntheticImages):
    """Images of floats. A value of one training image is NaN or infinite."""

    value = torch.nan
    dtype = torch.float32

    def load(self, split: Any) -> Any:
        images, targets = super().load(split)
        images = images.to(self.dtype)
        if split == "train":
            images[7, 0, 0, 0] = self.value
        return images, targets

    def normalize(self, inputs: Tensor) -> Tensor:
        return super().normalize(inputs.float())


class BrokenDataset(BrokenImages):
    """The same as a Dataset, which nobody reads before the training."""

    def load(self, split: Any) -> Any:
        samples = TensorDataset(*super().load(split))
        return Subset(samples, range(len(samples)))


class BrokenByAugment(SyntheticImages):
    """The values of one training batch are NaN when they are augmented."""

    def augment(self, inputs: Tensor) -> Tensor:
        return inputs.float() * (torch.nan if self.trainer.global_step == 5 else 1.0)


@pytest.mark.parametrize(
    ("name", "value", "dtype", "steps"),
    [
        ("BrokenByAugment", torch.nan, torch.float32, 7),
        ("BrokenImages", torch.nan, torch.float32, 1),
        ("BrokenImages", 1e5, torch.float16, 1000),
        ("BrokenImages", 1e39, torch.float64, 7),
        ("BrokenDataset", torch.nan, torch.float32, 7),
    ],
)
def test_data_with_nan_is_told_from_a_diverging_loss(
    train, tmp_path, capsys, monkeypatch, name, value, dtype, steps
):
    monkeypatch.setattr(BrokenImages, "value", value)
    monkeypatch.setattr(BrokenImages, "dtype", dtype)
    flags = f"--data {HERE}.{name} --trainer.log_every_n_steps {steps}"
    error = fails(capsys, 1, lambda: train(flags))
    assert re.search(r"batch since step \d+ is NaN or infinite.*\n.*in the data", error)
    # in the first epoch: no checkpoint, but what shows how it came to this
    folder = tmp_path / "tiny" / "version_0"
    assert not [*folder.rglob("*.ckpt")]
    progress = json.loads((folder / "progress.json").read_text())
    assert "is NaN or infinite" in progress["failed"]
    assert "in the data" in (folder / "log.txt").read_text()


@pytest.mark.parametrize(
    "flags", ["--model.weights", "--trust_checkpoint true --ckpt_path"]
)
def test_weights_with_nan_are_refused_before_the_training(
    train, trained, tmp_path, capsys, flags
):
    saved = checkpoint(trained()[0], "best")
    saved["state_dict"]["net.layers.1.bias"][2] = torch.nan
    torch.save(saved, tmp_path / "nan.ckpt")
    run = lambda: train(flags, tmp_path / "nan.ckpt")  # noqa: E731
    assert "layers.1.bias is NaN" in refused(capsys, tmp_path, run, status=1)
