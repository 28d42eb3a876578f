"""Each experiment of configs/ trains two steps and tests, on generated data."""

import math
from pathlib import Path

import pytest
import yaml
from pages import REPO
from paths import ACCELERATOR

import lightbase

CONFIGS = sorted((REPO / "configs").glob("*.yaml"))
EACH = pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.stem)
FEW = "--data.num_train 200 --data.num_test 70 --data.batch_size 16"
FILES = "--data.data_dir {folder}/data --data.batch_size 16"
SMALLER = {
    "project.data.synthetic.SyntheticImages": FEW,
    "project.data.discs.Discs": FEW,
    "project.data.mnist.MNIST": FILES,
    "project.data.cifar10.CIFAR10": FILES,
    "project.data.features.Features": "--data.num_samples 400",
}
"""Flags by the data set. The fixtures make the files."""
TWO_STEPS = (
    "--trainer.max_epochs 1 --trainer.limit_train_batches 2 "
    "--trainer.limit_val_batches 1 --trainer.limit_test_batches 1 "
    f"--trainer.log_every_n_steps 1 --trainer.accelerator {ACCELERATOR} "
    "--trainer.default_root_dir {folder}/logs --step_timer false --device_monitor false"
)


def train_two_steps(config: Path, folder: Path) -> dict[str, float]:
    """Train an experiment on generated data."""
    data = yaml.safe_load(config.read_text()).get("data", "")
    if isinstance(data, dict):
        data = data["class_path"]
    if data not in SMALLER:
        pytest.skip(f"no generated data for {data}")
    flags = f"{SMALLER[data]} {TWO_STEPS}".format(folder=folder)
    return lightbase.main(["--config", str(config), *flags.split()])


@EACH
@pytest.mark.usefixtures("mnist_dir", "cifar10_dir", "offline")
def test_an_experiment_trains_two_steps(config: Path, tmp_path: Path) -> None:
    result = train_two_steps(config, tmp_path)
    assert result["steps"] == 2
    assert math.isfinite(result["test/loss"])


@EACH
@pytest.mark.slow
@pytest.mark.usefixtures("mnist_dir", "cifar10_dir", "offline")
def test_the_saved_config_of_a_run_repeats_it(config: Path, tmp_path: Path) -> None:
    first = train_two_steps(config, tmp_path)
    (saved,) = tmp_path.glob("logs/*/version_0/config.yaml")
    again = lightbase.main(["--config", str(saved)])
    assert {**again, "train_seconds": 0} == {**first, "train_seconds": 0}
    saved_again = saved.parents[1] / "version_1" / "config.yaml"
    assert saved_again.read_text() == saved.read_text()
