"""What a GPU computes, keeps and touches: a CPU's numbers, one resumed run, one loss
everywhere.

All tests need a GPU. A simulated GPU computes with the CPU's
kernels, so numbers are equal to the bit there; a real one rounds in another way.
"""

import copy
import math
import os
from typing import Any

import pytest
import torch
from lightning import Callback
from paths import argv, script
from stops import Interrupt, InterruptedRunError
from torch import Tensor, nn
from torch.nn import functional
from written import checkpoint, checkpoint_file, curves, equal, weights

from lightbase.model import metrics

pytestmark = pytest.mark.gpu
IS_SIMULATED = "SIMGPU_FOLDER" in os.environ
NUM_GPUS = torch.cuda.device_count()
TWO_GPUS = pytest.mark.skipif(NUM_GPUS < 2, reason="one GPU")
ON_GPU = "--trainer.accelerator gpu"
DP = f"{ON_GPU} --trainer.strategy dp --trainer.devices 2"
SGD = "--model.optimizer SGD --model.lr 0.1"
METRICS = "--model.per_class true --model.top_k 2 --trainer.max_epochs 2"


class Small(nn.Module):
    """A convolution, a norm, and dropout in training. Its input has to be on the
    current GPU."""

    def __init__(self, num_classes: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        conv = nn.Conv2d(3, 8, 3, stride=2, bias=False)
        layers = [conv, nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten()]
        self.layers = nn.Sequential(
            *layers, nn.Dropout(dropout), nn.Linear(72, num_classes)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x + torch.zeros(1, device="cuda") if x.is_cuda else x)


def small(dropout: float = 0.0) -> list[str]:
    return argv("--model.net test_on_gpu.Small --model.net.dropout", dropout)


def check_close(one: Any, other: Any, tolerance: float = 0.0) -> None:
    """tolerance: relative and absolute, of a real GPU."""
    tolerance = 0 if IS_SIMULATED else tolerance
    torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("resident", "most"), [("true", metrics.MAX_NUMBERS), ("false", 40)]
)
def test_a_gpu_computes_what_a_cpu_computes(
    train, tmp_path, monkeypatch, resident, most
):
    """`most` numbers wait for a transfer to the CPU; the metrics of more are computed
    on the GPU."""
    monkeypatch.setattr(metrics, "MAX_NUMBERS", most)
    found, weights_of, points = [], [], []
    for name, kept in (("cpu", "null"), ("gpu", resident)):
        flags = f"--name {name} --trainer.accelerator {name} --data.resident {kept}"
        found.append(train(METRICS, SGD, flags, *small()) | {"train_seconds": 0})
        folder = tmp_path / name / "version_0"
        weights_of.append(weights(folder))
        points.append({name: dict(curve) for name, curve in curves(folder).items()})
    check_close(found[1], found[0], 0.1)  # an image may get another class
    check_close(*weights_of, 0.02)
    check_close(points[1], points[0], 0.1)


@pytest.mark.parametrize("devices", [ON_GPU, pytest.param(DP, marks=TWO_GPUS)])
def test_dropout_of_a_gpu_goes_on_where_it_was(train, tmp_path, monkeypatch, devices):
    flags = [*argv(devices, METRICS, "--trainer.deterministic true"), *small(0.5)]
    train(*flags, "--name whole")
    cut = [*flags, *argv("--name cut --trainer.callbacks stops.Interrupt")]
    monkeypatch.setattr(Interrupt, "at_epoch", 1)
    with pytest.raises(InterruptedRunError):
        train(*cut)
    monkeypatch.setattr(Interrupt, "at_epoch", None)
    train(*cut, "--ckpt_path last")
    assert equal(*(weights(tmp_path / name / "version_0") for name in ("cut", "whole")))


class Steps(Callback):
    """Keeps the network before the first step, and the batches of all steps."""

    net: nn.Module
    batches: list[tuple[Tensor, Tensor]]

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        type(self).net, type(self).batches = copy.deepcopy(pl_module.net), []

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, *_: Any
    ) -> None:
        self.batches.append(tuple(part.clone() for part in batch))


def test_half_precision_clips_gradients_that_are_not_scaled(train, tmp_path):
    """As a loop that is written by hand, with torch's GradScaler."""
    flags = f"{ON_GPU} --trainer.precision 16-mixed --trainer.gradient_clip_val 0.1 "
    flags += "--model.optimizer SGD --model.lr 0.5 --model.criterion test_on_gpu.Large"
    train(
        flags, "--trainer.max_epochs 1 --trainer.callbacks test_on_gpu.Steps", *small()
    )
    net, scaler, num_clipped = Steps.net, torch.amp.GradScaler("cuda"), 0
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    for images, targets in Steps.batches:
        with torch.autocast("cuda", torch.float16):
            logits = net(images)
            loss = Large()(logits.float(), targets)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(net.parameters(), 0.1).item()
        num_clipped += math.isfinite(norm) and norm > 0.1
        scaler.step(optimizer)
        scaler.update()
    assert num_clipped > 5
    assert scaler.get_scale() < 65536  # some steps were skipped
    content = checkpoint(tmp_path / "tiny" / "version_0")
    assert content["MixedPrecision"]["scale"] == scaler.get_scale()
    for name, value in net.state_dict().items():
        check_close(content["state_dict"][f"net.{name}"], value.cpu(), 0.01)


class Large(nn.Module):
    """A loss whose gradients, times 65536, do not fit into float16."""

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        return 100 * functional.cross_entropy(logits, targets)


def test_one_checkpoint_has_one_loss_on_all_devices(train, tmp_path):
    expected = train(f"{ON_GPU} {METRICS}", *small())
    best = str(checkpoint_file(tmp_path / "tiny" / "version_0"))
    flags = ["--trainer.accelerator cpu", f"{ON_GPU} --trainer.precision 32-true"]
    if NUM_GPUS > 1:
        flags += [f"{ON_GPU} --trainer.devices [1]", DP]
    for line in flags:
        found = script("evaluate").main(["--ckpt_path", best, *line.split()])
        assert expected == pytest.approx(expected | found, rel=1e-4), line
