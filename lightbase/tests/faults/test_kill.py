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

import programs
import pytest
from paths import HERE, TINY, argv
from written import checkpoint, curves, equal

ROUNDS = int(os.environ.get("FAULT_ROUNDS", 1))
SEED = 0
if "FAULT_ROUNDS" in os.environ:
    SEED = int(os.environ.get("FAULT_SEED", time.time_ns()))
MOST_KILLS = 3  # of one run, which then goes on to its end
# A run of some seconds that draws random numbers in its steps and has a schedule.
FLAGS = argv(
    "--data small.Augmented --data.num_train 2500 --data.num_test 500",
    "--model.scheduler CosineAnnealingLR --model.scheduler_interval step",
    "--trainer.max_epochs 8 --trainer.log_every_n_steps 7",
    "--checkpoint_minutes 0.003",  # about twice an epoch
)
TWO = argv("--trainer.devices 2 --trainer.strategy ddp")
# what the run has left in its folder when the moment has come; "" comes at a random
# time
MOMENTS = ("", "version_*/config.yaml", "version_*/checkpoints/.*.part")


def start(root, *flags):
    """train.py as a user starts it, from tests/, where the data module is found; errors
    go to a file."""
    command = [sys.executable, str(HERE / "scripts" / "train.py"), *flags]
    command += ["--trainer.default_root_dir", str(root)]
    with (root / "err.txt").open("wb") as err:
        return programs.start(command, cwd=HERE, stdout=subprocess.DEVNULL, stderr=err)


def newest(root):
    """The newest run; one that was killed before its first checkpoint is not
    continued."""
    return max(root.glob("tiny/version_*"), default=root)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, request):
    """The folder of a run that nobody touches, its seconds and its flags."""
    flags = [*FLAGS, *request.param]
    root, begin = tmp_path_factory.mktemp("whole"), time.monotonic()
    status = start(root, "--config", TINY, *flags).wait()
    assert status == 0, (root / "err.txt").read_text()
    return newest(root), time.monotonic() - begin, flags


def wait_for(process, moment, root, seconds):
    """Until a moment, or until the process has ended."""
    end = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < end:
        if moment and any(root.glob(f"tiny/{moment}")):
            break
        time.sleep(0.0005)


def run_to_the_end(root, kinds, draw, seconds, run_flags):
    """Start, stop, resume, and so on."""
    for number in range(MOST_KILLS + 1):
        flags = ["--config", TINY, *run_flags]
        if (newest(root) / "checkpoints" / "last.ckpt").is_file():
            flags += ["--ckpt_path", "last"]
        process = start(root, *flags)
        kind = draw.choice(kinds)
        if number < MOST_KILLS:
            # earlier, Python itself starts, which handles no signal
            after = draw.uniform(0.3, seconds)
            wait_for(process, draw.choice(MOMENTS), root, after)
            time.sleep(draw.uniform(0, 0.02))
            if process.poll() is None:
                process.send_signal(kind)
        status = process.wait(timeout=300)
        error = (root / "err.txt").read_text()
        if status == 0:
            return
        assert status in (-kind, 128 + kind), error
        assert "Traceback" not in error, error


@pytest.mark.slow
@pytest.mark.parametrize(
    ("whole", "kinds"),
    [
        ([], [signal.SIGKILL]),
        ([], [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]),
        (TWO, [signal.SIGKILL]),
    ],
    ids=["kill", "stop", "kill two"],
    indirect=["whole"],
)
@pytest.mark.linux
def test_a_run_that_is_stopped_many_times_ends_as_one_that_is_not(
    whole, tmp_path, kinds
):
    draw = random.Random(SEED)
    print(f"\nseed {SEED}")
    for number in range(ROUNDS):
        root = tmp_path / str(number)
        root.mkdir()
        run_to_the_end(root, kinds, draw, *whole[1:])
        folders = newest(root), whole[0]
        for name in ("last", "best"):
            resumed, expected = (checkpoint(folder, name) for folder in folders)
            assert resumed["global_step"] == expected["global_step"]
            assert equal(resumed["state_dict"], expected["state_dict"])
        assert curves(folders[0]) == curves(folders[1])
        texts = [(folder / "metrics.json").read_text() for folder in folders]
        resumed, expected = (json.loads(text) | {"train_seconds": 0} for text in texts)
        assert resumed == expected
