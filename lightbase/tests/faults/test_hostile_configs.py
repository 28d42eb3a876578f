"""Trust by place: what a file from somebody else names is not built, damaged files and
links in a run end in two lines, and nothing is read without end or written
elsewhere."""

import contextlib
import os
import pickle
import shutil
import sys
from collections.abc import Callable, Iterator
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
from safetensors.torch import save_file

import lightbase
from lightbase import BaseDataModule, UserError

pytestmark = pytest.mark.linux  # links, named pipes and alarms
HERE = Path(__file__).parent
STRANGE = (HERE / "strange.yaml").read_text()
BAD = "came/bad.ckpt"
MODULE = """
from pathlib import Path
from torch import nn

Path({target!r}).touch()

class Net(nn.Module): ...
class Loss(nn.CrossEntropyLoss):
    def __init__(self):
        super().__init__()
"""
HOSTILE = {"hostile", "came", "came.with_it"}
GONE = object()
TRAIN = "train --trainer.max_epochs 3 --ckpt_path"
RESUME = "train --name tiny --trainer.max_epochs 3 --ckpt_path last"
EVALUATE = "evaluate --ckpt_path"
PREDICT = "predict grey.png --ckpt_path"
EXPORT = "export --ckpt_path"
COMMANDS = (TRAIN, EVALUATE, PREDICT, EXPORT)  # the path of a checkpoint follows
SWEEP = f"sweep --config {TINY} --search model.lr=0.01 --name tried"
TRUST = ("--trust_checkpoint", "true")
UNTRUSTED = "is not in your folder of runs"


@pytest.fixture(autouse=True)
def alarm() -> Iterator[None]:
    """A test that hangs fails."""
    with time_limit(20):
        yield


def run(command: str, *args: object) -> Any:
    """Call a script in this process. command: Its name and the first arguments."""
    name, *words = command.split()
    return script(name).main([*words, *map(str, args)])


def change(file: Path, changes: dict[str, Any], to: str | Path = BAD) -> None:
    """Write a copy of a checkpoint with values at other keys, which blanks separate;
    GONE removes a key."""
    content = torch.load(file, weights_only=True)
    for keys, value in changes.items():
        *parents, last = [int(key) if key.isdigit() else key for key in keys.split()]
        place = content
        for key in parents:
            place = place[key]
        if value is GONE:
            del place[last]
        else:
            place[last] = value
    torch.save(content, to)


@dataclass
class Place:
    """The user's folder of runs, beside which the file `came/bad.ckpt` has come.

    target: A file that an installed module `hostile`, and `came/with_it.py`, write when
        they are imported.
    """

    root: Path
    logs: Path
    target: Path
    victim: Path
    trained: Trained
    capsys: Any

    def outside(self) -> dict[str, Any]:
        """All that is not below logs/."""
        paths = [x for x in self.root.rglob("*") if not x.is_relative_to(self.logs)]
        return {str(x): x.read_bytes() if x.is_file() else None for x in paths}

    def write(self, changes: dict[str, Any], to: str | Path = BAD) -> Any:
        """A copy of a run's checkpoint with values at other keys; returns the run's
        metrics."""
        folder, metrics = self.trained()
        change(folder / "checkpoints" / "best.ckpt", changes, to)
        return metrics

    def write_strange(self, name: str) -> Any:
        """The same with what strange.yaml has under this name."""
        text = STRANGE.replace("TARGET", str(self.target))
        return self.write(yaml.safe_load(text)[name])

    def own(self, name: str = "tiny", root: Path | None = None) -> Path:
        """The folder of a copy of a run in the user's folder of runs."""
        folder = (root or self.logs) / name / "version_0"
        shutil.copytree(self.trained()[0], folder)
        return folder

    def holds(self, command: str, *args: object) -> str:
        """The two lines with which a script ends; empty if it works. Nothing is written
        elsewhere."""
        before = self.outside()
        self.capsys.readouterr()
        error, status = "", 0
        try:
            run(command, *args)
        except SystemExit as end:
            status = end.code
        if status:
            error = self.capsys.readouterr().err.rstrip("\n")
            assert status in (1, 2), error
            assert 1 <= len(error.splitlines()) <= 2, error
            assert error.startswith("error: ")
            assert "\x1b" not in error
        assert self.outside() == before
        return error

    def refused(self, command: str, *args: object) -> str:
        """The two lines of a script that has read and written nothing else."""
        error = self.holds(command, *args)
        assert error, "nothing is refused"
        return error


