"""What is refused before a run has a folder: by its data, its network, its flags."""

from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_training import equal, weights
from torch import Tensor, nn

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
        logits = self.head(self.dropout(self.norm(x).flatten(1)))
        if self.training and self.how == "small":
            self.pool(x)
        return Outputs(logits, logits) if self.training and self.how == "named" else logits


NET = "--model.net test_checks.InTraining"


@pytest.mark.parametrize(
    ("flags", "status", "words"),
    [
        ("--trainer.limit_test_batches 0.001", 2, ["limit_test_batches 0.001", "such as 1"]),
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
