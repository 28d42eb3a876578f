"""Each experiment of configs/ trains two steps and tests, on generated data."""

from pathlib import Path

import pytest
import yaml
from attached import refuse_network
from pages import REPO
from paths import ACCELERATOR

import lightbase

CONFIGS = sorted((REPO / "configs").glob("*.yaml"))
FEW = "--data.num_train 200 --data.num_test 70 --data.batch_size 16"
FILES = "--data.data_dir {folder}/data --data.batch_size 16"
SMALLER = {
    "project.data.synthetic.SyntheticImages": FEW,
    "project.data.discs.Discs": FEW,
    "project.data.mnist.MNIST": FILES,
    "project.data.cifar10.CIFAR10": FILES,
    "project.data.features.Features": "--data.num_samples 400",
}
"""Flags for data sets; the fixtures make the files. Another data set is used as it is
on this machine; the test is skipped if the folder of its data is not here."""
TWO_STEPS = (
    "--trainer.max_epochs 1 --trainer.limit_train_batches 2 --trainer.log_every_n_steps 1 "
    "--trainer.limit_val_batches 1 --trainer.limit_test_batches 1 "
    f"--trainer.accelerator {ACCELERATOR} "
    "--trainer.default_root_dir {folder}/logs --step_timer false --device_monitor false"
)


def data_of(config: Path) -> tuple[str, Path]:
    """The class of the data, and its folder."""
    data = yaml.safe_load(config.read_text()).get("data", "")
    if isinstance(data, str):
        return data, REPO / "data"
    return data["class_path"], REPO / data.get("init_args", {}).get("data_dir", "data")


@pytest.mark.usefixtures("mnist_dir", "cifar10_dir")
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.stem)
def test_an_experiment_trains_two_steps(config, tmp_path, monkeypatch):
    refuse_network(monkeypatch)
    data, data_dir = data_of(config)
    flags = f"{SMALLER.get(data, '')} {TWO_STEPS}".format(folder=tmp_path)
    try:
        result = lightbase.main(["--config", str(config), *flags.split()])
    except SystemExit:
        if data not in SMALLER and not data_dir.exists():
            pytest.skip(f"{data_dir} is not here")
        raise
    assert result["steps"] == 2
    assert result["test/loss"] == result["test/loss"]  # no NaN


@pytest.mark.slow
@pytest.mark.usefixtures("mnist_dir", "cifar10_dir")
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.stem)
def test_the_saved_config_of_a_run_repeats_it(config: Path, tmp_path: Path) -> None:
    data, _ = data_of(config)
    if data not in SMALLER:
        pytest.skip("no generated data")
    flags = f"{SMALLER[data]} {TWO_STEPS}".format(folder=tmp_path)
    first = lightbase.main(["--config", str(config), *flags.split()])
    (saved,) = tmp_path.glob("logs/*/version_0/config.yaml")
    again = lightbase.main(["--config", str(saved)])
    assert {**again, "train_seconds": 0} == {**first, "train_seconds": 0}
    assert (
        saved.parents[1] / "version_1" / "config.yaml"
    ).read_text() == saved.read_text()
