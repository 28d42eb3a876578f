"""A run's config: what the data knows reaches whatever takes it unless the user gave a
value; written and read back."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from example.classifier import Classifier
from example.data.synthetic import SyntheticImages
from lightning import LightningDataModule
from paths import TINY, Train, argv, script
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import Metric
from written import equal, weights

from lightbase.commands.train import parse
from lightbase.core.spec import as_values

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
    model: Any = parse(argv("--config", TINY, *args))[1]
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


# arguments are what they are by their types, not by their names


class Named(Classifier):
    """Arguments whose names look like paths."""

    def __init__(
        self,
        pretrained_model_name_or_path: str = "bert-base-uncased",
        vocabulary_path: Path | None = None,
        files: list[Path] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.name = pretrained_model_name_or_path
        self.vocabulary = vocabulary_path
        self.files = files


class NamedData(SyntheticImages):
    def __init__(
        self,
        hub_path: str = "stanfordnlp/imdb",
        cache_dir: str | None = None,
        server_uri: str = "rest/api",
        label_column: str = "label",
        table: Path | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.names = [hub_path, cache_dir, server_uri, label_column]
        self.table = table


NAMED = ("--model", f"{HERE}.Named", "--data", f"{HERE}.NamedData")


def parsed(*args: object, config: str = TINY) -> tuple[Any, Any, Any]:
    """Model, data and the content of config.yaml."""
    spec, model, data = parse(argv("--config", config, *args))
    return model, data, as_values(spec)


def parsed_with(form: str, folder: Path, model: Any, data: Any) -> tuple[Any, Any, Any]:
    """The same for tiny.yaml with Named and NamedData, and these arguments, as flags or
    in a file."""
    if form == "flags":
        arguments = [f"--model.{key}={value}" for key, value in model.items()]
        arguments += [f"--data.{key}={value}" for key, value in data.items()]
        return parsed(*NAMED, *(flag.replace(" ", "") for flag in arguments))
    content = yaml.safe_load(Path(TINY).read_text())
    arguments = {"net": content["model"]["net"], **model}
    content["model"] = {"class_path": f"{HERE}.Named", "init_args": arguments}
    content["data"]["class_path"] = f"{HERE}.NamedData"
    content["data"]["init_args"] |= data
    file = folder / "named.yaml"
    file.write_text(yaml.safe_dump(content))
    return parsed(config=str(file))


def test_a_default_arrives_unchanged_whatever_its_name():
    model, data, _ = parsed(*NAMED)
    assert model.name == "bert-base-uncased"
    assert data.names == ["stanfordnlp/imdb", None, "rest/api", "label"]


@pytest.mark.parametrize("form", ["flags", "yaml"])
def test_text_arrives_unchanged_whatever_its_name(tmp_path, form):
    texts = {"hub_path": "org/set", "cache_dir": "cache", "server_uri": "a/b"}
    texts["label_column"] = "Discs"
    name = {"pretrained_model_name_or_path": "org/net"}
    model, data, written = parsed_with(form, tmp_path, name, texts)
    assert model.name == "org/net"
    assert data.names == [*texts.values()]
    assert written["data"]["init_args"].items() >= texts.items()
    assert written["model"]["init_args"].items() >= name.items()


@pytest.mark.parametrize("form", ["flags", "yaml"])
def test_a_path_is_absolute_whatever_its_name(tmp_path, monkeypatch, form):
    monkeypatch.chdir(tmp_path)
    paths = {"vocabulary_path": "words.txt", "files": ["a.csv", "b/c.csv"]}
    model, data, written = parsed_with(form, tmp_path, paths, {"table": "x.csv"})
    assert model.vocabulary == tmp_path / "words.txt"
    assert model.files == [tmp_path / "a.csv", tmp_path / "b" / "c.csv"]
    assert data.table == tmp_path / "x.csv"
    assert written["data"]["init_args"]["table"] == str(tmp_path / "x.csv")
    arguments = written["model"]["init_args"]
    assert arguments["vocabulary_path"] == str(tmp_path / "words.txt")
    assert arguments["files"][1] == str(tmp_path / "b" / "c.csv")


def test_only_an_argument_of_a_class_takes_a_bare_name(tmp_path):
    args = ["--model.net=MLP", "--model.net.sizes=[192,4]", "--data.label_column=Discs"]
    model, data, _ = parsed(*NAMED[2:], *args)
    assert type(model.net).__name__ == "MLP"
    assert data.names[-1] == "Discs"
    _, data, _ = parsed("--data Discs --model.net.sizes [1024,2]")
    assert data.image_shape == (1, 32, 32)
    content = yaml.safe_load(Path(TINY).read_text())
    content["model"]["net"]["class_path"] = "MLP"
    content["data"]["class_path"] = "SyntheticImages"
    (tmp_path / "bare.yaml").write_text(yaml.safe_dump(content))
    model, _, written = parsed(config=str(tmp_path / "bare.yaml"))
    assert type(model.net).__name__ == "MLP"
    net = written["model"]["init_args"]["net"]
    assert net["class_path"] == "example.models.mlp.MLP"
