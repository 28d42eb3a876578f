"""What is refused before a run has a folder: by its data, its network, its flags."""

import json
import random
import signal
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_training import checkpoint, equal, weights
from torch import Tensor, nn

from lightbase.folder import Run

Train = Callable[..., dict[str, Any]]
Outputs = namedtuple("Outputs", "logits aux_logits")


class InTraining(nn.Module):
    """A network whose training mode differs. how: named, a named tuple; small, too small an image;
    dropout."""

    def __init__(self, how: str = "dropout") -> None:
        super().__init__()
        self.how, self.pool = how, nn.AvgPool2d(kernel_size=9)
        self.norm, self.dropout, self.head = nn.BatchNorm2d(3), nn.Dropout(), nn.Linear(192, 4)

    def forward(self, x: Tensor) -> Any:
        x = x + random.random() if self.training else x
        logits = self.head(self.dropout(self.norm(x).flatten(1)))
        if self.training and self.how == "small":
            self.pool(x)
        return Outputs(logits, logits) if self.training and self.how == "named" else logits


NET = "--model.net test_checks.InTraining"
CALLBACKS = "--trainer.callbacks lightning.pytorch.callbacks"
PRUNING = "--trainer.callbacks.pruning_fn torch.nn.utils.prune"


@pytest.mark.parametrize(
    ("flags", "status", "words"),
    [
        ("--trainer.limit_test_batches 0.001", 2, ["limit_test_batches 0.001", "such as 1"]),
        ("--model.net.sizes [192,10000000,10000000,4]", 1, ["allocate memory"]),
        (f"{CALLBACKS}.BackboneFinetuning", 2, ["Classifier.backbone", "--model.freeze"]),
        (f"{CALLBACKS}.ModelPruning {PRUNING}.l1_unstructured", 2, ["pruning_fn"]),
        (f"{NET} --model.net.how named", 1, ["InTraining returns Outputs in training"]),
        (f"{NET} --model.net.how small", 1, ["cannot take the samples (3, 8, 8)", "too small"]),
    ],
)
def test_a_mistake_is_named_before_the_run_has_a_folder(
    train, tmp_path, capsys, flags, status, words
):
    with pytest.raises(SystemExit) as caught:
        train(flags)
    assert caught.value.code == status
    error = capsys.readouterr().err
    assert len(error.splitlines()) <= 2
    for word in words:
        assert word in error
    assert not list(tmp_path.iterdir())


def test_the_trial_changes_nothing(train: Train, tmp_path: Path) -> None:
    train(NET, "--name tried")
    train(NET, "--name not_tried --try_network false")
    folders = tmp_path / "tried" / "version_0", tmp_path / "not_tried" / "version_0"
    assert equal(*map(weights, folders))


class Merged(nn.Linear):
    def __init__(self, dim: int, norm_layer: Callable[..., nn.Module] = nn.LayerNorm) -> None:
        super().__init__(dim, 4)
        self.norm = norm_layer(dim)


def swin_like(layer: Callable[..., nn.Module] = Merged, **options: Any) -> nn.Module:
    return nn.Sequential(nn.Flatten(), layer(192, nn.LayerNorm))


def test_a_default_that_is_a_class_stays_a_class(train: Train) -> None:
    """As the downsample_layer of torchvision.models.swin_t."""
    assert train("--model.net test_checks.swin_like --trainer.max_epochs 1")["epochs"] == 1


def test_weights_of_another_kind_of_number_are_refused(train, tmp_path, capsys):
    train("--trainer.max_epochs 1")
    folder = tmp_path / "tiny" / "version_0"
    content = checkpoint(folder)
    state = content["state_dict"]
    name = next(iter(state))
    state[name] = state[name].to(torch.complex64)
    torch.save(content, folder / "checkpoints" / "last.ckpt")
    with pytest.raises(SystemExit):
        train("--ckpt_path last --trainer.max_epochs 2")
    assert f"its {name} is torch.complex64, here it is torch.float32" in capsys.readouterr().err


@pytest.mark.linux
def test_a_signal_to_a_run_that_is_complete_changes_nothing(train, tmp_path, monkeypatch):
    write = Run.write

    def write_and_stop(run: Run, name: str, text: str) -> None:
        write(run, name, text)
        if name == "metrics.json":
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(Run, "write", write_and_stop)
    metrics = train("--trainer.max_epochs 1")
    progress = json.loads((tmp_path / "tiny" / "version_0" / "progress.json").read_text())
    assert metrics["train_seconds"] == progress["train_seconds"]
