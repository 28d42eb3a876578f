"""fsdp2: weights that are divided among two processes. A run that is killed or stopped
goes on to the same weights, and one device evaluates it. fsdp2_sharded divides the
checkpoints, too."""

import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import programs
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from example.classifier import Classifier
from paths import TINY, argv, fails, script
from ranks import LIMIT_S, assert_none_left, free_port, on_ranks, start_train
from torch.distributed.checkpoint import state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from written import checkpoint_file, equal

from lightbase.commands.train import main
from lightbase.config.errors import UserError
from lightbase.model.shards import byte_sums, load_shards, save_shards
from lightbase.model.transfer import load_checked
from lightbase.run.checkpoint import AtomicCheckpointIO, ValidatedWeights
from lightbase.run.devices import ShardedCheckpoints

pytestmark = [
    pytest.mark.linux,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]
HERE = "test_sharded"
TWO = f"--model {HERE}.Sharded --trainer.strategy fsdp2 --trainer.devices 2 --data.batch_size 8"
SHARDS = TWO.replace("fsdp2", "fsdp2_sharded").replace("Sharded", "NeverWhole")


class Sharded(Classifier):
    """Divides the layers of the MLP, and then the rest of it."""

    def configure_model(self) -> None:
        net: Any = self.net
        if self.device_mesh is None or isinstance(net, FSDPModule):
            return
        mesh = self.device_mesh["data_parallel"]
        fully_shard([net.layers[0], net.layers[-1]], mesh=mesh)
        fully_shard(net, mesh=mesh)


class Waits(Sharded):
    """Waits in the second epoch until `signal_in_an_epoch` has sent a signal."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        root = Path(self.trainer.default_root_dir)
        if self.current_epoch == 1 and batch_idx == 4:
            (root / f"waits_{self.global_rank}").touch()
            programs.wait_for_file(root / "sent")


def signal_in_an_epoch(root: Path, flags: str, send: Any, number: int) -> None:
    """Train, send a signal in the second epoch, and wait until the run has ended."""
    run = start_train(root, flags)
    for rank in range(2):
        programs.wait_for_file(root / f"waits_{rank}")
    send(run.pid, number)
    (root / "sent").touch()
    run.communicate(timeout=LIMIT_S)
    assert run.returncode != 0
    assert_none_left(run.pid)


def refuse(*_: Any, **__: Any) -> Any:
    raise AssertionError("a process gathers whole tensors")


class NeverWhole(Sharded):
    """Fails if a process gathers whole tensors, as `fsdp2` does."""

    def setup(self, stage: str) -> None:
        if isinstance(self.trainer.strategy, ShardedCheckpoints):
            state_dict.StateDictOptions = DTensor.full_tensor = refuse  # type: ignore


class WaitingShards(NeverWhole, Waits):
    pass


class KilledInShards(NeverWhole):
    """The second epoch ends with a checkpoint of which only one shard is written. Then
    all processes are killed, unless the run has continued."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 0 and self.global_rank == 1:
            self.has_begun = True
        if self.current_epoch == 1 and hasattr(self, "has_begun"):
            dcp.HuggingFaceStorageWriter.write_data = kill_all  # type: ignore


def kill_all(writer: Any, *_: Any) -> None:
    while not [*Path(writer.path).glob("shard-00001*")]:  # of the other process
        time.sleep(0.01)
    os.killpg(0, signal.SIGKILL)


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


def state(folder: Path, name: str = "last") -> dict[str, Any]:
    """The weights, and the states of the optimizer, by name."""
    path = checkpoint_file(folder, name)
    content = load_shards(load_checked(path), path)
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
        flags = TWO.replace("Sharded", "Waits")
        signal_in_an_epoch(tmp_path / name, flags, os.killpg, sent)
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


def written_shards(folder: Path) -> list[str]:
    """The files of the shards in the folder of a run, such as best/0/shard-1-of-2, in
    which 0 is the folder that best.ckpt names, and 1 another one."""
    files = []
    for path in sorted(folder.rglob("*.safetensors")):
        step, name = path.parent, path.parent.parent.stem
        named = load_checked(checkpoint_file(folder, name))["shards"]
        files.append(f"{name}/{int(step.name != str(named))}/{path.name[:11]}")
    return files


COMPLETE = [
    f"{name}/0/shard-0000{rank}" for name in ("best", "last") for rank in (1, 2)
]


def finished(run: Any) -> str:
    printed: str = run.communicate(timeout=LIMIT_S)[0]
    assert run.returncode == 0, printed
    return printed


