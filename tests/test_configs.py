"""Every shipped YAML runs for a step, and so does the config that the run saves."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import REPO
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_prediction_figures import events

from project.callbacks.phase_clock import PHASES

CONFIGS = sorted((REPO / "configs").glob("*.yaml"))
FIGURES = ("confusion_matrix", "predictions", "mistakes")
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
    size = {
        "default": ("--data.num_train", 200, "--data.num_test", 70),
        "small_net": ("--data.num_samples", 400),
    }.get(config.stem, ())
    flags = (*ONE_STEP, *size, "--trainer.accelerator", "cpu", "--data.data_dir", tmp_path / "data")
    first = train(*flags, config=str(config))
    assert first["steps"] == 1
    assert first["test/num_samples"] == 64
    name = yaml.safe_load(config.read_text())["name"]
    assert name == config.stem
    saved = tmp_path / name / "version_0" / "config.yaml"
    check_tags(events(saved.parent), "image" if config.stem != "small_net" else "features")
    again = train("--figures_every_n_epochs", 0, config=str(saved))
    assert {**again, "train_seconds": 0} == {**first, "train_seconds": 0}
    assert json.loads((tmp_path / name / "version_1" / "metrics.json").read_text()) == again
    repeated = (tmp_path / name / "version_1" / "config.yaml").read_text()
    assert repeated.replace("figures_every_n_epochs: 0", "figures_every_n_epochs: 5") == saved.read_text()


def check_tags(found: EventAccumulator, kind: str) -> None:
    """All that docs/tensorboard.md speaks of is there."""
    assert set(found.Tags()["scalars"]) >= {
        *("train/loss", "train/acc", "lr", "val/loss", "val/acc", "test/loss", "test/acc", "test/num_samples"),
        *("device/cpu_percent", "device/memory_gib", "step_time/step_ms"),
        *(f"step_time/{phase}_percent" for phase in PHASES),
    }
    of_evaluations = [f"{name}/{on}" for name in FIGURES for on in ("val", "test")] if kind == "image" else []
    inputs = ["inputs/train"] if kind == "image" else []
    assert set(found.Tags()["images"]) == {"step_time/pie", "step_time/epochs", *of_evaluations, *inputs}
    assert found.Tags()["graph"] == (kind == "image")


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.name)
def test_a_shipped_config_is_short_and_says_how_to_run_it_and_what_to_expect(config: Path) -> None:
    text = config.read_text()
    assert len(text.splitlines()) <= 35
    header = "\n".join(line for line in text.splitlines() if line.startswith("#"))
    command = "python scripts/train.py"
    assert (command if config.name == "default.yaml" else f"{command} --config configs/{config.name}") in header
    for word in ("accuracy", "torch ", "2026-"):
        assert word in header, f"the header lacks {word!r}"
