"""Which experiment a command trains, after a kill before the first checkpoint and
without configs/default.yaml."""

from pathlib import Path

import pytest
import yaml
from lightning import Callback
from paths import TINY, argv, fails, script

from lightbase.config.paths import PROJECT

LAST = "--ckpt_path last --trainer.default_root_dir"


class KilledError(BaseException):
    """As kill -9: nothing more happens."""


class Kills(Callback):
    is_on = True

    def setup(self, trainer, pl_module, stage):
        if self.is_on:
            raise KilledError


def test_a_run_that_is_killed_at_once_starts_again(train, tmp_path, monkeypatch):
    with pytest.raises(KilledError):
        train("--trainer.callbacks test_experiment.Kills --model.lr 0.02")
    monkeypatch.setattr(Kills, "is_on", False)
    file = tmp_path / "tiny" / "version_0" / "config.yaml"
    assert script("train").main(argv("--name tiny", LAST, tmp_path))["epochs"] == 2
    assert [path.name for path in (tmp_path / "tiny").iterdir()] == ["version_0"]
    config = yaml.safe_load(file.read_text())
    assert config["model"]["init_args"]["lr"] == 0.02


def test_a_folder_with_nothing_in_it_does_not_become_another_experiment(
    tmp_path, capsys
):
    empty = tmp_path / "tiny" / "version_3"
    empty.mkdir(parents=True)
    words = argv("--name tiny", LAST, tmp_path)
    error = fails(capsys, 2, lambda: script("train").main(words))
    assert f"{empty / 'config.yaml'}: No such file" in error
    assert [*(tmp_path / "tiny").iterdir()] == [empty]


@pytest.fixture
def without_default(monkeypatch, tmp_path):
    """A repository whose user has deleted configs/default.yaml."""
    configs = tmp_path / "repository" / "configs"
    configs.mkdir(parents=True)
    (configs / "mine.yaml").write_text(Path(TINY).read_text())
    monkeypatch.setattr(PROJECT, "root", configs.parent)
    return configs.parent


@pytest.mark.parametrize(
    "command",
    [
        "train",
        "train --ckpt_path last",
        "sweep --search model.lr=0.1,0.2",
    ],
)
def test_without_a_default_a_command_has_to_name_its_experiment(
    without_default, capsys, command
):
    name, *words = command.split()
    error = fails(capsys, 2, lambda: script(name).main(words))
    assert "give --config FILE, or both --model CLASS and --data CLASS" in error
    assert [path.name for path in without_default.iterdir()] == ["configs"]
