"""Programs for tests, forked from a process that has imported torch and Lightning,
which takes 4 s.

`start` is subprocess.Popen for a command of sys.executable, a script and its arguments.
The script runs in a child of the caller as in a new process: it imports the project
itself, gets its own signals and ends with its own status. The process that it is forked
from, `python programs.py FD`, gets one message for each command from a socket; the
child answers with its process id. Do not use it for what happens while torch is
imported, or with closed output.
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
import tempfile
import threading
import time
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36  # see prctl(2)
LONGEST = 1 << 17  # bytes of a command with its environment
LIMIT_S = 200  # of a command; under load a start takes a minute
MODULES = [
    "lightning.pytorch.cli",
    "torch.utils.tensorboard",
    "torchvision",
    "matplotlib.figure",
]


class Program(subprocess.Popen[str]):
    # there is no public way to put a process that was started elsewhere under a Popen
    def _execute_child(self, args, *others):
        cwd, env = others[4:6]
        # both ends of stdin, stdout and stderr; -1: the stream of this process
        pipes = others[9:15]
        job = {
            "args": args[1:],
            "cwd": cwd or Path.cwd(),
            "env": dict(env or os.environ),
            "new_session": others[-2],
            "parent": os.getpid(),
        }
        streams = [pipes[0], pipes[3], pipes[5]]
        for number in range(3):
            if streams[number] == -1:
                streams[number] = number
        socket.send_fds(server(), [json.dumps(job, default=str).encode()], streams)
        self.pid = int(server().recv(100))
        self._child_created = True
        self._close_pipe_fds(*pipes)


def start(command, **options):
    """Start a command. options: arguments of subprocess.Popen."""
    if sys.platform == "linux":
        return Program(command, text=True, **options)
    return subprocess.Popen(command, text=True, **options)


def wait_for_file(path):
    """Wait until another process has written a file."""
    while not Path(path).exists():
        time.sleep(0.005)


@functools.cache
def server():
    """Start the process that forks, once. Return our end of its socket."""
    # a process whose parent has gone becomes our child
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    jobs, other_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with other_end:
        number = other_end.fileno()
        command = [sys.executable, __file__, str(number)]
        process = subprocess.Popen(command, pass_fds=[number])
    atexit.register(process.wait)
    atexit.register(jobs.close)
    return jobs


def serve(jobs):
    """Fork a process for each job. Return in the forked processes alone, in the place
    of a new process."""
    before = dict(os.environ)
    for name in MODULES:
        importlib.import_module(name)
    set_by_imports = dict(os.environ.items() - before.items())
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
    if job["new_session"]:
        os.setsid()
    os.chdir(job["cwd"])
    os.environ.clear()
    os.environ.update(set_by_imports | job["env"])
    tempfile.tempdir = None  # the new environment says where
    sys.argv = job["args"]
    folders = job["env"].get("PYTHONPATH", "").split(os.pathsep)
    sys.path[0:1] = [str(Path(sys.argv[0]).parent), *filter(None, folders)]


def run(path):
    """Run a script as the main program. Return its exit status."""
    status = 0
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as error:
        status = int(error.code or 0)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        status = 1
    threading._shutdown()  # waits for them
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return status


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests
    serve(socket.socket(fileno=int(sys.argv[1])))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os._exit(run(sys.argv[0]))  # without letting go of everything, which takes a second
