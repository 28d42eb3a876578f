"""Checkpoints of the package under another name evaluate as they were; those from
before 0.3 are refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from paths import Train, script

from lightbase.core.config_files import renamed


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
    assert metrics == {
        name: value for name, value in result.items() if name.startswith("test/")
    }


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


def test_a_checkpoint_from_before_0_3_is_refused(trained, tmp_path, capsys):
    folder, _ = trained()
    checkpoint = read(folder / "checkpoints" / "best.ckpt")
    del checkpoint["lightbase"]
    torch.save(checkpoint, tmp_path / "old.ckpt")
    with pytest.raises(SystemExit):
        script("evaluate").main(["--ckpt_path", str(tmp_path / "old.ckpt")])
    assert "old.ckpt was written before version 0.3" in capsys.readouterr().err
