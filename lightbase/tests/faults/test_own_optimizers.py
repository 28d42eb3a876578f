"""Modules that build their own optimizers end, after stops and resumes, as if nothing
had happened.

pytest -m "" -n 0 lightbase/tests/faults/test_own_optimizers.py   # each module
"""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import programs
import pytest
import yaml
from paths import HERE, TINY, script
from written import curves, equal, weights

STOPS = ["1 3 SIGINT", "1 6 SIGTERM", "3 4 SIGKILL"]
"""Epochs and batches, in 4 epochs of 10 batches."""
SLOW = ("Plateau", "Plain", "Adversarial")
CASES = [pytest.param(module, marks=pytest.mark.slow) for module in SLOW]


def config_flags(module: str, root: Path) -> list[str]:
    """Return the flags that train a module of own_optimizers.py below `root`."""
    content: dict[str, Any] = yaml.safe_load(Path(TINY).read_text())
    model: dict[str, Any] = {"class_path": f"own_optimizers.{module}"}
    if module in ("Plateau", "Estimated"):
        model["init_args"] = {"net": content["model"]["net"]}
    content |= {"name": "cut", "monitor": "val/loss", "model": model}
    content["data"]["init_args"]["num_train"] = 180
    content["trainer"] |= {
        "max_epochs": 4,
        "log_every_n_steps": 1,
        "default_root_dir": str(root),
        "callbacks": [{"class_path": "own_optimizers.Stop"}],
    }
    path = root / f"{module}.yaml"
    path.write_text(yaml.safe_dump(content))
    return ["--config", str(path)]


def kill(flags: list[str]) -> None:
    """Run train.py in a process of its own, which kills itself."""
    command = [sys.executable, "scripts/train.py", *flags]
    environment = os.environ | {"PYTHONPATH": f"{Path(__file__).parent}:{HERE}"}
    process = programs.start(
        command, cwd=HERE, env=environment, stdout=subprocess.DEVNULL
    )
    assert process.wait(60) == -9
    # TensorBoard reads event files of one second in the order of their processes
    time.sleep(1)


def assert_stops_change_nothing(
    flags: list[str], stops: list[str], root: Path, monkeypatch: pytest.MonkeyPatch
) -> list[float]:
    """Train a run as a whole, and another one that is stopped and resumed by the same
    command. Return the rates of the steps."""
    train = script("train").main
    train([*flags, "--name", "whole"])
    for stop in stops:
        monkeypatch.setenv("STOP_AT", stop)
        if stop.endswith("SIGKILL"):
            kill(flags)
        else:
            with pytest.raises(SystemExit):
                train(flags)
        if stop == stops[0]:
            flags = [*flags, "--ckpt_path", "last"]
    monkeypatch.delenv("STOP_AT")
    train(flags)
    folders = [root / name / "version_0" for name in ("cut", "whole")]
    assert equal(*map(weights, folders))
    resumed, expected = map(curves, folders)
    for name in ("lr", "train/loss", "val/loss"):
        assert resumed[name] == expected[name]
    return [rate for _, rate in expected["lr"]]


@pytest.mark.linux
@pytest.mark.parametrize("module", ["Estimated", *CASES])
def test_a_run_that_is_stopped_ends_as_one_that_is_not(tmp_path, monkeypatch, module):
    flags = config_flags(module, tmp_path)
    rates = assert_stops_change_nothing(flags, STOPS, tmp_path, monkeypatch)
    assert len({*rates}) > 1


@pytest.mark.linux
def test_a_plateau_that_is_seen_in_mid_epoch_counts_after_a_stop_as_well(
    tmp_path, monkeypatch
):
    flags = config_flags("Plateau", tmp_path)
    # names that the subclass does not use are not tried
    flags += ["--model.optimizer", "mine", "--model.scheduler", "yours"]
    # nothing is validated between the stop and the epoch's end
    flags += ["--trainer.val_check_interval", "0.7"]
    found = assert_stops_change_nothing(flags, ["1 8 SIGTERM"], tmp_path, monkeypatch)
    rates = [0.05] * 20 + [0.005] * 10 + [0.0005] * 10  # as Lightning steps it
    assert found == pytest.approx(rates)
