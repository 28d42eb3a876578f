"""Runs on several GPUs, and what a run says where a GPU or its driver does not work.

The tests marked `simulated` set up such a machine by the variables of tests/simgpu. The
function `train` runs on the ranks of ranks.py.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import programs
import pytest
import torch
from example.models.mlp import MLP
from lightning import Callback, Trainer
from paths import HERE, TINY, Trained, argv
from ranks import Ranks, on_ranks
from test_distributed import assert_none_left, children, wait_for
from torch import Tensor

from lightbase.commands.train import main

CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def weights(folder: Path) -> dict[str, Tensor]:
    """The newest weights of the only run below a folder."""
    (path,) = folder.rglob("last.ckpt")
    return torch.load(path, weights_only=True)["state_dict"]


pytestmark = [pytest.mark.gpu, pytest.mark.linux]
simulated = pytest.mark.skipif(
    "SIMGPU_FOLDER" not in os.environ, reason="GPUs are not simulated"
)
NUM_GPUS = torch.cuda.device_count()
TWO, FOUR = (
    pytest.param(
        number, marks=pytest.mark.skipif(number > NUM_GPUS, reason=f"{NUM_GPUS} GPUs")
    )
    for number in (2, 4)
)
two_gpus = pytest.mark.skipif(NUM_GPUS < 2, reason=f"{NUM_GPUS} GPUs")
LIMIT_S = 200  # under load a start takes a minute
GPU = "--trainer.accelerator gpu"
ALL = 16  # samples of a step on all GPUs together
PLACES = ("--trainer.callbacks", "test_several_gpus.NotePlaces")
OTHER_TORCH = "another torch (docs/install.md#with-an-older-nvidia-driver)"


class Watched(MLP):
    """Notes where it runs."""

    devices: set[str] = set()

    def forward(self, x: Tensor) -> Tensor:
        assert {p.device for p in self.parameters()} <= {x.device}
        self.devices.add(str(x.device))
        return super().forward(x)


class NotePlaces(Callback):
    """Leaves places_RANK.json: the devices of this process's tensors, and those with
    memory."""

    def __init__(self) -> None:
        self.places: set[str] = set()

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, output: Any, batch: Any, i: int
    ):
        states = trainer.optimizers[0].state.values()
        moments = [state["exp_avg"] for state in states]
        gradients = [parameter.grad for parameter in pl_module.parameters()]
        tensors = [*batch, *pl_module.parameters(), *moments, *gradients]
        self.places |= {str(tensor.device) for tensor in tensors if tensor is not None}

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        memory = [
            torch.cuda.max_memory_allocated(i) > 0
            for i in range(torch.cuda.device_count())
        ]
        used = [f"cuda:{i}" for i, is_used in enumerate(memory) if is_used]
        notes = {
            "tensors": sorted(self.places),
            "memory": used,
            "net": sorted(Watched.devices),
        }
        path = Path(trainer.default_root_dir, f"places_{trainer.global_rank}.json")
        path.write_text(json.dumps(notes))


def places(folder: Path, rank: int = 0) -> dict[str, list[str]]:
    return json.loads((folder / f"places_{rank}.json").read_text())


class Fill(Callback):
    """Takes 100 MiB on each device in the second epoch."""

    def on_train_epoch_start(self, trainer: Trainer, pl_module: Any) -> None:
        if trainer.current_epoch == 1:
            self.tensor = torch.empty(
                100 * 2**20, dtype=torch.uint8, device=pl_module.device
            )


def train(folder: str, *flags: str) -> None:
    main(["--config", TINY, "--trainer.default_root_dir", folder, *flags])


def with_tests() -> str:
    """PYTHONPATH for a script, with the classes of this file."""
    return os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH", "")]))


def command(folder: Path, *args: object) -> subprocess.Popen[str]:
    """Starts train.py, which may start other processes."""
    script = [sys.executable, HERE / "scripts" / "train.py", "--config", TINY]
    flags = argv("--trainer.default_root_dir", folder, *args)
    return programs.start(
        [*map(str, script), *flags],
        env=os.environ | {"PYTHONPATH": with_tests()},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def run(folder: Path, *args: object, status: int = 0) -> list[str]:
    """What train.py prints."""
    process = command(folder, *args)
    output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == status, output
    return output.splitlines()


def run_ranks(folder: Path, number: int, *args: object) -> Ranks:
    return on_ranks(
        folder.parent, number, "test_several_gpus.train", folder, *argv(*args)
    )


def each(number: int) -> str:
    """Flags of a rank among so many, which together make the steps of one GPU."""
    return f"{GPU} --data.batch_size {ALL // number}"


def assert_trains(folder: Path, number: int, *args: object) -> None:
    result = run_ranks(folder, number, *args)
    assert not any(result.statuses), "\n".join(result.outputs)


def assert_two_lines(lines: list[str], first: str, second: str) -> None:
    """The output ends with an error of these two lines, and holds no other."""
    text = "\n".join(lines)
    assert "Traceback" not in text, text
    assert "terminate called" not in text, text
    assert sum(line.startswith("error: ") for line in lines) == 1, text
    assert first in lines[-2], text
    assert lines[-2].startswith("error: "), text
    assert second in lines[-1], text


def num_epochs(folder: Path) -> int:
    """Of last.ckpt, which is whole."""
    (path,) = folder.rglob("last.ckpt")
    saved = torch.load(path, weights_only=True)
    assert all(value.isfinite().all() for value in saved["state_dict"].values())
    return saved["epoch"] + 1


@pytest.fixture(scope="module")
def one_gpu(trained: Trained) -> tuple[Path, dict[str, Any]]:
    """A run on one GPU, and its metrics."""
    return trained(GPU)


def assert_same_run(folder: Path, expected: tuple[Path, dict[str, Any]]) -> None:
    one = weights(expected[0])
    for name, value in weights(folder).items():
        torch.testing.assert_close(value.cpu(), one[name].cpu(), **CLOSE)
    (path,) = folder.rglob("metrics.json")
    metrics = json.loads(path.read_text())
    assert metrics.keys() == expected[1].keys()
    for name in ("steps", "test/loss", "test/acc", "test/num_samples"):
        assert metrics[name] == pytest.approx(expected[1][name], rel=1e-4), name


@pytest.mark.parametrize("number", [TWO, FOUR])
def test_dp_trains_on_all_gpus_as_on_one(tmp_path, one_gpu, number):
    net = (
        "--model.net",
        "test_several_gpus.Watched",
        "--model.net.sizes",
        "[192,16,4]",
    )
    run(
        tmp_path,
        f"{GPU} --trainer.strategy dp --trainer.devices {number}",
        *net,
        *PLACES,
    )
    assert_same_run(tmp_path, one_gpu)
    gpus = [f"cuda:{i}" for i in range(number)]
    assert places(tmp_path) == {"tensors": ["cuda:0"], "memory": gpus, "net": gpus}


@pytest.mark.parametrize("number", [TWO, FOUR])
def test_ddp_trains_each_rank_on_its_gpu_as_one_gpu(tmp_path, one_gpu, number):
    assert_trains(tmp_path, number, each(number), *PLACES)
    assert_same_run(tmp_path, one_gpu)
    for rank in range(number):
        used = [f"cuda:{rank}"]
        assert places(tmp_path, rank) == {"tensors": used, "memory": used, "net": []}


@two_gpus
def test_a_run_goes_on_with_another_number_of_gpus(tmp_path):
    """As on CPUs. The batch of a rank stays, so no single process makes the same
    steps."""
    numbers = (2, 4, 1) if NUM_GPUS >= 4 else (2, 1)  # in each epoch
    for device in ("gpu", "cpu"):
        for epoch, number in enumerate(numbers):
            flags = f"--data.batch_size 4 --trainer.max_epochs {epoch + 1}"
            resume = ("--ckpt_path", "last") if epoch else ()
            folder = tmp_path / device
            assert_trains(
                folder, number, f"{flags} --trainer.accelerator {device}", *resume
            )
            assert num_epochs(folder) == epoch + 1
    (path,) = (tmp_path / "cpu").rglob("metrics.json")
    metrics = json.loads(path.read_text())
    assert metrics["steps"] == sum(315 // (4 * number) for number in numbers)
    assert_same_run(tmp_path / "gpu", (tmp_path / "cpu", metrics))


@two_gpus
def test_a_killed_rank_ends_the_command_which_goes_on_from_last(tmp_path):
    flags = f"{GPU} --trainer.strategy ddp --trainer.devices 2 --trainer.max_epochs"
    process = command(tmp_path, f"{flags} 1000")
    wait_for(process, "Epoch 2 ")  # last.ckpt of the first one is written
    begin = time.monotonic()
    (second,) = children(process)
    os.kill(second, signal.SIGKILL)
    output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode != 0, output
    assert "Traceback" not in output, output
    assert time.monotonic() - begin < LIMIT_S / 4
    assert_none_left(process.pid)
    before = num_epochs(tmp_path)
    assert before >= 1
    shown = run(tmp_path, f"{flags} {before + 1} --ckpt_path last")
    assert num_epochs(tmp_path) == before + 1, shown


@two_gpus
def test_the_second_gpu_alone(tmp_path, one_gpu, monkeypatch):
    shown = run(tmp_path / "flag", f"{GPU} --trainer.devices [1]", *PLACES)
    assert f"Device: cuda:1, machines: 1, GPUs found: {NUM_GPUS}" in shown
    used = {"tensors": ["cuda:1"], "memory": ["cuda:1"], "net": []}
    assert places(tmp_path / "flag") == used
    assert_same_run(tmp_path / "flag", one_gpu)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    shown = run(
        tmp_path / "variable", f"{GPU} --trainer.max_epochs 1 --trainer.devices -1"
    )
    assert "Device: cuda:0, machines: 1, GPUs found: 1" in shown


@two_gpus
def test_two_machines_with_a_gpu_each(tmp_path: Path, one_gpu: Any) -> None:
    """Both on the loopback; CUDA_VISIBLE_DEVICES gives each its GPU."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # as a file, so that programs.py can fork it
    program = [
        sys.executable,
        str(Path(torch.__file__).parent / "distributed" / "run.py"),
    ]
    program += [
        "--nnodes=2",
        "--nproc-per-node=1",
        "--rdzv-backend=c10d",
        "--rdzv-id=1",
    ]
    program += [
        f"--rdzv-endpoint=127.0.0.1:{port}",
        "--",
        "scripts/train.py",
        "--config",
        TINY,
    ]
    program += argv("--trainer.default_root_dir", tmp_path, each(2))
    piped: dict[str, Any] = {
        "stdout": subprocess.PIPE,
        "stderr": subprocess.STDOUT,
        "cwd": HERE,
    }
    machines = [
        programs.start(
            program, env=os.environ | {"CUDA_VISIBLE_DEVICES": str(i)}, **piped
        )
        for i in range(2)
    ]
    outputs = [machine.communicate(timeout=LIMIT_S)[0] for machine in machines]
    assert [machine.returncode for machine in machines] == [0, 0], "\n".join(outputs)
    assert "".join(outputs).count("Run folder: ") == 1
    assert "".join(outputs).count("Device: cuda:0, machines: 2") == 1
    assert [path.name for path in (tmp_path / "tiny").iterdir()] == ["version_0"]
    assert_same_run(tmp_path, one_gpu)


