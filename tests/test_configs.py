"""Every shipped YAML runs for a step, and so does the config that the run saves."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import REPO

CONFIGS = sorted((REPO / "configs").glob("*.yaml"))
ONE_STEP = (
    "--trainer.max_steps",
    1,
    "--trainer.log_every_n_steps",
    1,
    "--trainer.limit_val_batches",
    1,
    "--trainer.limit_test_batches",
    1,
)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.name)
@pytest.mark.usefixtures("mnist_dir", "cifar10_dir")
def test_a_shipped_config_runs_a_step_and_its_saved_config_again(
    train: Callable[..., dict[str, Any]], tmp_path: Path, config: Path
) -> None:
    size = ("--data.num_train", 200, "--data.num_test", 70) if config.name == "default.yaml" else ()
    flags = (*ONE_STEP, *size, "--trainer.accelerator", "cpu", "--data.data_dir", tmp_path / "data")
    first = train(*flags, config=str(config))
    assert first["steps"] == 1
    assert first["test/num_samples"] == 64
    name = yaml.safe_load(config.read_text())["name"]
    assert name == config.stem
    saved = tmp_path / name / "version_0" / "config.yaml"
    again = train(config=str(saved))
    assert {**again, "train_seconds": 0} == {**first, "train_seconds": 0}
    assert json.loads((tmp_path / name / "version_1" / "metrics.json").read_text()) == again
    repeated = (tmp_path / name / "version_1" / "config.yaml").read_text()
    assert repeated == saved.read_text()


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.name)
def test_a_shipped_config_is_short_and_says_how_to_run_it_and_what_to_expect(config: Path) -> None:
    text = config.read_text()
    assert len(text.splitlines()) <= 35
    header = "\n".join(line for line in text.splitlines() if line.startswith("#"))
    command = "python scripts/train.py"
    assert (command if config.name == "default.yaml" else f"{command} --config configs/{config.name}") in header
    for word in ("accuracy", "torch ", "2026-"):
        assert word in header, f"the header lacks {word!r}"
