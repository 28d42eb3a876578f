"""A run's config, written down and read back."""

import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from conftest import script
from torch import Tensor, nn

Train = Callable[..., dict[str, Any]]
COUNTER = itertools.count()
# objects with a name of their own could be written by it
OBJECTS: list[Any] = [functools.partial(nn.functional.leaky_relu, negative_slope=0.5), torch.device("cpu")]


class Net(nn.Module):
    """Has defaults that no YAML can hold, as torchvision's vision transformers."""

    def __init__(self, activation: Callable[[Tensor], Tensor] = OBJECTS[0], device: torch.device = OBJECTS[1]):
        super().__init__()
        self.activation = activation
        self.layer = nn.Linear(192, 4, device=device)

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.layer(x.flatten(1)))


class Odd:
    """Looks different each time."""

    def __repr__(self) -> str:
        return f"{next(COUNTER)}"


OBJECTS.append(Odd())


class OddNet(Net):
    def __init__(self, odd: Odd = OBJECTS[2]) -> None:
        super().__init__()


def test_defaults_that_are_objects_are_left_to_their_class(train: Train, tmp_path: Path) -> None:
    found = train("--model.net", "test_written.Net", "--trainer.max_epochs", 1)
    folder = tmp_path / "tiny" / "version_0"
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert config["model"]["init_args"]["net"] == {"class_path": "test_written.Net"} | {"init_args": {}}
    again = script("evaluate").main(["--ckpt_path", str(folder / "checkpoints" / "best.ckpt")])
    assert again["test/loss"] == pytest.approx(found["test/loss"], rel=1e-6)
    train("--ckpt_path", "last", "--model.net", "test_written.Net")
    assert train(config=str(folder / "config.yaml"))["test/num_samples"] == 75


def test_a_config_that_nothing_could_read_again_is_refused_before_the_run(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        train("--model.net", "test_written.OddNet")
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert "read again" in error
    assert "cannot represent an object" in error
    assert not (tmp_path / "tiny").exists()
