"""Programs for tests, forked from a process that has imported torch and Lightning: a new one would
take 4 s for that.

`start` is subprocess.Popen for a command of sys.executable, a script and its arguments. The script
runs in a child of the caller as in a new process: it imports the project itself, gets its own
signals and ends with its own status. The process that it is forked from, `python tests/programs.py
FD`, gets a message a command from a socket; the child answers with its id. Not for what happens
while torch is imported, or with closed output.
"""

import atexit
import ctypes
import functools
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

PR_SET_CHILD_SUBREAPER = 36  # see prctl(2)
LONGEST = 1 << 17  # bytes of a command with its environment


class Program(subprocess.Popen[str]):
    # there is no public way to put a process that was started elsewhere under a Popen
    def _execute_child(
        self,
        args: Any,
        executable: Any,
        preexec_fn: Any,
        close_fds: Any,
        pass_fds: Any,
        cwd: Any,
        env: Any,
        *others: Any,
    ) -> None:
        (
            *_,
            p2cread,
            p2cwrite,
            c2pread,
            c2pwrite,
            errread,
            errwrite,
            _,
            _,
            _,
            _,
            _,
            new_session,
            _,
        ) = others
        job = {
            "args": args[1:],
            "cwd": str(cwd or Path.cwd()),
            "env": dict(env or os.environ),
            "new": new_session,
            "parent": os.getpid(),
        }
        streams = [own if fd == -1 else fd for own, fd in enumerate((p2cread, c2pwrite, errwrite))]
        socket.send_fds(server(), [json.dumps(job, default=str).encode()], streams)
        self.pid = int(server().recv(100))
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]


def start(command: list[Any], **options: Any) -> subprocess.Popen[str]:
    kind = Program if sys.platform == "linux" else subprocess.Popen
    return kind(command, text=True, **options)


@functools.cache
def server() -> socket.socket:
    """The other end of the socket."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)  # whose parent has gone becomes our child
    own, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with other:
        process = subprocess.Popen(
            [sys.executable, __file__, str(other.fileno())], pass_fds=[other.fileno()]
        )
    atexit.register(process.wait)
    atexit.register(own.close)
    return own


def serve(jobs: socket.socket) -> dict[str, Any]:
    """Fork a process for each job; returns in those processes alone."""
    for name in (
        "lightning.pytorch.cli",
        "torch.utils.tensorboard",
        "torchvision",
        "matplotlib.figure",
        "psutil",
    ):
        importlib.import_module(name)
    gc.freeze()  # shared memory stays shared, and nobody looks through it
    os.fsync = lambda _: None  # as in conftest.py
    while True:
        message, streams, *_ = socket.recv_fds(jobs, LONGEST, 3)
        if not message:
            os._exit(0)
        if between := os.fork():
            os.waitpid(between, 0)
        elif os.fork():
            os._exit(0)
        else:
            break
        for fd in streams:
            os.close(fd)
    job = json.loads(message)
    while os.getppid() != job["parent"]:  # until the process between has gone
        time.sleep(0.001)
    jobs.send(str(os.getpid()).encode())
    jobs.close()
    for fd, stream in enumerate(streams):
        os.dup2(stream, fd)
        os.close(stream)
    if job["new"]:
        os.setsid()
    return job


def run(path: str) -> int:
    """Run a script as the main program; its exit status."""
    status = 0
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]  # waits for them
    atexit._run_exitfuncs()
    for stream in filter(None, (sys.stdout, sys.stderr)):
        stream.flush()
    return status


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests
    job = serve(socket.socket(fileno=int(sys.argv[1])))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(job["cwd"])
    os.environ.clear()
    os.environ.update(job["env"])
    sys.argv = job["args"]
    sys.path[0:1] = [
        str(Path(sys.argv[0]).parent),
        *filter(None, job["env"].get("PYTHONPATH", "").split(os.pathsep)),
    ]
    os._exit(run(sys.argv[0]))  # without letting go of everything, which takes a second
