"""Runs that version 0.3 has written evaluate and resume. Their package has another name
than today's. Files from before 0.3 are refused.

runs_0.3/kept is the folder of a run of commit 651ef6d. Its package was `project`, and
Ctrl-C stopped it after 3 of the 19 steps of its second epoch. In its checkpoints only
the paths of its folder were changed, to relative ones.
"""

import shutil
from pathlib import Path

import pytest
import torch
from paths import HERE, argv, fails, script

from lightbase.config.yaml_files import renamed


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """Return the folder of a copy of the run. `tmp_path` is its folder of runs."""
    shutil.copytree(HERE / "runs_0.3" / "kept", tmp_path / "kept")
    return tmp_path / "kept" / "version_0"


def test_a_run_of_0_3_evaluates_as_it_did_there_and_one_of_0_2_is_refused(kept, capsys):
    best = kept / "checkpoints" / "best.ckpt"
    flags = ["--ckpt_path", str(best)]
    metrics = script("evaluate").main(flags)
    expected = {"test/loss": 1.2696797, "test/acc": 0.37333333, "test/num_samples": 75}
    assert metrics == pytest.approx(expected, rel=1e-4)
    content = torch.load(best, weights_only=True)
    assert content["package"] == "project", "the package of this repository is example"
    del content["lightbase"]
    torch.save(content, best)
    error = fails(capsys, 1, lambda: script("evaluate").main(flags))
    assert "the config that train.py saves from version 0.3 on" in error


def test_a_run_of_0_3_resumes_to_the_result_of_an_uninterrupted_one(
    kept: Path, tmp_path: Path
) -> None:
    more_epochs = "--name kept --ckpt_path last --trainer.max_epochs 4"
    root = ("--trainer.default_root_dir", tmp_path)
    metrics = script("train").main(argv(more_epochs, *root))
    assert metrics["steps"] == 76
    assert metrics["test/loss"] == pytest.approx(0.61738133, rel=1e-4)
    assert metrics["test/acc"] == pytest.approx(0.74666667, rel=1e-4)
    assert (kept / "metrics.json").is_file()


def test_classes_that_version_0_3_had_elsewhere_are_found() -> None:
    moved = {
        "lightbase.Features": "example.data.features.Features",
        "lightbase.data.images.ImageFolder": "lightbase.ImageFolder",
        "lightbase.optim.WarmupCosineLR": "lightbase.WarmupCosineLR",
    }
    for before, now in moved.items():
        assert renamed({"class_path": before}, "project") == {"class_path": now}
        assert renamed({"data": before}, "project") == {"data": now}
        assert renamed({"class_path": now}, "example") == {"class_path": now}
    for before in ("lightbase.core.arrays", "lightbase.data.arrays"):
        arrays = renamed({"class_path": f"{before}.ArrayData"}, "project")
        assert arrays == {"class_path": "lightbase.data.module.ArrayData"}
    assert renamed(["lightbase.mine.Mine"], "project") == ["lightbase.mine.Mine"]


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
