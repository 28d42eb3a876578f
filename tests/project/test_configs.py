"""Every shipped YAML runs for two steps, and so does the config that the run saves."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from pages import REPO
from paths import argv
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_prediction_figures import events

from lightbase.watch.step_timer import PHASES

# those that ship; of a user's own YAMLs these tests know nothing
MEASURES = {
    "default": "acc",
    "mnist_mlp": "acc",
    "cifar10_cnn": "acc",
    "small_net": "acc",
    "discs_mlp": "mae",
}
MEASURES |= {"mnist_cnn": "acc", "cifar10_94": "acc"}
FIGURES = {"acc": ("confusion_matrix", "predictions", "mistakes"), "mae": ("predictions",)}
TWO_STEPS = argv(
    "--trainer.max_epochs 1 --trainer.limit_train_batches 2 --trainer.log_every_n_steps 1",
    "--trainer.limit_val_batches 1 --trainer.limit_test_batches 1",
)


@pytest.fixture(params=MEASURES)
def config(request: pytest.FixtureRequest) -> Path:
    path = REPO / "configs" / f"{request.param}.yaml"
    if not path.exists():
        pytest.skip("deleted")
    return path


@pytest.mark.usefixtures("mnist_dir", "cifar10_dir")
@pytest.mark.slow
def test_a_shipped_config_runs_two_steps_and_its_saved_config_again(
    train: Callable[..., dict[str, Any]], tmp_path: Path, config: Path
) -> None:
    size = {
        "default": ("--data.num_train", 200, "--data.num_test", 70),
        "discs_mlp": ("--data.num_train", 200, "--data.num_test", 70),
        "small_net": ("--data.num_samples", 400),
        "mnist_cnn": ("--data.batch_size", 64),
        "cifar10_94": ("--data.batch_size", 64),
    }.get(config.stem, ())
    flags = argv(*TWO_STEPS, *size, "--trainer.accelerator cpu --data.data_dir", tmp_path / "data")
    first = train(*flags, config=str(config))
    assert first["steps"] == 2
    assert first["test/num_samples"] == 64
    name = yaml.safe_load(config.read_text())["name"]
    assert name == config.stem
    saved = tmp_path / name / "version_0" / "config.yaml"
    check_tags(
        events(saved.parent),
        MEASURES[config.stem],
        "features" if config.stem == "small_net" else "images",
    )
    again = train("--figures_every_n_epochs", 0, config=str(saved))
    assert {**again, "train_seconds": 0} == {**first, "train_seconds": 0}
    assert json.loads((tmp_path / name / "version_1" / "metrics.json").read_text()) == again
    repeated = (tmp_path / name / "version_1" / "config.yaml").read_text()
    assert (
        repeated.replace("figures_every_n_epochs: 0", "figures_every_n_epochs: 5")
        == saved.read_text()
    )


def check_tags(found: EventAccumulator, measure: str, kind: str) -> None:
    """All that docs/tensorboard.md speaks of is there."""
    assert set(found.Tags()["scalars"]) >= {
        *(f"{stage}/{name}" for stage in ("train", "val", "test") for name in ("loss", measure)),
        *(
            "lr",
            "test/num_samples",
            "watch/device/cpu_percent",
            "watch/device/memory_gib",
            "watch/step_time/step_ms",
        ),
        *(f"watch/step_time/{phase}_percent" for phase in PHASES),
    }
    of_evaluations = [f"view/{name}/{on}" for name in FIGURES[measure] for on in ("val", "test")]
    drawn = [*of_evaluations, "view/inputs/train"] if kind == "images" else []
    assert set(found.Tags()["images"]) == {"watch/step_time/pie", *drawn}
    assert found.Tags()["graph"] == (kind == "images")


def test_a_shipped_config_is_short_and_says_how_to_run_it_and_what_to_expect(config: Path) -> None:
    text = config.read_text()
    assert len(text.splitlines()) <= 35
    header = "\n".join(line for line in text.splitlines() if line.startswith("#"))
    command = "python scripts/train.py"
    assert (
        command if config.name == "default.yaml" else f"{command} --config configs/{config.name}"
    ) in header
    for word in (
        {"acc": "accuracy", "mae": "absolute error"}[MEASURES[config.stem]],
        "torch ",
        "2026-",
    ):
        assert word in header, f"the header lacks {word!r}"
