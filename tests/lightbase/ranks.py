"""Several ranks for tests, forked from one process that has imported everything: a new process a
rank would take 5 s.

`python tests/ranks.py` reads a job a line, as JSON, and answers each with the ranks' exit statuses
and outputs. The ranks find the environment that torchrun sets, so nothing here is known to the
project.
"""

import contextlib
import gc
import importlib
import json
import os
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import programs

HERE = Path(__file__).parent
SECONDS = 300  # of one job; under load it may take ten times as long as alone


@dataclass
class Ranks:
    """What became of a job: status and output (stdout and stderr) of each rank."""

    statuses: list[int]
    outputs: list[str]


class RunRanks(Protocol):
    def __call__(self, num_ranks: int, function: str, *args: Any) -> Ranks: ...


@contextlib.contextmanager
def start(folder: Path) -> Iterator[RunRanks]:
    """A function that runs `module.function(*args)` of tests/ on so many ranks; outputs are kept in
    `folder`."""
    server = programs.start(
        [sys.executable, __file__, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ,
    )
    assert server.stdin
    assert server.stdout

    def run(num_ranks: int, function: str, *args: Any) -> Ranks:
        assert server.stdin
        assert server.stdout
        server.stdin.write(json.dumps([num_ranks, function, args], default=str) + "\n")
        server.stdin.flush()
        return Ranks(**json.loads(server.stdout.readline()))

    with server:  # waits for it
        yield run
        # the end of its input would not do: a loader's worker, forked from here, may hold the other
        # end of the pipe
        server.stdin.write("null\n")
        server.stdin.flush()


def serve(folder: Path) -> None:
    import test_distributed  # noqa: F401  # all that the ranks need

    gc.freeze()  # shared memory stays shared, and no rank looks through it
    for number, line in enumerate(sys.stdin):
        job = json.loads(line)
        if job is None:
            break
        num_ranks, function, args = job
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        outputs = [folder / f"{number}_{rank}.txt" for rank in range(num_ranks)]
        pids = [
            fork(rank, num_ranks, port, function, args, output)
            for rank, output in enumerate(outputs)
        ]
        statuses = wait(pids)
        answer = {"statuses": statuses, "outputs": [output.read_text() for output in outputs]}
        print(json.dumps(answer), flush=True)


def fork(rank: int, num_ranks: int, port: int, function: str, args: list[Any], output: Path) -> int:
    """Process id of a new rank."""
    output.touch()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        file = os.open(output, os.O_WRONLY)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.environ |= {
            **{
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "GROUP_RANK": "0",
                "TORCHELASTIC_RUN_ID": "tests",
            },
            **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(num_ranks)),
            **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"},
        }
        import torch

        from lightbase.devices import processes
        from lightbase.folder import PROJECT

        PROJECT.root, PROJECT.default_model = HERE, "example.classifier.Classifier"

        torch.set_num_threads(1)
        processes.STARTED_BY = os.getppid()  # it was noted before the fork
        module, _, name = function.partition(".")
        getattr(importlib.import_module(module), name)(*args)
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def wait(pids: list[int]) -> list[int]:
    """Exit statuses; as torchrun does, the others are killed soon after one has failed."""
    statuses: dict[int, int] = {}
    end = time.monotonic() + SECONDS
    while len(statuses) < len(pids):
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            statuses[pid] = os.waitstatus_to_exitcode(status)
            if statuses[pid]:
                end = min(end, time.monotonic() + 5)
        elif time.monotonic() > end:
            for late in set(pids) - statuses.keys():
                os.kill(late, 9)
        else:
            time.sleep(0.01)
    return [statuses[pid] for pid in pids]


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
