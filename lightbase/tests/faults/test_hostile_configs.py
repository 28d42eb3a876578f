"""Trust by place: what a file from somebody else names is not built. Damaged files
end in two lines."""

import os
import pickle
import shutil
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from example.classifier import Classifier
from example.data.synthetic import SyntheticImages
from example.models.mlp import MLP
from paths import TINY, Trained, script, time_limit
from PIL import Image

import lightbase
from lightbase import BaseDataModule, UserError

pytestmark = pytest.mark.linux  # links and alarms
STRANGE = (Path(__file__).parent / "strange.yaml").read_text()
BAD = Path("came/bad.ckpt")
MODULE = """
from pathlib import Path
from torch import nn

Path({target!r}).touch()

class Net(nn.Module): ...
"""
TRAIN = "train --trainer.max_epochs 3 --ckpt_path"
RESUME = f"{TRAIN} last --name tiny"
EVALUATE = "evaluate --ckpt_path"
EXPORT = "export --ckpt_path"
COMMANDS = (TRAIN, EVALUATE, EXPORT, "predict grey.png --ckpt_path")
SWEEP = f"sweep --config {TINY} --search model.lr=0.01 --name tried"
TRUST = ("--trust_checkpoint", "true")
UNTRUSTED = "is not in your folder of runs"


def run(command, *args):
    """Call a script in this process. command: Its name and the first arguments."""
    name, *words = command.split()
    return script(name).main([*words, *map(str, args)])


@dataclass
class Place:
    """The user's folder of runs, beside which the file `came/bad.ckpt` has come."""

    root: Path
    logs: Path
    victim: Path
    trained: Trained
    capsys: Any

    def outside(self):
        """Return the content of all that is not below logs/."""
        paths = [x for x in self.root.rglob("*") if not x.is_relative_to(self.logs)]
        return {path: path.is_file() and path.read_bytes() for path in paths}

    def write(self, changes):
        """Write a copy of a run's checkpoint that has other values at some keys."""
        best = self.trained()[0] / "checkpoints" / "best.ckpt"
        torch.save(torch.load(best, weights_only=True) | changes, BAD)
        return BAD

    def own(self, name="tiny", root=None):
        """Return the folder of a copy of a run, in the user's folder of runs or in
        `root`."""
        folder = (root or self.logs) / name / "version_0"
        shutil.copytree(self.trained()[0], folder)
        return folder

    def refused(self, command, *args):
        """Return the two lines of a script that has written nothing elsewhere."""
        before = self.outside()
        self.capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            run(command, *args)
        assert caught.value.code in (1, 2)
        error = self.capsys.readouterr().err.rstrip("\n")
        assert 1 <= len(error.splitlines()) <= 2, error
        assert error.startswith("error: ")
        assert self.outside() == before
        return error


