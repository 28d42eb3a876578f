"""What is refused before a run has a folder: by its data, its network, its flags."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from paths import Train
from test_training import equal, weights
from torch import Tensor, nn


class Random(nn.Module):
    """A network that draws random numbers, in eval mode as well."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.dropout, self.head = (
            nn.BatchNorm2d(3),
            nn.Dropout(),
            nn.Linear(192, 4),
        )

    def forward(self, x: Tensor) -> Any:
        return self.head(
            self.dropout(self.norm(x).flatten(1) + torch.rand(192, device=x.device))
        )


CALLBACKS = "--trainer.callbacks lightning.pytorch.callbacks"
PRUNING = "--trainer.callbacks.pruning_fn torch.nn.utils.prune"

FUSED = "--model.optimizer_args.fused true --trainer.gradient_clip_val 1"
GRAPHS = "--model.compile_net inductor --model.compile_mode reduce-overhead"


@pytest.mark.parametrize(
    ("flags", "status", "words"),
    [
        ("--model.net.sizes [192,1000000000000,4]", 1, ["allocate memory"]),
        (f"{CALLBACKS}.ModelPruning {PRUNING}.l1_unstructured", 2, ["pruning_fn"]),
        (
            "--model.net.sizes [192,3]",
            1,
            ["MLP has 3 outputs for the 4 classes of Synthetic"],
        ),
        (
            f"{FUSED} --trainer.precision 16-mixed",
            2,
            ["fused true", "precision 16-mixed\nleave"],
        ),
        (f"{FUSED} --trainer.precision bf16", 2, ["fused true", "gradient_clip_val"]),
        (
            f"{GRAPHS} --trainer.accumulate_grad_batches 2",
            2,
            ["accumulate_grad_batches 2\nleave"],
        ),
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
    train("--model.net test_checks.Random --name tried")
    train("--model.net test_checks.Random --name not_tried --try_network false")
    folders = tmp_path / "tried" / "version_0", tmp_path / "not_tried" / "version_0"
    assert equal(*map(weights, folders))


class Merged(nn.Linear):
    def __init__(
        self, dim: int, norm_layer: Callable[..., nn.Module] = nn.LayerNorm
    ) -> None:
        super().__init__(dim, 4)
        self.norm = norm_layer(dim)


def swin_like(layer: Callable[..., nn.Module] = Merged, **options: Any) -> nn.Module:
    return nn.Sequential(nn.Flatten(), layer(192, nn.LayerNorm))


def test_a_default_that_is_a_class_stays_a_class(train: Train) -> None:
    """As the downsample_layer of torchvision.models.swin_t."""
    assert (
        train("--model.net test_checks.swin_like --trainer.max_epochs 1")["epochs"] == 1
    )
