"""Checkpoints of the package under another name evaluate as they were; those from
before 0.3 are refused."""

from pathlib import Path
from typing import Any

import torch
from paths import Trained, fails, script

from lightbase.core.config_files import renamed


def evaluate(path: Path) -> dict[str, Any]:
    return script("evaluate").main(["--ckpt_path", str(path)])


def test_another_name_of_the_package_is_todays_and_a_file_of_0_2_is_refused(
    trained: Trained, tmp_path: Path, capsys
) -> None:
    folder, result = trained()
    path = tmp_path / "old.ckpt"
    checkpoint = torch.load(folder / "checkpoints" / "best.ckpt", weights_only=True)
    checkpoint["package"] = "shoes"
    config = checkpoint["config"]
    config["model"]["class_path"] = "shoes.classifier.Classifier"
    config["model"]["init_args"]["net"]["class_path"] = "shoes.models.mlp.MLP"
    config["data"]["class_path"] = "shoes.data.synthetic.SyntheticImages"
    torch.save(checkpoint, path)
    metrics = evaluate(path)
    assert metrics["test/acc"] == result["test/acc"]
    assert metrics["test/loss"] == result["test/loss"]
    del checkpoint["lightbase"]
    torch.save(checkpoint, path)
    error = fails(capsys, 1, lambda: evaluate(path))
    assert "the config that train.py saves from version 0.3 on" in error


def test_only_import_paths_of_the_package_are_renamed() -> None:
    args = {"text": "shoes.x", "optimizer": "SGD", "scheduler": "shoes.schedules.Mine"}
    callbacks = [{"class_path": "shoes.callbacks.Mine"}, {"class_path": "shoestring.X"}]
    config = {"model": {"init_args": args}, "trainer": {"callbacks": callbacks}}
    config = renamed(config, "shoes")
    assert config["trainer"]["callbacks"] == [
        {"class_path": "example.callbacks.Mine"},
        {"class_path": "shoestring.X"},
    ]
    args["scheduler"] = "example.schedules.Mine"
    assert config["model"]["init_args"] == args
