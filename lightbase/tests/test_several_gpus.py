"""Runs on several GPUs, and what a run says where a GPU or its driver does not work.

The tests marked `simulated` set up such a machine by the variables of CI's simulation. The
function `train` runs on the ranks of ranks.py.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import Callback, Trainer
from paths import TINY, Trained, argv
from ranks import LIMIT_S, Ranks, on_ranks, start_train, two_machines
from written import checkpoint, equal, weights

from lightbase.commands.train import main

NUM_GPUS = torch.cuda.device_count()
SEVERAL = min(4, NUM_GPUS)
RUN = Path("tiny", "version_0")
GPU = "--trainer.accelerator gpu"
ALL = 16  # samples of a step on all GPUs together
PLACES = "--trainer.callbacks test_several_gpus.NotePlaces"
OTHER_TORCH = "another torch (docs/install.md#with-an-older-nvidia-driver)"

pytestmark = [pytest.mark.gpu, pytest.mark.linux]
two_gpus = pytest.mark.skipif(NUM_GPUS < 2, reason=f"{NUM_GPUS} GPUs")
simulated = pytest.mark.skipif(
    "SIMGPU_FOLDER" not in os.environ, reason="GPUs are not simulated"
)


class NotePlaces(Callback):
    """Leaves places_RANK.json: the devices of this process's tensors, and those with
    memory."""

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, output: Any, batch: Any, i: int
    ) -> None:
        moments = [x["exp_avg"] for x in trainer.optimizers[0].state.values()]
        tensors = [*batch, *pl_module.parameters(), *moments]
        self.tensors = {str(tensor.device) for tensor in tensors}

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        used = filter(torch.cuda.max_memory_allocated, range(NUM_GPUS))
        devices = [f"cuda:{i}" for i in used]
        notes = [sorted(self.tensors), devices]
        path = Path(trainer.default_root_dir, f"places_{trainer.global_rank}.json")
        path.write_text(json.dumps(notes))


def places(folder: Path, rank: int = 0) -> list[list[str]]:
    notes: list[list[str]] = json.loads((folder / f"places_{rank}.json").read_text())
    return notes


class Fill(Callback):
    """Takes 100 MiB on each device in the second epoch."""

    def on_train_epoch_start(self, trainer: Trainer, pl_module: Any) -> None:
        if trainer.current_epoch == 1:
            size = 100 * 2**20
            self.tensor = torch.empty(size, dtype=torch.uint8, device=pl_module.device)


def train(folder: str, *flags: str) -> None:
    main(["--config", TINY, "--trainer.default_root_dir", folder, *flags])


def run(folder: Path, *args: object, status: int = 0) -> list[str]:
    """What train.py prints."""
    process = start_train(folder, *args)
    output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == status, output
    return output.splitlines()


def run_ranks(folder: Path, number: int, *args: object) -> Ranks:
    function = "test_several_gpus.train"
    return on_ranks(folder.parent, number, function, folder, *argv(*args))


def each(number: int) -> str:
    """Flags of a rank among so many, which together make the steps of one GPU."""
    return f"{GPU} --data.batch_size {ALL // number}"


def assert_two_lines(lines: list[str], first: str, second: str) -> None:
    """The output ends with an error of these two lines, and holds no other."""
    text = "\n".join(lines)
    assert "Traceback" not in text, text
    assert [line for line in lines if line.startswith("error: ")] == [lines[-2]], text
    assert first in lines[-2], text
    assert second in lines[-1], text


def num_epochs(folder: Path) -> int:
    """Of last.ckpt, which is whole."""
    epochs: int = checkpoint(folder / RUN)["epoch"] + 1
    return epochs


@pytest.fixture(scope="module")
def one_gpu(trained: Trained) -> Path:
    """The folder of a run on one GPU."""
    return trained(GPU)[0]


def assert_same_run(folder: Path, expected: Path) -> None:
    close = {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(weights(folder / RUN), weights(expected), **close)
    one, other = (
        json.loads((run_folder / "metrics.json").read_text()) | {"train_seconds": 0}
        for run_folder in (folder / RUN, expected)
    )
    assert one == pytest.approx(other, rel=1e-4)


@two_gpus
def test_dp_trains_on_all_gpus_as_on_one(tmp_path, one_gpu):
    dp = f"{GPU} --trainer.strategy dp --trainer.devices {SEVERAL}"
    run(tmp_path, dp, PLACES)
    assert_same_run(tmp_path, one_gpu)
    gpus = [f"cuda:{i}" for i in range(SEVERAL)]
    assert places(tmp_path) == [["cuda:0"], gpus]


@two_gpus
def test_ddp_trains_each_rank_on_its_gpu_as_one_gpu(tmp_path, one_gpu):
    result = run_ranks(tmp_path, SEVERAL, each(SEVERAL), PLACES)
    assert not any(result.statuses), result.outputs
    assert_same_run(tmp_path, one_gpu)
    for rank in range(SEVERAL):
        used = [f"cuda:{rank}"]
        assert places(tmp_path, rank) == [used, used]


@two_gpus
def test_a_run_goes_on_with_another_number_of_gpus(tmp_path):
    """As on CPUs. The batch of a rank stays, so no single process makes the same
    steps."""
    for device in ("gpu", "cpu"):
        flags = f"--trainer.accelerator {device} --data.batch_size 4"
        for epoch, number in enumerate((SEVERAL, 1), 1):
            resume = "--ckpt_path last" if epoch > 1 else ""
            more = f"--trainer.max_epochs {epoch} {resume}"
            result = run_ranks(tmp_path / device, number, flags, more)
            assert not any(result.statuses), result.outputs
    assert_same_run(tmp_path / "gpu", tmp_path / "cpu" / RUN)
    metrics = json.loads((tmp_path / "gpu" / RUN / "metrics.json").read_text())
    assert metrics["steps"] == 315 // (4 * SEVERAL) + 315 // 4


@two_gpus
def test_the_second_gpu_alone(tmp_path, one_gpu, monkeypatch):
    watched = "--figures_every_n_epochs 1 --device_monitor true --step_timer true"
    shown = run(tmp_path / "flag", f"{GPU} --trainer.devices [1]", PLACES, watched)
    assert f"Device: cuda:1, machines: 1, GPUs found: {NUM_GPUS}" in shown
    assert places(tmp_path / "flag") == [["cuda:1"], ["cuda:1"]]
    assert_same_run(tmp_path / "flag", one_gpu)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    flags = f"{GPU} --trainer.max_epochs 1 --trainer.devices -1"
    shown = run(tmp_path / "variable", flags)
    assert "Device: cuda:0, machines: 1, GPUs found: 1" in shown


@two_gpus
def test_two_machines_with_a_gpu_each(tmp_path, one_gpu):
    output = two_machines(tmp_path, each(2), CUDA_VISIBLE_DEVICES=("0", "1"))
    assert output.count("Device: cuda:0, machines: 2") == 1
    assert_same_run(tmp_path, one_gpu)


# what goes wrong


@simulated
@two_gpus
def test_a_full_memory_on_one_gpu_of_two(tmp_path, monkeypatch):
    monkeypatch.setenv("SIMGPU_MIB", "16384,64")
    result = run_ranks(tmp_path, 2, f"{GPU} --trainer.callbacks test_several_gpus.Fill")
    assert all(result.statuses)
    first, second = (output.splitlines() for output in result.outputs)
    full = "on rank 1: CUDA out of memory. Tried to allocate 100"
    assert_two_lines(second, full, "batch_size")
    assert len(second) == 2
    assert num_epochs(tmp_path) == 1
    assert_two_lines(first, "remote process exited", "another process has ended")


@simulated
def test_a_driver_that_is_too_old(tmp_path, monkeypatch):
    monkeypatch.setenv("SIMGPU_DRIVER", "12040")
    what = "The NVIDIA driver on your system is too old (found version 12040)"
    way_out = f"CUDA {torch.version.cuda}: install another driver or {OTHER_TORCH}"
    lines = run(tmp_path, GPU, status=1)
    assert_two_lines(lines[-2:], what, way_out)
    assert "Warning" not in "".join(lines)


@simulated
@pytest.mark.parametrize("data", ["", "--data small.Points --model.net.sizes [10,2]"])
def test_a_gpu_that_is_too_old_for_torch(tmp_path, monkeypatch, data):
    """The first operation on the GPU is one of the data or, without data, one of the
    network."""
    monkeypatch.setenv("SIMGPU_CAPABILITY", "70")
    _, *lines = run(
        tmp_path, f"{GPU} {data}", status=1
    )  # the first one is that of the data
    assert len(lines) == 2
    way_out = f"the GPU is older than torch's kernels: install {OTHER_TORCH}"
    assert_two_lines(lines, "error: CUDA error: no kernel image is available", way_out)
    assert not [*tmp_path.rglob("*")]


class Fail(Callback):
    """The GPU fails in the second epoch, as the optimizer makes a step."""

    def on_before_optimizer_step(self, trainer: Any, *_: Any) -> None:
        if trainer.current_epoch == 1:
            import simgpu

            counts = simgpu.counts().items()
            done = sum(n for name, n in counts if name.startswith("operation"))
            os.environ["SIMGPU_FAIL_AT"] = str(done + 1)


@simulated
def test_a_gpu_that_fails_leaves_a_run_that_goes_on(tmp_path, monkeypatch, one_gpu):
    monkeypatch.setenv("SIMGPU_TRACE", "1")  # it counts the operations
    lines = run(tmp_path, f"{GPU} --trainer.callbacks test_several_gpus.Fail", status=1)
    again = "start again, after the first epoch with --ckpt_path last"
    way_out = f"nvidia-smi and dmesg may tell why it fails; {again}"
    assert_two_lines(lines, "CUDA error: unspecified launch failure", way_out)
    assert num_epochs(tmp_path) == 1
    run(tmp_path, GPU, "--ckpt_path last --trainer.callbacks null")
    assert equal(weights(tmp_path / RUN), weights(one_gpu))
