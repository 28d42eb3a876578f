"""Modules that build their own optimizers end, after a stop and a resume, as if nothing had
happened.

pytest -m "" -n 0 tests/faults/test_own_optimizers.py   # each module at each moment
"""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import programs
import pytest
import yaml
from paths import HERE, TINY
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_training import equal, weights

from lightbase.run.train import main

MODULES = {
    "OneCycle": "Classifier",
    "Cosine": "Classifier",
    "Lambda": "Classifier",
    "Plateau": "Classifier",
    "TwoGroups": "Classifier",
    "Estimated": "Classifier",
    "Plain": "LightningModule",
    "PlainLambda": "LightningModule",
    "PlainPlateau": "LightningModule",
    "PlainEstimated": "LightningModule",
    "PlainCallable": "LightningModule",
    "Adversarial": "LightningModule",
}
MOMENTS = {  # epoch, batch and signal of each stop, in 4 epochs of 10 batches
    "killed after an epoch": ["2 0 SIGKILL"],
    "signal in an epoch": ["1 3 SIGTERM"],
    "stopped three times": ["1 3 SIGINT", "1 6 SIGTERM", "3 4 SIGKILL"],
}
QUICK = [("OneCycle", "signal in an epoch"), ("PlainEstimated", "signal in an epoch")]
CASES = [
    pytest.param(module, moment, marks=[] if (module, moment) in QUICK else pytest.mark.slow)
    for module in MODULES
    for moment in MOMENTS
]


def write_config(module: str, root: Path) -> Path:
    content: dict[str, Any] = yaml.safe_load(Path(TINY).read_text())
    init_args = {"net": content["model"]["net"]} if MODULES[module] == "Classifier" else {}
    if module == "PlainCallable":
        init_args = {"optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lr": 0.02}}}
    content["name"], content["monitor"] = "cut", "val/loss"
    content["model"] = {"class_path": f"own_optimizers.{module}", "init_args": init_args}
    content["data"]["init_args"]["num_train"] = 180
    content["trainer"] |= {"max_epochs": 4, "log_every_n_steps": 1, "default_root_dir": str(root)}
    content["trainer"]["callbacks"] = [{"class_path": "own_optimizers.Stop"}]
    path = root / f"{module}.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def kill(args: list[str]) -> int:
    """Run train.py in a process of its own, which ends itself; its status."""
    command = [sys.executable, "scripts/train.py", *args]
    environment = os.environ | {"PYTHONPATH": f"{Path(__file__).parent}:{HERE}"}
    return programs.start(command, cwd=HERE, env=environment, stdout=subprocess.DEVNULL).wait(60)


def curves(folder: Path) -> dict[str, dict[int, float]]:
    """The newest point of each step: TensorBoard may read the files of one second in either
    order."""
    found: dict[str, dict[int, float]] = {}
    for file in sorted(folder.glob("events*"), key=lambda file: file.stat().st_mtime_ns):
        events = EventAccumulator(str(file)).Reload()
        for tag in events.Tags()["scalars"]:
            found.setdefault(tag, {}).update(
                {event.step: event.value for event in events.Scalars(tag)}
            )
    return found


@pytest.fixture(autouse=True)
def own_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a module's run that nobody stops."""
    folders: dict[str, Path] = {}

    def folder(module: str) -> Path:
        if module not in folders:
            root = tmp_path_factory.mktemp("whole")
            main(["--config", str(write_config(module, root))])
            folders[module] = root / "cut" / "version_0"
        return folders[module]

    return folder


@pytest.mark.linux
@pytest.mark.parametrize(("module", "moment"), CASES)
def test_a_run_that_is_stopped_ends_as_one_that_is_not(
    whole, tmp_path, monkeypatch, module, moment
):
    expected = whole(module)
    folder = stopped_and_resumed(module, MOMENTS[moment], tmp_path, monkeypatch)
    assert equal(weights(folder), weights(expected))
    found, points = curves(folder), curves(expected)
    assert len(set(points["lr"].values())) > 1 or module == "PlainCallable"
    for tag in ("lr", "train/loss", "val/loss"):
        assert found[tag] == points[tag]


@pytest.mark.linux
def test_a_plateau_that_is_seen_in_mid_epoch_counts_after_a_stop_as_well(tmp_path, monkeypatch):
    flags = (
        "--trainer.val_check_interval",
        "0.7",
    )  # nothing is validated between the stop and the epoch's end
    main(["--config", str(write_config("Plateau", tmp_path)), *flags, "--name", "whole"])
    expected = tmp_path / "whole" / "version_0"
    rates = list(curves(expected)["lr"].values())
    assert rates == pytest.approx([0.05] * 20 + [0.005] * 10 + [0.0005] * 10), (
        "as Lightning steps it"
    )
    folder = stopped_and_resumed("Plateau", ["1 8 SIGTERM"], tmp_path, monkeypatch, flags)
    assert equal(weights(folder), weights(expected))
    assert curves(folder)["lr"] == curves(expected)["lr"]


def stopped_and_resumed(
    module: str,
    stops: list[str],
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    flags: tuple[str, ...] = (),
) -> Path:
    """The folder of a run that is stopped and resumed by the same command, to its end."""
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


def test_what_only_the_checkpoint_knows_is_refused_and_a_new_run_takes_it(tmp_path, capsys):
    command = ["--config", str(write_config("OneCycle", tmp_path))]
    main([*command, "--trainer.max_epochs", "1"])
    last = tmp_path / "cut" / "version_0" / "checkpoints" / "last.ckpt"
    for flag, value in (
        ("--model.lr", "0.5"),
        ("--model.scheduler", "StepLR"),
        ("--model.optimizer", "Adam"),
    ):
        with pytest.raises(SystemExit) as caught:
            main([*command, "--ckpt_path", "last", flag, value])
        assert caught.value.code == 2
        first, second = capsys.readouterr().err.splitlines()
        assert f"{flag} {value}" in first
        assert f"without --ckpt_path and with --model.weights {last}" in second
    main([*command, "--model.weights", str(last), "--model.lr", "0.5", "--trainer.max_epochs", "1"])


def test_a_schedule_that_cannot_be_longer_is_told_before(tmp_path, capsys):
    main(["--config", str(write_config("OneCycle", tmp_path))])
    assert "a resume with another length does not stretch the schedule" in capsys.readouterr().out


def test_an_optimizer_that_is_never_built_is_not_tried(tmp_path: Path) -> None:
    """A subclass may have names of its own for its optimizers and schedules."""
    flags = ("--model.optimizer", "mine", "--model.scheduler", "yours", "--trainer.max_epochs", "1")
    assert main(["--config", str(write_config("OneCycle", tmp_path)), *flags])["epochs"] == 1
