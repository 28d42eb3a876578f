"""fsdp2: weights that are divided among two processes. A run that is killed or stopped
goes on to the same weights, and one device evaluates it."""

import json
import os
import signal
import time
from typing import Any

import pytest
import torch
from example.classifier import Classifier
from paths import TINY, argv, fails, script
from ranks import LIMIT_S, assert_none_left, on_ranks, start_train
from torch.distributed.fsdp import FSDPModule, fully_shard
from written import checkpoint, checkpoint_file, equal

from lightbase.commands.train import main

pytestmark = pytest.mark.linux
HERE = "test_sharded"
TWO = f"--model {HERE}.Sharded --trainer.strategy fsdp2 --trainer.devices 2 --data.batch_size 8"


class Sharded(Classifier):
    """Divides the layers of the MLP, and then the rest of it."""

    def configure_model(self) -> None:
        net: Any = self.net
        if self.device_mesh is None or isinstance(net, FSDPModule):
            return
        mesh = self.device_mesh["data_parallel"]
        fully_shard([net.layers[0], net.layers[-1]], mesh=mesh)
        fully_shard(net, mesh=mesh)


class Slow(Sharded):
    """Has time to be killed in the second epoch."""

    def on_train_batch_end(self, *_: Any) -> None:
        if self.current_epoch == 1:
            time.sleep(0.1)


class Forgetful(Sharded):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.scale = torch.nn.Parameter(torch.ones(1))


def test_the_strategy_of_lightning_is_refused(tmp_path, capsys):
    strategy = "lightning.pytorch.strategies.ModelParallelStrategy"
    flags = f"--model {HERE}.Sharded --trainer.strategy {strategy}"
    args = ["--config", TINY, "--trainer.default_root_dir", str(tmp_path)]
    error = fails(capsys, 2, lambda: main([*args, *argv(flags)]))
    assert "--trainer.strategy fsdp2" in error


def state(folder: Any) -> dict[str, Any]:
    """The weights, and the states of the optimizer, by name."""
    content = checkpoint(folder)
    (optimizer,) = content["optimizer_states"]
    return content["state_dict"] | {
        f"{index}.{name}": value
        for index, moments in optimizer["state"].items()
        for name, value in moments.items()
    }


@pytest.mark.slow
def test_a_killed_and_a_stopped_run_go_on_to_equal_weights(tmp_path, capsys):
    straight = start_train(tmp_path / "straight", TWO)
    assert straight.communicate(timeout=LIMIT_S)
    assert straight.returncode == 0
    whole = state(tmp_path / "straight/tiny/version_0")
    for name, sent in {"killed": signal.SIGKILL, "stopped": signal.SIGTERM}.items():
        folder = tmp_path / name / "tiny/version_0"
        run = start_train(tmp_path / name, TWO.replace("Sharded", "Slow"))
        while not checkpoint_file(folder, "last").exists():
            time.sleep(0.05)
        time.sleep(0.5)
        os.killpg(run.pid, sent)
        run.communicate(timeout=LIMIT_S)
        assert run.returncode != 0
        assert_none_left(run.pid)
        assert not equal(state(folder), whole)
        again = start_train(tmp_path / name, "--ckpt_path last")
        printed = again.communicate(timeout=LIMIT_S)[0]
        assert again.returncode == 0, printed
        assert equal(state(folder), whole)
    script("evaluate").main(["--ckpt_path", str(checkpoint_file(folder))])
    shown = json.loads(capsys.readouterr().out.splitlines()[-1])
    metrics = json.loads((folder / "metrics.json").read_text())
    assert shown["test/acc"] == metrics["test/acc"]
    assert shown["test/loss"] == pytest.approx(metrics["test/loss"], rel=1e-5)


def train_with(model: str, folder: str) -> None:
    flags = f"--model {model} --trainer.strategy fsdp2"
    main(["--config", TINY, "--trainer.default_root_dir", folder, *argv(flags)])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "message"),
    [
        (f"{HERE}.Forgetful", "fsdp2: scale is in no part"),
        ("example.classifier.Classifier", "fsdp2: Classifier has no configure_model"),
    ],
)
def test_what_is_not_divided_is_refused(tmp_path, model, message):
    job = on_ranks(tmp_path, 2, f"{HERE}.train_with", model, tmp_path)
    assert all(job.statuses)
    assert message in job.outputs[0]
    assert "Traceback" not in "".join(job.outputs)
