"""Checkpoints of the package under another name evaluate as they were; those from before 0.1 are
refused."""

import importlib
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from paths import Train, script
from test_training import equal, weights

import lightbase
from lightbase.cli.command_line import MOVED, RENAMED, current_path, renamed
from lightbase.data.module import BaseDataModule
from lightbase.folder import PROJECT


def read(path: Path) -> dict[str, Any]:
    return torch.load(path, weights_only=True)


def test_another_name_of_the_package_is_todays(train: Train, tmp_path: Path) -> None:
    result = train()
    path = tmp_path / "tiny" / "version_0" / "checkpoints" / "best.ckpt"
    checkpoint = read(path)
    checkpoint["package"] = "shoes"
    config = checkpoint["config"]
    config["model"]["class_path"] = "shoes.classifier.Classifier"
    config["model"]["init_args"]["net"]["class_path"] = "shoes.models.mlp.MLP"
    config["data"]["class_path"] = "shoes.data.synthetic.SyntheticImages"
    torch.save(checkpoint, path)
    metrics = script("evaluate").main(["--ckpt_path", str(path)])
    assert metrics == {name: value for name, value in result.items() if name.startswith("test/")}


def test_only_import_paths_of_the_package_are_renamed() -> None:
    paths = ["shoes.callbacks.Mine", "shoestring.Mine", "torch.nn.X"]
    args = {"text": "shoes.x", "optimizer": "SGD", "scheduler": "shoes.schedules.Mine"}
    callbacks = [{"class_path": path} for path in paths]
    config = {"model": {"init_args": args}, "trainer": {"callbacks": callbacks}}
    config = renamed(config, "shoes")
    callbacks = config["trainer"]["callbacks"]
    assert [callback["class_path"] for callback in callbacks] == [
        "example.callbacks.Mine",
        "shoestring.Mine",
        "torch.nn.X",
    ]
    args["scheduler"] = "example.schedules.Mine"
    assert config["model"]["init_args"] == args


def test_every_class_of_the_table_is_where_it_says() -> None:
    for module in MOVED.values():
        assert importlib.import_module(module)
    assert current_path("example.base.system.System") == "lightbase.module.BaseModule"
    assert BaseDataModule.__name__ == RENAMED["TensorDataModule"]


def test_a_module_of_the_users_with_an_old_name_is_the_users(tmp_path, monkeypatch):
    path = "example.data.features.Features"
    assert current_path(path) == "lightbase.data.tables.Features"
    (tmp_path / "example" / "data").mkdir(parents=True)
    (tmp_path / "example" / "data" / "features.py").touch()
    monkeypatch.setattr(PROJECT, "root", tmp_path)
    assert current_path(path) == path


def test_a_yaml_and_flags_of_version_0_2_train_and_its_checkpoint_resumes(train, tmp_path):
    old = tmp_path / "old.yaml"
    old.write_text("""\
model: {scheduler: example.base.optim.WarmupCosineLR}
trainer:
  callbacks:
  - class_path: example.callbacks.step_timer.StepTimer
""")
    train("--config", old)
    folder = tmp_path / "tiny" / "version_0"
    assert "example.callbacks" not in (folder / "config.yaml").read_text()
    last = folder / "checkpoints" / "last.ckpt"
    checkpoint = read(last)
    assert checkpoint["lightbase"] == lightbase.__version__
    init_args, trainer = checkpoint["config"]["model"]["init_args"], checkpoint["config"]["trainer"]
    shutil.copytree(tmp_path / "tiny", tmp_path / "unchanged")
    # as version 0.2 wrote it
    init_args |= {"initializer": "gone.whiten", "test_views": "example.data.transforms.mirrored"}
    init_args["scheduler"] = checkpoint["schedule"]["scheduler"] = (
        "example.base.optim.WarmupCosineLR"
    )
    trainer["callbacks"][0]["class_path"] = "example.callbacks.step_timer.StepTimer"
    checkpoint["config"] |= {"gradient_norm": "modules", "histograms_every_n_epochs": 5}
    torch.save(checkpoint, last)
    for name in ("tiny", "unchanged"):
        train("--ckpt_path", "last", "--trainer.max_epochs", 3, "--name", name)
    assert equal(weights(folder), weights(tmp_path / "unchanged" / "version_0"))


def test_a_checkpoint_from_before_0_1_is_refused(trained, tmp_path, capsys):
    folder, _ = trained()
    checkpoint = read(folder / "checkpoints" / "best.ckpt")
    del checkpoint["package"]
    torch.save(checkpoint, tmp_path / "old.ckpt")
    with pytest.raises(SystemExit):
        script("evaluate").main(["--ckpt_path", str(tmp_path / "old.ckpt")])
    assert "old.ckpt was written before version 0.1" in capsys.readouterr().err