@pytest.mark.slow
def test_sharded_checkpoints_hold_what_whole_ones_do(tmp_path, capsys):
    finished(start_train(tmp_path / "whole", TWO))
    finished(start_train(tmp_path / "shards", SHARDS))
    whole = state(tmp_path / "whole/tiny/version_0")
    folder = tmp_path / "shards/tiny/version_0"
    last = checkpoint_file(folder, "last")
    names = {name for name, x in load_checked(last)["state_dict"].items() if x.is_meta}
    assert names == {name for name in whole if name.startswith("net.")}
    assert equal(state(folder), whole)
    assert written_shards(folder) == COMPLETE
    for number in (1, 2):
        lost = next(last.with_suffix(".shards").rglob(f"shard-0000{number}*"))
        kept = lost.rename(tmp_path / "lost")
        with pytest.raises(UserError, match=r"cannot be read|is damaged or incomplete"):
            state(folder)
        kept.rename(lost)
    # the other strategy goes on from both kinds
    for name, strategy in {"whole": "fsdp2_sharded", "shards": "fsdp2"}.items():
        flags = f"--ckpt_path last --trainer.max_epochs 3 --trainer.strategy {strategy}"
        finished(start_train(tmp_path / name, flags))
    assert written_shards(tmp_path / "whole/tiny/version_0")
    assert not [*folder.rglob("*.safetensors")]
    three = state(tmp_path / "whole/tiny/version_0")
    assert equal(three, state(folder))
    assert not equal(three, whole)


@pytest.mark.slow
def test_a_run_killed_between_two_shards_goes_on_to_equal_weights(tmp_path, capsys):
    finished(start_train(tmp_path / "straight", SHARDS))
    whole = state(tmp_path / "straight/tiny/version_0")
    flags = SHARDS.replace("NeverWhole", "KilledInShards")
    run = start_train(tmp_path / "killed", flags)
    run.communicate(timeout=LIMIT_S)
    assert run.returncode == -signal.SIGKILL
    assert_none_left(run.pid)
    folder = tmp_path / "killed/tiny/version_0"
    assert written_shards(folder) == sorted(["best/1/shard-00001", *COMPLETE])
    before = state(folder)
    assert not equal(before, whole)
    assert equal(state(folder, "best"), before)  # of the first epoch

    # one device goes on as from a file with whole tensors
    for name in ("shards", "file"):
        shutil.copytree(tmp_path / "killed", tmp_path / name)
    last = checkpoint_file(tmp_path / "file/tiny/version_0", "last")
    content = load_shards(load_checked(last), last)
    del content["shards"], content["shard_sums"]
    AtomicCheckpointIO().save_checkpoint(content, last)
    one = "--ckpt_path last --trainer.strategy auto --trainer.devices 1"
    for name in ("shards", "file"):
        args = ["--config", TINY, "--trainer.default_root_dir", str(tmp_path / name)]
        main([*args, *argv(one)])
    ended = state(tmp_path / "shards/tiny/version_0")
    assert equal(ended, state(tmp_path / "file/tiny/version_0"))
    assert not equal(ended, before)
    assert not [*(tmp_path / "shards").rglob("*.safetensors")]

    finished(start_train(tmp_path / "killed", "--ckpt_path last"))
    assert equal(state(folder), whole)
    assert written_shards(folder) == COMPLETE
    metrics = json.loads((folder / "metrics.json").read_text())
    shown = script("evaluate").main(["--ckpt_path", str(checkpoint_file(folder))])
    assert shown["test/acc"] == metrics["test/acc"]
    assert shown["test/loss"] == pytest.approx(metrics["test/loss"], rel=1e-5)


@pytest.mark.slow
def test_a_run_that_is_stopped_within_an_epoch_goes_on_from_its_shards(tmp_path):
    finished(start_train(tmp_path / "straight", SHARDS))
    flags = SHARDS.replace("NeverWhole", "WaitingShards")
    folder = tmp_path / "stopped/tiny/version_0"
    signal_in_an_epoch(tmp_path / "stopped", flags, os.kill, signal.SIGTERM)
    saved = load_checked(checkpoint_file(folder, "last"))
    assert 19 < saved["global_step"] < 38
    finished(start_train(tmp_path / "stopped", "--ckpt_path last"))
    assert equal(state(folder), state(tmp_path / "straight/tiny/version_0"))


