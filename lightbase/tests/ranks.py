"""Runs of several processes for tests, forked by programs.py.

`on_ranks` starts ranks, which find the environment that torchrun sets: `python ranks.py
FUNCTION ARGUMENTS` is one of them, and calls a function of a test file. `start_train`
starts train.py, which may start other processes. `two_machines` calls torchrun.
"""

import contextlib
import importlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import programs
import torch
from paths import HERE, TINY, argv
from programs import LIMIT_S

SECONDS = 300  # of one job; under load it may take ten times as long as alone
PIPED = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@dataclass
class Ranks:
    """What became of a job: status and output (stdout and stderr) of each rank."""

    statuses: list[int]
    outputs: list[str]


def on_ranks(folder, num_ranks, function, *args):
    """Run `module.function(*args)` of this folder on so many ranks. Their outputs are
    kept in `folder`."""
    port = free_port()
    command = [sys.executable, __file__, function, json.dumps(args, default=str)]
    environment = os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "GROUP_RANK": "0",
        "TORCHELASTIC_RUN_ID": "tests",
        "OMP_NUM_THREADS": "1",
    }
    outputs = [folder / f"{port}_{rank}.txt" for rank in range(num_ranks)]
    processes = []
    for rank, path in enumerate(outputs):
        environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        with path.open("w") as output:
            process = programs.start(
                command, env=environment, stdout=output, stderr=subprocess.STDOUT
            )
            processes.append(process)
    end = time.monotonic() + SECONDS
    while None in (statuses := [process.poll() for process in processes]):
        if any(statuses):
            # as torchrun does, the others are killed soon after one has failed
            end = min(end, time.monotonic() + 5)
        if time.monotonic() > end:
            for process in processes:
                process.kill()
        time.sleep(0.01)
    statuses = [process.wait() for process in processes]
    return Ranks(statuses, [path.read_text() for path in outputs])


def environment():
    """Return the environment of processes that keep temporary files: torchrun its logs,
    and a process of multiprocessing what torch makes when it is imported."""
    temporary = Path(tempfile.gettempdir(), "programs")  # short: it has sockets
    temporary.mkdir(exist_ok=True)
    return os.environ | {"TMPDIR": str(temporary)}


def start_train(folder, *flags):
    """Start train.py on tiny.yaml, in a session of its own, so that `assert_none_left`
    finds what it starts. It can import the test files."""
    paths = filter(None, [str(HERE), os.environ.get("PYTHONPATH", "")])
    script = [sys.executable, str(HERE / "scripts" / "train.py"), "--config", TINY]
    return programs.start(
        [*script, *argv("--trainer.default_root_dir", folder, *flags)],
        env=environment() | {"PYTHONPATH": os.pathsep.join(paths)},
        start_new_session=True,
        **PIPED,
    )


def two_machines(folder, *flags):
    """Train with the command of docs/devices.md, both "machines" on the loopback."""
    # as a file, so that programs.py can fork it
    torchrun = Path(torch.__file__).parent / "distributed" / "run.py"
    options = "--nnodes=2 --nproc-per-node=1 --rdzv-backend=c10d --rdzv-id=1"
    store = f"--rdzv-endpoint=127.0.0.1:{free_port()}"
    train = ["--", "scripts/train.py", "--config", TINY]
    train += argv("--trainer.default_root_dir", folder, *flags)
    command = [sys.executable, str(torchrun), *options.split(), store, *train]
    how = {"cwd": HERE, "env": environment(), **PIPED}
    machines = [programs.start(command, **how) for _ in range(2)]
    outputs = "".join(machine.communicate(timeout=LIMIT_S)[0] for machine in machines)
    assert [machine.returncode for machine in machines] == [0, 0], outputs
    assert outputs.count("Run folder: ") == 1


def wait_for(process, beginning):
    """Read what a process prints, up to a line with this beginning."""
    assert process.stdout
    assert any(line.startswith(beginning) for line in process.stdout)


def children(process):
    path = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    return [int(number) for number in path.read_text().split()]


def assert_none_left(group):
    """The processes of the group end soon."""
    end = time.monotonic() + LIMIT_S
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < end:
            # what has lost its parent is our child (programs.py), until we wait for it
            with contextlib.suppress(ChildProcessError):
                os.waitpid(-group, os.WNOHANG)
            os.killpg(group, 0)  # sends nothing
            time.sleep(0.1)
        raise AssertionError(f"processes of the group {group} are left")


if __name__ == "__main__":
    from lightbase.config.paths import PROJECT

    PROJECT.root, PROJECT.default_model = HERE, "example.classifier.Classifier"
    torch.set_num_threads(1)
    module, _, name = sys.argv[1].partition(".")
    getattr(importlib.import_module(module), name)(*json.loads(sys.argv[2]))
