"""Runs on several GPUs. The function `train` runs on the ranks of ranks.py."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import Callback, Trainer
from paths import TINY, Trained, argv
from ranks import LIMIT_S, Ranks, on_ranks, start_train
from written import weights

from lightbase.commands.train import main

NUM_GPUS = torch.cuda.device_count()
SEVERAL = min(4, NUM_GPUS)
RUN = Path("tiny", "version_0")
GPU = "--trainer.accelerator gpu"
ALL = 16  # samples of a step on all GPUs together
PLACES = "--trainer.callbacks test_several_gpus.NotePlaces"

pytestmark = [pytest.mark.gpu, pytest.mark.linux]
two_gpus = pytest.mark.skipif(NUM_GPUS < 2, reason=f"{NUM_GPUS} GPUs")


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