@pytest.fixture
def weight(tmp_path):
    """A DTensor, in a group of this process alone."""
    address = f"tcp://127.0.0.1:{free_port()}"
    dist.init_process_group("gloo", init_method=address, rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    yield distribute_tensor(torch.arange(12.0).reshape(4, 3), mesh, [Shard(0)])
    dist.destroy_process_group()


@pytest.fixture
def saved(tmp_path, weight):
    """The path of a sharded checkpoint, with a folder that a killed write has left."""
    path = tmp_path / "x.ckpt"
    content = {"state_dict": {"net.w": weight, "n": torch.ones(2)}, "empty": {}}
    save_shards(content, path, 1)
    content = save_shards(content, path, 2)
    AtomicCheckpointIO().save_checkpoint(content, path)
    return path


def test_the_content_of_a_sharded_file(saved, weight):
    (folder,) = saved.with_suffix(".shards").iterdir()
    assert folder.name == "2"
    link = saved.with_name("link.ckpt")
    link.symlink_to(saved)
    for path in (saved, link):
        content = AtomicCheckpointIO().load_checkpoint(path)
        assert torch.equal(content["state_dict"]["net.w"], weight.full_tensor())
        assert content["state_dict"]["n"].tolist() == [1, 1]
        assert content["empty"] == {}
    AtomicCheckpointIO().remove_checkpoint(str(saved))
    assert not [*saved.with_suffix(".shards").iterdir()]


def test_a_folder_of_shards_that_is_not_as_it_was_written_is_refused(saved, caplog):
    (file,) = saved.with_suffix(".shards").rglob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-2] ^= 1
    for changed, words in (
        (bytes(content), "is damaged or incomplete"),
        (bytes(content)[:-8], "cannot be read"),
        (None, "cannot be read"),
    ):
        if changed is None:
            shutil.rmtree(file.parent)
        else:
            file.write_bytes(changed)
        with pytest.raises(UserError, match=words) as error:
            AtomicCheckpointIO().load_checkpoint(saved)
        assert str(file.parent) in str(error.value)
    assert not [x for x in caplog.records if x.exc_info]


def test_sums_count_a_tensor_that_each_process_has_once(weight, monkeypatch):
    whole = distribute_tensor(torch.ones(5), weight.device_mesh, [Replicate()])
    monkeypatch.setattr(dist, "all_reduce", lambda sums: sums.mul_(2))  # of two
    sums = byte_sums({"sharded": weight, "whole": whole})
    local = byte_sums({"sharded": weight.to_local(), "whole": torch.ones(5)})
    assert sums["sharded"] == 2 * local["sharded"]
    assert sums["whole"] == local["whole"]


def test_the_shards_of_one_checkpoint_are_not_those_of_another(tmp_path, weight):
    one, other, plain = (tmp_path / name for name in ("step.100", "step.200", "x.ckpt"))
    folder = plain.with_name("x.shards") / "of the user"
    folder.mkdir(parents=True)
    for path in (one, other, plain):
        content = {"state_dict": {"net.w": weight}}
        if path != plain:
            content = save_shards(content, path, 7)
        AtomicCheckpointIO().save_checkpoint(content, path)
    assert "net.w" in AtomicCheckpointIO().load_checkpoint(one)["state_dict"]
    assert folder.is_dir()


def test_a_full_disk_leaves_the_checkpoint_before(saved, weight, monkeypatch):
    before = saved.read_bytes()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(dcp.HuggingFaceStorageWriter, "write_data", full)
    with pytest.raises(UserError, match="No space left") as error:
        save_shards({"state_dict": {"net.w": weight}}, saved, 3)
    assert isinstance(error.value.__cause__, OSError)
    assert saved.read_bytes() == before
    assert [x.name for x in saved.with_suffix(".shards").iterdir()] == ["2"]


def test_shards_of_other_weights_than_validated_are_refused(tmp_path, weight):
    validated = ValidatedWeights()
    content = {"state_dict": {"net.w": weight}, "global_step": 7}
    for change, way in ((0, "whole"), (1, "changed")):
        state = {"net.w": weight + change}
        module: Any = torch.nn.Module()
        module.state_dict = lambda state=state: state
        trainer: Any = torch.nn.Module()
        trainer.global_step = 7
        validated.on_validation_epoch_end(trainer, module)
        saved = save_shards(content, tmp_path / "best.ckpt", change)
        if way == "whole":
            validated.check(saved)
        else:
            with pytest.raises(UserError, match="changes the weights"):
                validated.check(saved)


def train_with(model: str, folder: str) -> None:
    flags = f"--model {model} --trainer.strategy fsdp2"
    main(["--config", TINY, "--trainer.default_root_dir", folder, *argv(flags)])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "message"),
    [
        (f"{HERE}.Forgetful", "fsdp2: scale is in no part"),
        ("example.classifier.Classifier", "override the `configure_model()` hook"),
    ],
)
def test_what_is_not_divided_is_refused(tmp_path, model, message):
    job = on_ranks(tmp_path, 2, f"{HERE}.train_with", model, tmp_path)
    assert all(job.statuses)
    assert message in job.outputs[0]
    assert "Traceback" not in "".join(job.outputs)
