"""A run's config: what the data knows reaches whatever takes it unless the user gave a
value; written and read back."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning import LightningDataModule
from paths import TINY, Train, argv, script
from test_training import equal, weights
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import Metric

from lightbase.core.run import parse

HERE = "test_config"


class Smoothed(nn.Module):
    """A loss that wants the number of classes, and a number of its own."""

    def __init__(self, num_classes: int = 7, share: float = 0.1) -> None:
        super().__init__()
        self.num_classes, self.share = num_classes, share

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits, targets, label_smoothing=self.share)


CONFIG = f"""
model:
  net: {{class_path: small.ConvNet}}
  criterion: {{class_path: {HERE}.Smoothed, init_args: {{share: 0.2}}}}
  metrics:
    f1: {{class_path: torchmetrics.classification.MulticlassF1Score}}
    recall:
      class_path: torchmetrics.classification.MulticlassRecall
      init_args: {{average: micro}}
"""


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "known.yaml"
    path.write_text(CONFIG)
    return str(path)


def parts(*args: str) -> tuple[Any, Any, Any, dict[str, Metric]]:
    """Model, network, loss and metrics of a command line."""
    model: Any = parse(argv("--config", TINY, *args)).model
    return model, model.net, model.criterion, dict(model.metrics)


def test_what_the_data_knows_reaches_network_loss_metrics_and_classifier(
    config: str,
) -> None:
    model, net, criterion, metrics = parts(
        "--config", config, "--data.image_shape [2,8,8]"
    )
    assert (net.head.out_features, net.conv.in_channels) == (4, 2)
    assert (criterion.num_classes, criterion.share) == (4, 0.2)
    assert [metric.num_classes for metric in metrics.values()] == [4, 4]
    assert model.num_classes == 4


def test_a_value_of_the_users_stays(config: str, tmp_path: Path) -> None:
    flags = ("--model.net.num_classes", "5", "--model.criterion.num_classes", "6")
    _, net, criterion, metrics = parts("--config", config, *flags)
    assert net.head.out_features == 5
    assert criterion.num_classes == 6
    assert metrics["f1"].num_classes == 4  # nobody gave this one
    own = tmp_path / "own.yaml"
    given = CONFIG.replace(
        "ConvNet}", "ConvNet, init_args: {num_classes: 3}}"
    )  # its default
    own.write_text(given.replace("F1Score}", "F1Score, init_args: {num_classes: 8}}"))
    _, net, _, metrics = parts("--config", str(own))
    assert net.head.out_features == 3
    assert [metric.num_classes for metric in metrics.values()] == [8, 4]


def test_the_saved_config_says_what_was_filled_in_and_repeats_the_run(
    train, tmp_path, config
):
    first = train("--config", config)
    folder = tmp_path / "tiny"
    text = (folder / "version_0" / "config.yaml").read_text()
    init_args = yaml.safe_load(text)["model"]["init_args"]
    assert init_args["num_classes"] == 4
    assert init_args["net"]["init_args"] == {"num_classes": 4, "in_channels": 3}
    assert init_args["criterion"]["init_args"] == {"num_classes": 4, "share": 0.2}
    assert init_args["metrics"]["f1"]["init_args"]["num_classes"] == 4
    again = train(config=str(folder / "version_0" / "config.yaml"))
    assert {**again, "train_seconds": 0} == {**first, "train_seconds": 0}
    assert (folder / "version_1" / "config.yaml").read_text() == text
    assert equal(*(weights(folder / f"version_{i}") for i in range(2)))


class PlainData(LightningDataModule):
    """Lightning's own way, with an attribute that says how many classes there are."""

    num_classes = 6

    def train_dataloader(self) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(0)
        images, targets = (
            torch.rand(32, 3, 8, 8, generator=generator),
            torch.arange(32) % 6,
        )
        return DataLoader(TensorDataset(images, targets), batch_size=8)

    val_dataloader = test_dataloader = train_dataloader


def test_a_plain_data_module_may_know_it(train: Train, config: str) -> None:
    flags = ("--config", config, "--data", f"{HERE}.PlainData")
    model, net, _, metrics = parts(*flags)
    assert (net.head.out_features, model.num_classes, metrics["f1"].num_classes) == (
        6,
        6,
        6,
    )
    assert net.conv.in_channels == 3
    assert train(*flags)["test/num_samples"] == 32


# written and read back


# an object with a name of its own could be written by it
LEAKY = functools.partial(nn.functional.leaky_relu, negative_slope=0.5)
CPU = torch.device("cpu")


class Net(nn.Module):
    """Has defaults that no YAML can hold, as torchvision's vision transformers."""

    def __init__(
        self, activation: Callable[[Tensor], Tensor] = LEAKY, device: torch.device = CPU
    ):
        super().__init__()
        self.activation = activation
        self.layer = nn.Linear(192, 4, device=device)

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.layer(x.flatten(1)))


@pytest.mark.slow
def test_defaults_that_are_objects_are_left_to_their_class(
    train: Train, tmp_path: Path
) -> None:
    found = train("--model.net", "test_config.Net", "--trainer.max_epochs", 1)
    folder = tmp_path / "tiny" / "version_0"
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert config["model"]["init_args"]["net"] == {"class_path": "test_config.Net"} | {
        "init_args": {}
    }
    again = script("evaluate").main(
        ["--ckpt_path", str(folder / "checkpoints" / "best.ckpt")]
    )
    assert again["test/loss"] == pytest.approx(found["test/loss"], rel=1e-6)
    train("--ckpt_path", "last", "--model.net", "test_config.Net")
    assert train(config=str(folder / "config.yaml"))["test/num_samples"] == 75
