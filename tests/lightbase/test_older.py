"""Checkpoints of the package under another name evaluate as they were; those from before 0.1 are
refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from paths import script

from lightbase.resume.checkpoints import rename_classes

Train = Callable[..., dict[str, Any]]


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
    found = script("evaluate").main(["--ckpt_path", str(path)])
    assert found == {name: value for name, value in result.items() if name.startswith("test/")}


def test_only_import_paths_of_the_package_are_renamed() -> None:
    callbacks = [
        {"class_path": "shoes.callbacks.Own"},
        {"class_path": "shoestring.Own"},
        {"class_path": "torch.nn.X"},
    ]
    args = {"text": "shoes.x", "optimizer": "SGD", "test_views": "shoes.data.transforms.mirrored"}
    config = {"model": {"init_args": args}, "trainer": {"callbacks": callbacks}}
    rename_classes(config, "shoes")
    own, *others = callbacks
    assert own["class_path"].endswith(".callbacks.Own")
    assert not own["class_path"].startswith("shoes.")
    assert [other["class_path"] for other in others] == ["shoestring.Own", "torch.nn.X"]
    assert args == {
        "text": "shoes.x",
        "optimizer": "SGD",
        "test_views": "lightbase.data.transforms.mirrored",
    }


def test_a_checkpoint_from_before_0_1_is_refused(
    trained: Callable[..., tuple[Path, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = trained()
    checkpoint = read(folder / "checkpoints" / "best.ckpt")
    del checkpoint["package"]
    torch.save(checkpoint, tmp_path / "old.ckpt")
    with pytest.raises(SystemExit):
        script("evaluate").main(["--ckpt_path", str(tmp_path / "old.ckpt")])
    assert "old.ckpt was written before version 0.1" in capsys.readouterr().err