# what goes wrong


@simulated
@two_gpus
def test_a_full_memory_on_one_gpu_of_two(tmp_path, monkeypatch):
    monkeypatch.setenv("SIMGPU_MIB", "16384,64")
    result = run_ranks(
        tmp_path, 2, GPU, "--trainer.callbacks", "test_several_gpus.Fill"
    )
    assert all(result.statuses)
    lines = result.outputs[1].splitlines()
    assert_two_lines(
        lines, "on rank 1: CUDA out of memory. Tried to allocate 100", "batch_size"
    )
    assert len(lines) == 2
    assert num_epochs(tmp_path) == 1
    first = result.outputs[0].splitlines()
    assert_two_lines(first, "remote process exited", "another process has ended")


def train_without_nvml(folder: str, *flags: str) -> None:
    torch.cuda._device_count_nvml = lambda: -1  # type: ignore[attr-defined]
    train(folder, *flags)


@simulated
@pytest.mark.parametrize("function", ["train", "train_without_nvml"])
def test_a_driver_that_is_too_old(tmp_path, monkeypatch, function):
    monkeypatch.setenv("SIMGPU_DRIVER", "12040")

    def shown(status: int, *args: object) -> list[str]:
        result = on_ranks(
            tmp_path, 1, f"test_several_gpus.{function}", tmp_path, *argv(*args)
        )
        assert result.statuses == [status], result.outputs
        return result.outputs[0].splitlines()

    what = "the NVIDIA driver is for CUDA 12.4, which is too old"
    way_out = f"is built for CUDA {torch.version.cuda}: install another driver or {OTHER_TORCH}"
    lines = shown(1, GPU)
    assert len(lines) == 2, lines
    assert_two_lines(lines, f"trainer.accelerator gpu: {what}", way_out)
    lines = shown(0, "--trainer.accelerator auto --trainer.max_epochs 1")
    (line,) = [line for line in lines if "NVIDIA" in line]
    assert line.startswith(f"No GPU is used: {what}; ")
    assert way_out in line
    assert "Warning" not in "".join(lines)
    assert any(line.startswith("Device: CPU") for line in lines)
    assert num_epochs(tmp_path) == 1


