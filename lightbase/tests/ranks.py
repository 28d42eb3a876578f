"""Several ranks for tests, forked by programs.py. They find the environment that
torchrun sets.

`python ranks.py FUNCTION ARGUMENTS` is one rank: it calls a function of a test file.
"""

import importlib
import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import programs

HERE = Path(__file__).parent
SECONDS = 300  # of one job; under load it may take ten times as long as alone


@dataclass
class Ranks:
    """What became of a job: status and output (stdout and stderr) of each rank."""

    statuses: list[int]
    outputs: list[str]


def on_ranks(folder: Path, num_ranks: int, function: str, *args: Any) -> Ranks:
    """Run `module.function(*args)` of this folder on so many ranks. Their outputs are
    kept in `folder`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
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


if __name__ == "__main__":
    import torch

    from lightbase.core.project import PROJECT

    PROJECT.root, PROJECT.default_model = HERE, "example.classifier.Classifier"
    torch.set_num_threads(1)
    module, _, name = sys.argv[1].partition(".")
    getattr(importlib.import_module(module), name)(*json.loads(sys.argv[2]))
