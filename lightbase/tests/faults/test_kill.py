"""Runs that are killed at random moments and resumed by the same command end as if
nobody had touched them.

FAULT_ROUNDS=30 pytest -m slow -n 0 -s lightbase/tests/faults/test_kill.py
# other moments each time
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import programs
import pytest
import yaml
from paths import HERE, TINY
from written import checkpoint, curves, equal

ROUNDS = int(os.environ.get("FAULT_ROUNDS", 1))
SEED = int(
    os.environ.get("FAULT_SEED", time.time_ns() if "FAULT_ROUNDS" in os.environ else 0)
)
QUICK = (
    "FAULT_ROUNDS" not in os.environ
)  # no process imports torch anew, so none is killed in that
MOST_KILLS = 3  # of one run, which then goes on to its end
# what the run has left in its folder when the moment has come; "" comes at a random
# time
OF_A_START = ("", "", "version_*", "version_*/config.yaml")
OF_ANY = ("", "version_*/checkpoints/.*.part", "last epoch")
JITTER = {
    "version_*/checkpoints/.*.part": 0.001,
    "last epoch": 0.3,
}  # seconds behind it at most


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of some seconds that draws random numbers in its steps and has a
    schedule."""
    content: dict[str, Any] = yaml.safe_load(Path(TINY).read_text())
    content["data"]["class_path"] = "small.Augmented"
    content["data"]["init_args"] |= {"num_train": 2500, "num_test": 500}
    content["model"] |= {"scheduler": "CosineAnnealingLR", "scheduler_interval": "step"}
    content["trainer"] |= {"max_epochs": 8, "log_every_n_steps": 7}
    path = tmp_path_factory.mktemp("config") / "killed.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def start(config: Path, root: Path, *flags: str) -> subprocess.Popen[Any]:
    """train.py as a user starts it, from tests/, where the data module is found; output
    and errors go to files."""
    command = [
        sys.executable,
        str(HERE / "scripts" / "train.py"),
        "--config",
        str(config),
        *flags,
    ]
    with (root / "out.txt").open("wb") as out, (root / "err.txt").open("wb") as err:
        how: dict[str, Any] = {"cwd": HERE, "stdout": out, "stderr": err}
        begin = programs.start if QUICK else subprocess.Popen
        return begin([*command, "--trainer.default_root_dir", str(root)], **how)


def folder_of(root: Path) -> Path:
    """The newest run; one that was killed before its first checkpoint is not
    continued."""
    return max(root.glob("tiny/version_*"))


@pytest.fixture(scope="module")
def whole(config: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """The folder of a run that nobody touches, and its seconds."""
    root, begin = tmp_path_factory.mktemp("whole"), time.monotonic()
    assert start(config, root).wait() == 0, (root / "err.txt").read_text()
    return folder_of(root), time.monotonic() - begin


def has_come(moment: str, root: Path) -> bool:
    if moment == "last epoch":
        return "Epoch 7 " in (root / "out.txt").read_text()
    return any((root / "tiny").glob(moment))


def wait_for(
    process: Any, moment: str, root: Path, seconds: float, jitter: float
) -> None:
    """Until a moment and a little more, or until the process has ended."""
    end = time.monotonic() + seconds
    while process.poll() is None:
        if has_come(moment, root) if moment else time.monotonic() > end:
            break
        time.sleep(0.0005)
    time.sleep(jitter)


def run_to_the_end(
    config: Path,
    root: Path,
    kinds: Sequence[signal.Signals],
    draw: random.Random,
    seconds: float,
) -> None:
    """Start, stop, resume by the same command, and so on."""
    num_kills = 0
    while True:
        newest = max(root.glob("tiny/version_*"), default=root)
        can_go_on = (newest / "checkpoints" / "last.ckpt").is_file()
        flags = ["--ckpt_path", "last"] if can_go_on else []
        process = start(config, root, *flags)
        kind = draw.choice(kinds)
        moment = draw.choice(OF_ANY if flags or draw.random() < 0.5 else OF_A_START)
        if num_kills < MOST_KILLS:
            jitter = draw.uniform(0, JITTER.get(moment, 0.02))
            wait_for(process, moment, root, draw.uniform(0, seconds), jitter)
            if process.poll() is None:
                process.send_signal(kind)
        status = process.wait(timeout=300)
        error = (root / "err.txt").read_text()
        if status == 0:
            return
        assert status in (-kind, 128 + kind), error
        assert "Traceback" not in error, error
        num_kills += 1


def assert_same(folder: Path, whole: Path) -> None:
    for name in ("last", "best"):
        resumed, expected = checkpoint(folder, name), checkpoint(whole, name)
        assert resumed["global_step"] == expected["global_step"]
        assert equal(resumed["state_dict"], expected["state_dict"])
    assert curves(folder) == curves(whole)
    result, other = (
        json.loads((run / "metrics.json").read_text()) for run in (folder, whole)
    )
    assert "test/acc" in other
    assert result | {"train_seconds": 0} == other | {"train_seconds": 0}


@pytest.mark.slow
@pytest.mark.parametrize(
    "kinds",
    [[signal.SIGKILL], [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]],
    ids=["kill", "stop"],
)
@pytest.mark.linux
def test_a_run_that_is_stopped_many_times_ends_as_one_that_is_not(
    config, whole, tmp_path, kinds
):
    draw = random.Random(SEED)
    print(f"\nseed {SEED}")
    for number in range(ROUNDS):
        root = tmp_path / str(number)
        root.mkdir()
        run_to_the_end(config, root, kinds, draw, whole[1])
        assert_same(folder_of(root), whole[0])