@pytest.fixture
def place(trained, tmp_path, monkeypatch, capsys):
    """Yield the place. An installed module `hostile`, and `came/with_it.py`, write the
    file WRITTEN when they are imported. A test that hangs fails."""
    logs, victim = tmp_path / "logs", tmp_path / "victim"
    logs.mkdir()
    for name in ("site-packages/hostile.py", "work/came/with_it.py"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(MODULE.format(target=str(tmp_path / "WRITTEN")))
    monkeypatch.syspath_prepend(str(tmp_path / "site-packages"))
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setattr("lightbase.config.paths.Project.logs", logs)
    Image.new("L", (8, 8)).save("grey.png")
    victim.write_text("mine")
    with time_limit(20):
        yield Place(tmp_path, logs, victim, trained, capsys)
    assert victim.read_text() == "mine"
    assert not (tmp_path / "WRITTEN").exists()
    assert not {"hostile", "came", "came.with_it"} & sys.modules.keys()


def from_arguments(path=BAD):
    return Classifier.load_from_checkpoint(path, net=MLP([192, 16, 4]), num_classes=4)


PYTHON = (
    lightbase.load,
    BaseDataModule.load_from_checkpoint,
)


@pytest.mark.parametrize("path", [BAD, "x.safetensors"])
def test_a_strange_file_gives_its_weights_only(path, place):
    """Whatever it names, in any section."""
    safetensors = pytest.importorskip("safetensors.torch")
    changes = yaml.safe_load(STRANGE.replace("TARGET", str(place.root / "WRITTEN")))
    place.write(changes)
    for command in COMMANDS:
        error = place.refused(command, BAD)
        assert UNTRUSTED in error
        assert ("--model.weights" if command == TRAIN else "--config FILE") in error
    for way in PYTHON:
        with pytest.raises(UserError):
            way(BAD)
    weights = torch.load(BAD, weights_only=True)["state_dict"]
    safetensors.save_file(weights, "x.safetensors")
    metrics = run(EVALUATE, path, "--config", TINY)
    assert metrics["test/acc"] == place.trained()[1]["test/acc"]
    file = run(EXPORT, path, "--config", TINY, "--output", "o.pth")
    for name, value in torch.load(file, weights_only=True).items():
        assert torch.equal(value, weights[f"net.{name}"])
    layer = from_arguments(path).net.layers[1]
    assert torch.equal(layer.weight, weights["net.layers.1.weight"])


def test_no_path_makes_a_strange_file_the_users(place):
    place.own("tiny", place.root)
    (place.logs / "tiny").symlink_to(place.root / "tiny")
    place.write({})
    for path in ("tiny", place.logs / ".." / "work" / BAD):
        assert UNTRUSTED in place.refused(EVALUATE, path)
    assert UNTRUSTED in place.refused(RESUME)


class Global:
    def __reduce__(self):
        return os.system, ("touch WRITTEN",)


CONTENTS = {
    "a pickle that calls": lambda path: path.write_bytes(pickle.dumps(Global())),
    "a file of torch that calls": partial(torch.save, {"config": Global()}),
    "a cut file": lambda path: path.write_bytes(path.read_bytes()[:-2000]),
    "another shape": partial(torch.save, {"net.layers.1.weight": torch.zeros(3)}),
}


@pytest.mark.parametrize("name", CONTENTS)
def test_what_is_no_checkpoint_ends_in_two_lines(name, place):
    path = place.write({}).rename(place.logs / "bad.ckpt")
    CONTENTS[name](path)
    for command in COMMANDS:
        place.refused(command, path)
    place.refused(EVALUATE, path, "--config", TINY)
    place.refused("train --config", TINY, "--model.weights", path)
    data = SyntheticImages((3, 8, 8), 4)
    with_objects = lambda path: lightbase.load(path, from_arguments(), data)  # noqa: E731
    place.write({})
    for way in (*PYTHON, from_arguments, with_objects):
        with pytest.raises(UserError):
            way(path)


# What works without a question.


def test_own_runs_are_the_users_wherever_they_are(place):
    (place.root / "elsewhere").mkdir()
    link = place.root / "link"
    link.symlink_to(place.root / "elsewhere")
    root = ("--trainer.default_root_dir", link)
    best = place.own("other/than", link) / "checkpoints" / "best.ckpt"
    for path in (best, "other/than"):
        metrics = run(EVALUATE, path, *root)
        assert metrics["test/acc"] == place.trained()[1]["test/acc"]
    for path in ("last", best):
        assert run(TRAIN, path, *root, "--name", "other/than")["epochs"] == 3
    assert len([*link.glob("other/than/version_*/metrics.json")]) == 2


def test_a_file_that_is_trusted_is_built(place):
    place.write({})
    metrics = run(EVALUATE, BAD, *TRUST)
    assert metrics["test/acc"] == place.trained()[1]["test/acc"]
    assert run(TRAIN, BAD, *TRUST)["epochs"] == 3
    assert (place.logs / "tiny" / "version_0" / "metrics.json").exists()
    module, _ = lightbase.load(BAD, trust=True)
    assert isinstance(module.net, MLP)
