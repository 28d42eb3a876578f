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
from paths import HERE, TINY
from written import curves, equal, weights

from lightbase.commands.train import main

MODULES = ["Plateau", "Estimated"]
PLAIN = ["PlainPlateau", "Adversarial"]
STOPS = [
    "1 3 SIGINT",
    "1 6 SIGTERM",
    "3 4 SIGKILL",
]  # epoch and batch, in 4 epochs of 10 batches
CASES = [pytest.param(module, marks=pytest.mark.slow) for module in ("Plateau", *PLAIN)]


def write_config(module: str, root: Path) -> Path:
    content: dict[str, Any] = yaml.safe_load(Path(TINY).read_text())
    init_args = {"net": content["model"]["net"]} if module in MODULES else {}
    content["name"], content["monitor"] = "cut", "val/loss"
    content["model"] = {
        "class_path": f"own_optimizers.{module}",
        "init_args": init_args,
    }
    content["data"]["init_args"]["num_train"] = 180
    content["trainer"] |= {
        "max_epochs": 4,
        "log_every_n_steps": 1,
        "default_root_dir": str(root),
    }
    content["trainer"]["callbacks"] = [{"class_path": "own_optimizers.Stop"}]
    path = root / f"{module}.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def kill(args: list[str]) -> int:
    """Run train.py in a process of its own, which ends itself; its status."""
    command = [sys.executable, "scripts/train.py", *args]
    environment = os.environ | {"PYTHONPATH": f"{Path(__file__).parent}:{HERE}"}
    process = programs.start(
        command, cwd=HERE, env=environment, stdout=subprocess.DEVNULL
    )
    status = process.wait(60)
    time.sleep(
        1
    )  # TensorBoard reads event files of one second in the order of their processes
    return status


@pytest.mark.linux
@pytest.mark.parametrize("module", ["Estimated", *CASES])
def test_a_run_that_is_stopped_ends_as_one_that_is_not(tmp_path, monkeypatch, module):
    main(["--config", str(write_config(module, tmp_path)), "--name", "whole"])
    expected = tmp_path / "whole" / "version_0"
    folder = stopped_and_resumed(module, STOPS, tmp_path, monkeypatch)
    assert equal(weights(folder), weights(expected))
    resumed, points = curves(folder), curves(expected)
    assert len({rate for _, rate in points["lr"]}) > 1
    for tag in ("lr", "train/loss", "val/loss"):
        assert resumed[tag] == points[tag]


@pytest.mark.linux
def test_a_plateau_that_is_seen_in_mid_epoch_counts_after_a_stop_as_well(
    tmp_path, monkeypatch
):
    # nothing is validated between the stop and the epoch's end
    flags = ("--trainer.val_check_interval", "0.7")
    main(
        ["--config", str(write_config("Plateau", tmp_path)), *flags, "--name", "whole"]
    )
    expected = tmp_path / "whole" / "version_0"
    rates = [0.05] * 20 + [0.005] * 10 + [0.0005] * 10  # as Lightning steps it
    assert [rate for _, rate in curves(expected)["lr"]] == pytest.approx(rates)
    folder = stopped_and_resumed(
        "Plateau", ["1 8 SIGTERM"], tmp_path, monkeypatch, flags
    )
    assert equal(weights(folder), weights(expected))
    assert curves(folder)["lr"] == curves(expected)["lr"]


def stopped_and_resumed(module, stops, root, monkeypatch, flags=()) -> Path:
    """The folder of a run that is stopped and resumed by the same command, to its
    end."""
    command = ["--config", str(write_config(module, root)), *flags]
    for stop in stops:
        monkeypatch.setenv("STOP_AT", stop)
        if stop.endswith("SIGKILL"):
            assert kill(command) == -9
        else:
            with pytest.raises(SystemExit):
                main(command)
        command += [] if "--ckpt_path" in command else ["--ckpt_path", "last"]
    monkeypatch.delenv("STOP_AT")
    main(command)
    return root / "cut" / "version_0"


def test_an_optimizer_that_is_never_built_is_not_tried(tmp_path):
    """A subclass may have names of its own for its optimizers and schedules."""
    flags = (
        "--model.optimizer",
        "mine",
        "--model.scheduler",
        "yours",
        "--trainer.max_epochs",
        "1",
    )
    assert (
        main(["--config", str(write_config("Plateau", tmp_path)), *flags])["epochs"]
        == 1
    )
