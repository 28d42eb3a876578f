"""Runs that version 0.3 has written evaluate and resume.

runs_0.3/kept is the folder of a run of commit 651ef6d. Its package was `project`, and
Ctrl-C stopped it after 3 of the 19 steps of its second epoch. In its checkpoints only
the paths of its folder were changed, to relative ones.
"""

import shutil
from pathlib import Path

import pytest
from paths import HERE, argv, script


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """Return the folder of a copy of the run. `tmp_path` is its folder of runs."""
    shutil.copytree(HERE / "runs_0.3" / "kept", tmp_path / "kept")
    return tmp_path / "kept" / "version_0"


def test_a_run_of_0_3_evaluates_as_it_did_there(kept: Path) -> None:
    best = kept / "checkpoints" / "best.ckpt"
    metrics = script("evaluate").main(["--ckpt_path", str(best)])
    expected = {"test/loss": 1.2696797, "test/acc": 0.37333333, "test/num_samples": 75}
    assert metrics == pytest.approx(expected, rel=1e-4)


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