@simulated
def test_a_gpu_that_is_too_old_for_torch(tmp_path, monkeypatch):
    monkeypatch.setenv("SIMGPU_CAPABILITY", "70")
    _, *lines = run(tmp_path, GPU, status=1)  # the first one is that of the data
    assert len(lines) == 2
    way_out = f"the GPU is older than torch's kernels: install {OTHER_TORCH}"
    assert_two_lines(lines, "no kernel image is available", way_out)
    assert not [*tmp_path.rglob("*")]


class Fail(Callback):
    """The GPU of a rank fails in the second epoch, as the optimizer makes a step."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def on_before_optimizer_step(
        self, trainer: Any, pl_module: Any, optimizer: Any
    ) -> None:
        if (trainer.global_rank, trainer.current_epoch) == (self.rank, 1):
            import simgpu

            counts = simgpu.counts().items()
            number = sum(
                count for name, count in counts if name.startswith("operation")
            )
            os.environ["SIMGPU_FAIL_AT"] = str(number + 1)


def fail_on(rank: int) -> str:
    return f"--trainer.callbacks test_several_gpus.Fail --trainer.callbacks.rank {rank}"


FAILURE = "CUDA error: unspecified launch failure"
AGAIN = "start again, after the first epoch with --ckpt_path last"


@simulated
def test_a_gpu_that_fails_leaves_a_run_that_goes_on(tmp_path, monkeypatch, one_gpu):
    monkeypatch.setenv("SIMGPU_TRACE", "1")  # it counts the operations
    lines = run(tmp_path, GPU, fail_on(0), status=1)
    assert_two_lines(
        lines, FAILURE, f"nvidia-smi and dmesg may tell why it fails; {AGAIN}"
    )
    assert num_epochs(tmp_path) == 1
    run(tmp_path, GPU, "--ckpt_path last --trainer.callbacks null")
    expected = weights(one_gpu[0])
    assert all(torch.equal(expected[name], x) for name, x in weights(tmp_path).items())


@simulated
@two_gpus
def test_a_gpu_of_two_that_fails(tmp_path, monkeypatch):
    """torch would abort the process, with 25 lines, as it frees what DDP has on the
    GPU."""
    monkeypatch.setenv("SIMGPU_TRACE", "1")
    # not by `run`, whose processes leave without freeing anything
    script = [sys.executable, str(HERE / "scripts" / "train.py"), "--config", TINY]
    strategy = "--trainer.strategy ddp --trainer.devices 2 --trainer.default_root_dir"
    flags = argv(GPU, fail_on(1), strategy, tmp_path)
    environment = os.environ | {"PYTHONPATH": with_tests()}
    done = subprocess.run(
        [*script, *flags],
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    lines = done.stderr.splitlines()
    assert done.returncode != 0
    way_out = f"nvidia-smi and dmesg may tell why it fails; {AGAIN}"
    assert_two_lines(lines[:2], f"error: on rank 1: {FAILURE}", way_out)
    if not lines[2].startswith(
        "[rank: 1] Child process with PID"
    ):  # Lightning looks every 5 s
        way_out = f"another process has ended, its lines may tell why; {AGAIN}"
        assert_two_lines(lines[2:], "remote process exited", way_out)
        assert done.returncode == 1
    assert len(lines) <= 4, done.stderr
    assert num_epochs(tmp_path) == 1