@pytest.fixture
def place(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> Iterator[Place]:
    logs, target, victim = (tmp_path / name for name in ("logs", "WRITTEN", "victim"))
    for name in ("site-packages/hostile.py", "work/came/with_it.py"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(MODULE.format(target=str(target)))
    monkeypatch.syspath_prepend(str(tmp_path / "site-packages"))
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setattr("lightbase.core.project.Project.logs", logs)
    Image.new("L", (8, 8)).save("grey.png")
    victim.write_text("mine")
    yield Place(tmp_path, logs, target, victim, trained, capsys)
    imported = HOSTILE & sys.modules.keys()
    for name in HOSTILE:
        sys.modules.pop(name, None)
    assert victim.read_text() == "mine"
    assert not target.exists()
    assert not imported


def from_arguments(path: str = BAD) -> Classifier:
    return Classifier.load_from_checkpoint(path, net=MLP([192, 16, 4]), num_classes=4)


PYTHON: tuple[Callable[[str], Any], ...] = (
    lightbase.load,
    Classifier.load_from_checkpoint,
    BaseDataModule.load_from_checkpoint,
)


@pytest.mark.parametrize("name", yaml.safe_load(STRANGE))
def test_nothing_that_a_strange_file_names_is_built(name, place):
    place.write_strange(name)
    for command in COMMANDS:
        error = place.refused(command, BAD)
        assert UNTRUSTED in error
        if command == TRAIN:
            assert f"--model.weights {BAD}" in error
        else:
            assert "--config FILE" in error
            assert "--trust_checkpoint true" in error
            assert "hostile.Net" in error or "example." in error
    for way in PYTHON:
        with pytest.raises(UserError):
            way(BAD)
    assert isinstance(from_arguments().net, MLP)


def test_no_path_makes_a_strange_file_the_users(place):
    place.own("tiny", place.root)
    place.logs.mkdir()
    (place.logs / "tiny").symlink_to(place.root / "tiny")
    place.write({})
    for path in ("tiny", place.logs / ".." / "work" / BAD):
        assert UNTRUSTED in place.refused(EVALUATE, path)
    assert UNTRUSTED in place.refused(RESUME)


def holding_itself() -> dict[str, Any]:
    value: dict[str, Any] = {}
    value["ready"] = value["itself"] = value
    return value


SPECIAL = {"gone": GONE, "itself": holding_itself(), "huge": 10**400}


class StatesLoader(yaml.SafeLoader):
    """Reads states.yaml, which explains its tags."""


StatesLoader.add_constructor("!special", lambda _, node: SPECIAL[node.value])
StatesLoader.add_constructor(
    "!zeros", lambda loader, node: torch.zeros(loader.construct_sequence(node))
)
STATES = yaml.load((HERE / "states.yaml").read_text(), StatesLoader)


def damage(folder: Path, changes: dict[str, Any]) -> None:
    """Change both checkpoints of a run."""
    for file in folder.glob("checkpoints/*.ckpt"):
        change(file, changes, file)


@pytest.mark.parametrize("keys", STATES)
def test_a_damaged_state_ends_in_two_lines(keys, place):
    """A resume is refused. An evaluation may work: it does not need all of the state."""
    for i, value in enumerate(STATES[keys]):
        name = f"tiny{i}"
        folder = place.own(name)
        damage(folder, {keys: value})
        place.refused(RESUME, "--name", name)
        assert {path.name for path in folder.parent.iterdir()} == {"version_0"}
        place.holds(EVALUATE, name)
        with contextlib.suppress(UserError):
            lightbase.load(folder / "checkpoints" / "best.ckpt")


class Global:
    def __reduce__(self) -> Any:
        return os.system, ("touch WRITTEN",)


def make_pipe(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


CONTENTS: dict[str, Callable[[Path], Any]] = {
    "nothing": lambda path: path.write_bytes(b""),
    "a pickle that calls": lambda path: path.write_bytes(pickle.dumps(Global())),
    "a file of torch that calls": partial(torch.save, {"config": Global()}),
    "a cut file": lambda path: path.write_bytes(path.read_bytes()[:-2000]),
    "a list": partial(torch.save, [1, 2]),
    "weights": partial(torch.save, {"layers.9.weight": torch.zeros(3)}),
    "a named pipe": make_pipe,
}


@pytest.mark.parametrize("name", CONTENTS)
def test_what_is_no_checkpoint_ends_in_two_lines(name, place):
    place.logs.mkdir()
    path = place.logs / "bad.ckpt"
    place.write({}, path)
    CONTENTS[name](path)
    for command in COMMANDS:
        place.refused(command, path)
    place.refused(EVALUATE, path, "--config", TINY)
    place.refused("train --config", TINY, "--model.weights", path)
    for way in (*PYTHON, from_arguments):
        with pytest.raises(UserError):
            way(path)


def test_files_that_are_read_are_regular(place):
    for name in ("x.safetensors", "x.pth"):
        make_pipe(Path(name))
        place.refused("train --config", TINY, "--model.weights", name)
    make_pipe(Path("x.yaml"))
    for command in (f"{EVALUATE} {BAD}", "train", "sweep --search model.lr=0.1"):
        place.refused(command, "--config", "x.yaml")
    for name in ("config.yaml", "progress.json", "metrics.json"):
        make_pipe(place.own(name) / name)
    run("runs")
    out, error = place.capsys.readouterr()
    assert "progress.json" in out
    assert [line.endswith(" is damaged") for line in error.splitlines()] == [True] * 3


def replace_by_link(path: Path, elsewhere: Path) -> None:
    """Moves a file or folder, and leaves a link that leads there. The link to what is
    missing leads to nothing."""
    if path.exists():
        shutil.move(path, elsewhere)
    path.symlink_to(elsewhere)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "progress.json",
        ".progress.json.part",
        "checkpoints",
        "checkpoints/last.ckpt",
    ],
)
def test_a_resume_follows_no_link(name, place):
    path = place.own() / name
    replace_by_link(path, place.root / "elsewhere")
    place.refused(RESUME)
    place.refused(TRAIN, place.logs / "tiny" / "version_0" / "checkpoints/last.ckpt")
    assert path.is_symlink()
    path.unlink()
    make_pipe(path)
    place.refused(RESUME)


def test_a_resume_deletes_nothing_elsewhere(place):
    folder = place.own()
    number, path = torch.tensor(0.0), str(place.victim)
    state = {
        "best_k_models": {path: number},
        "best_model_path": path,
        "kth_best_model_path": path,
        "kth_value": number,
        "best_model_score": number,
    }
    prefix = "callbacks RunCheckpoint/best "
    damage(folder, {prefix + key: value for key, value in state.items()})
    place.refused(RESUME)


def test_a_new_run_follows_no_link(place):
    place.logs.mkdir()
    (place.logs / "a").symlink_to(place.root)
    for name in ("a", "a/tiny"):
        place.refused("train --config", TINY, "--name", name)


@pytest.mark.parametrize(
    ("command", "link"),
    [
        ("export --ckpt_path tiny", "checkpoints/best.pth"),
        ("evaluate --ckpt_path tiny --report", "report.csv"),
        ("predict --ckpt_path tiny grey.png --output x.csv", "x.csv"),
        ("runs --csv x.csv", "x.csv"),
        ("runs --plot x.png", "x.png"),
    ],
)
def test_no_script_writes_through_a_link(command, link, place):
    folder = place.own()
    if command.endswith(("tiny", "--report")):
        link = folder / link
    Path(link).symlink_to(place.victim)
    place.refused(command)


def test_a_sweep_follows_no_link_and_may_be_damaged(place):
    run(SWEEP)
    for name in ("", "study.journal", "trial_000"):
        path = place.logs / "tried" / name
        replace_by_link(path, place.root / "elsewhere")
        place.refused(SWEEP)
        path.unlink()
        shutil.move(place.root / "elsewhere", path)
    journal = place.logs / "tried" / "study.journal"
    journal.write_text(journal.read_text() + '{"op_code": 5}\n')
    place.refused(SWEEP)
    make_pipe(journal)
    place.refused(SWEEP)


def test_runs_prints_no_control_characters(tmp_path, capsys):
    configs = [
        yaml.safe_dump({"model": {"init_args": {"lr": "a\x1b[2Jb\x9b"}}}),
        f"a: !!python/object/apply:os.system [touch {tmp_path}/WRITTEN]",
    ]
    for i, text in enumerate(configs):
        folder = tmp_path / "\x1b[31mx" / f"version_{i}"
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text(text)
        (folder / "progress.json").write_text("{}")
    run("runs --trainer.default_root_dir", tmp_path)
    out, error = capsys.readouterr()
    assert "\\x1b[31mx" in out
    assert "is damaged" in error
    assert not {"\x1b", "\x9b"} & {*out, *error}
    assert not (tmp_path / "WRITTEN").exists()


# What works without a question.


def test_own_runs_are_the_users_wherever_they_are(place):
    (place.root / "elsewhere").mkdir()
    link = place.root / "link"
    link.symlink_to(place.root / "elsewhere")
    flags = ["--trainer.default_root_dir", link, "--name", "other/than"]
    best = place.own("other/than", link) / "checkpoints" / "best.ckpt"
    accuracy = place.trained()[1]["test/acc"]
    assert run(EVALUATE, best, *flags[:2])["test/acc"] == accuracy
    assert run(EVALUATE, "other/than", *flags[:2])["test/acc"] == accuracy
    assert run(TRAIN, "last", *flags)["epochs"] == 3
    assert run(TRAIN, best, *flags, "--trainer.max_epochs", 4)["epochs"] == 4
    assert len([*(link / "other" / "than").glob("version_*/metrics.json")]) == 2


def test_a_file_that_is_trusted_is_built(place):
    metrics = place.write_strange("a place for runs")
    assert run(EVALUATE, BAD, *TRUST)["test/acc"] == metrics["test/acc"]
    assert run(TRAIN, BAD, *TRUST)["epochs"] == 3
    assert (place.logs / "tiny" / "version_0" / "metrics.json").exists()
    assert isinstance(lightbase.load(BAD, trust=True)[1], SyntheticImages)
    assert isinstance(Classifier.load_from_checkpoint(BAD, trust=True).net, MLP)


@pytest.mark.parametrize("path", [BAD, "x.safetensors"])
def test_the_users_yaml_takes_any_file_of_weights(path, place):
    accuracy = place.write_strange("a loss")["test/acc"]
    weights = torch.load(BAD, weights_only=True)["state_dict"]
    if path != BAD:
        save_file(weights, path)
    before = place.outside()
    assert run(EVALUATE, path, "--config", TINY)["test/acc"] == accuracy
    assert place.outside() == before
    file = run(EXPORT, path, "--config", TINY, "--output", "o.pth")
    for name, value in torch.load(file, weights_only=True).items():
        assert torch.equal(value, weights[f"net.{name}"])
    layer = from_arguments(path).net.layers[1]
    assert torch.equal(layer.weight, weights["net.layers.1.weight"])
