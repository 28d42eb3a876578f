"""A run's config: what the data knows reaches whatever takes it unless the user gave a
value; written and read back."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from example.data.synthetic import SyntheticImages
from paths import TINY, argv, fails
from torch import Tensor, nn
from written import equal, weights

from lightbase.commands.train import parse
from lightbase.config.errors import UserError
from lightbase.config.spec import CommandLine, as_values, new_spec, validate
from lightbase.config.yaml_files import flatten

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


def yaml_of(folder: Path) -> Any:
    return yaml.safe_load((folder / "version_0" / "config.yaml").read_text())


def parts(*args: str) -> tuple[Any, Any, Any, list[int]]:
    """Return the model, its network, its loss, and the classes of its metrics."""
    model: Any = parse(argv("--config", TINY, *args))[1]
    metrics = dict(model.metrics).values()
    return model, model.net, model.criterion, [x.num_classes for x in metrics]


def test_a_value_of_the_users_stays(config: str, tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text(
        "model: {net: {init_args: {num_classes: 3}},"  # its default
        " metrics: {f1: {class_path: torchmetrics.classification.MulticlassF1Score,"
        " init_args: {num_classes: 8}}}}"
    )
    flags = ("--config", str(own), "--model.criterion.num_classes 6")
    _, net, criterion, classes = parts("--config", config, *flags)
    assert net.head.out_features == 3
    assert criterion.num_classes == 6
    assert classes[0] == 8


def test_what_the_data_knows_is_in_the_saved_config_which_repeats_the_run(
    train, tmp_path, config
):
    first = train("--config", config)
    folder = tmp_path / "tiny"
    init_args = yaml_of(folder)["model"]["init_args"]
    metrics = init_args["metrics"].values()
    assert [metric["init_args"]["num_classes"] for metric in metrics] == [4, 4]
    assert init_args["net"]["init_args"] == {"num_classes": 4, "in_channels": 3}
    assert init_args["criterion"]["init_args"] == {"num_classes": 4, "share": 0.2}
    again = train(config=str(folder / "version_0" / "config.yaml"))
    assert again | {"train_seconds": 0} == first | {"train_seconds": 0}
    assert equal(*(weights(folder / f"version_{i}") for i in range(2)))


class Named(SyntheticImages):
    """Arguments whose names look like paths, and paths."""

    def __init__(
        self,
        hub_path: str = "stanfordnlp/imdb",
        label_column: str = "label",
        tables: list[Path] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.named = [hub_path, label_column, tables]


IN_YAML = f"""
data:
  class_path: {HERE}.Named
  init_args: {{label_column: Discs, tables: [a.csv, b/c.csv]}}
"""
BY_FLAGS = (
    f"--data={HERE}.Named --data.label_column Discs --data.tables [a.csv,b/c.csv]"
)


@pytest.mark.parametrize("args", ["--config named.yaml", BY_FLAGS])
def test_an_argument_is_what_its_type_says_whatever_its_name(
    tmp_path, monkeypatch, args
):
    """A path is absolute, for a resume from another folder."""
    monkeypatch.chdir(tmp_path)
    Path("named.yaml").write_text(IN_YAML)
    spec, _, data = parse([f"--config={TINY}", *args.split()])
    tables = [tmp_path / "a.csv", tmp_path / "b" / "c.csv"]
    assert data.named == ["stanfordnlp/imdb", "Discs", tables]
    written = as_values(spec)["data"]["init_args"]
    assert written["tables"] == [*map(str, tables)]
    assert written["label_column"] == "Discs"


def test_an_argument_of_type_tensor_takes_a_list(train, tmp_path, capsys):
    loss = "--model.criterion torch.nn.CrossEntropyLoss --model.criterion.weight"
    train(loss, "[1,2,3,4]", "--trainer.max_epochs 1")
    train("--ckpt_path last --trainer.max_epochs 2")
    config = yaml_of(tmp_path / "tiny")["model"]["init_args"]
    assert config["criterion"]["init_args"]["weight"] == [1, 2, 3, 4]
    assert "[1,1,5]" in fails(capsys, 2, lambda: train(loss, "heavy"))


NUMBERS = ["042", "0o17", "1_000", "1e3", "12:30", ".inf", "yes"]


def value_of(key: str, *args: str) -> Any:
    """Return a setting, or None if it is refused."""
    try:
        spec = new_spec(CommandLine(args))
        validate(spec, spec.config)
    except UserError:
        return None
    return flatten(spec.config.as_dict())[key]


@pytest.mark.parametrize(
    "key",
    [
        "trainer.max_epochs",
        "model.optimizer_args.eps",
        pytest.param("model.lr", marks=pytest.mark.slow),
        pytest.param("name", marks=pytest.mark.slow),
    ],
)
def test_a_number_is_the_same_in_a_file_and_in_a_flag(tmp_path: Path, key: str) -> None:
    *names, last = key.split(".")
    for text in NUMBERS:
        config = yaml.safe_load(Path(TINY).read_text())
        options = config
        for name in names:
            options = options.setdefault(name, {})
            options = options.get("init_args", options)
        options[last] = "VALUE"
        file = tmp_path / "config.yaml"
        file.write_text(yaml.safe_dump(config).replace("VALUE", text))
        of_file = value_of(key, f"--config={file}")
        of_flag = value_of(key, f"--config={TINY}", f"--{key}={text}")
        assert None in (of_file, of_flag) or of_file == of_flag, text
