"""Each experiment of configs/ trains two steps and tests, on generated data."""

import math
from pathlib import Path

import pytest
import yaml
from pages import PACKAGE, REPO, SHORT

import lightbase

CONFIGS = sorted((REPO / "configs").glob("*.yaml"))
FEW = "--data.num_train 200 --data.num_test 70 --data.batch_size 16"
SMALLER = {
    "synthetic.SyntheticImages": FEW,
    "discs.Discs": FEW,
    "mnist.MNIST": "--data.batch_size 16",
    "cifar10.CIFAR10": "--data.batch_size 16",
    "features.Features": "--data.num_samples 400",
}
"""Flags by the data set. The fixtures make the files."""

LARGE = ["cifar10_94"]
"""YAMLs whose two steps take longer than the others of the template together."""


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(path, marks=[pytest.mark.slow] * (path.stem in LARGE))
        for path in CONFIGS
    ],
    ids=lambda config: config.stem,
)
@pytest.mark.usefixtures("user_folder", "mnist_dir", "cifar10_dir", "offline")
def test_an_experiment_trains_two_steps(config: Path) -> None:
    data = yaml.safe_load(config.read_text()).get("data", "")
    if isinstance(data, dict):
        data = data["class_path"]
    name = data.removeprefix(f"{PACKAGE}.data.")
    if name not in SMALLER:
        pytest.skip(f"no generated data for {data}")
    flags = f"{SMALLER[name]} {SHORT} --trainer.limit_train_batches 2"
    result = lightbase.main(["--config", str(config), *flags.split()])
    assert result["steps"] == 2
    assert math.isfinite(result["test/loss"])
