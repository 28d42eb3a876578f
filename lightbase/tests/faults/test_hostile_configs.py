"""Trust by place: what a file from somebody else names is not built, damaged files and
links in a run end in two lines, and nothing is read without end or written
elsewhere."""

import contextlib
import os
import pickle
import pkgutil
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import optuna
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
from lightbase import BaseDataModule, BaseModule, UserError
from lightbase.core.project import PROJECT, Project

pytestmark = pytest.mark.linux  # links, named pipes and alarms
HERE = Path(__file__).parent
LOGS = vars(Project)["logs"]  # which the fixture `repository` replaces
BAD = "came/bad.ckpt"
MODULE = """
from pathlib import Path
from lightning import LightningDataModule, LightningModule
from torch import nn, optim

Path({target!r}).touch()

class Net(nn.Module): ...
class Loss(nn.CrossEntropyLoss):
    def __init__(self):
        super().__init__()
class SGD(optim.SGD): ...
class Model(LightningModule): ...
class Data(LightningDataModule): ...
def write(*args, **kwargs): ...
"""
HOSTILE = {"hostile", "came", "came.with_it", "with_it"}
GONE = object()
TRAIN = "train --trainer.max_epochs 3 --ckpt_path"
RESUME = "train --name tiny --trainer.max_epochs 3 --ckpt_path last"
EVALUATE = "evaluate --ckpt_path"
PREDICT = "predict grey.png --ckpt_path"
EXPORT = "export --ckpt_path"
COMMANDS = (TRAIN, EVALUATE, PREDICT, EXPORT)  # the path of a checkpoint follows
SWEEP = f"sweep --config {TINY} --search model.lr=0.01 --name tried"
TRUST = ("--trust_checkpoint", "true")


@pytest.fixture(autouse=True)
def alarm() -> Iterator[None]:
    """A test that hangs fails."""
    with time_limit(20):
        yield


def run(command: str, *args: object) -> Any:
    """Call a script in this process. command: Its name and the first arguments."""
    name, *words = command.split()
    return script(name).main([*words, *map(str, args)])


def set_value(content: Any, keys: str, value: Any) -> None:
    """Set what stands at the keys, which blanks separate; GONE removes it."""
    *parents, last = [int(key) if key.isdigit() else key for key in keys.split()]
    for key in parents:
        if isinstance(content, list):
            content = content[key]
        else:
            content = content.setdefault(key, {})
    if value is GONE:
        del content[last]
    else:
        content[last] = value


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

    def write(
        self, changes: dict[str, Any] | None = None, path: str | Path = BAD
    ) -> Any:
        """A copy of a run's checkpoint with values at other keys; returns the run's
        metrics."""
        folder, metrics = self.trained()
        content = torch.load(folder / "checkpoints" / "best.ckpt", weights_only=True)
        for keys, value in (changes or {}).items():
            set_value(content, keys, value)
        torch.save(content, path)
        return metrics

    def write_strange(self, name: str) -> Any:
        """The same with what strange.yaml has under this name."""
        text = STRANGE.replace("TARGET", str(self.target))
        return self.write(yaml.safe_load(text)[name])

    def own(self, name: str = "tiny", root: Path | None = None, *flags: str) -> Path:
        """The folder of a copy of a run in the user's folder of runs."""
        folder = (root or self.logs) / name / "version_0"
        shutil.copytree(self.trained(*flags)[0], folder)
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
        assert self.outside() == before
        return error

    def refused(self, command: str, *args: object) -> str:
        """The two lines of a script that has read and written nothing else."""
        error = self.holds(command, *args)
        assert error, "nothing is refused"
        return error

    def forget(self) -> None:
        """A module of somebody else was imported, as it may be; from now on it was
        not."""
        self.target.unlink()
        del sys.modules["hostile"]


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
    for name in (*HOSTILE, "own_loss"):
        sys.modules.pop(name, None)
    assert victim.read_text() == "mine"
    assert not target.exists()
    assert not imported


def from_arguments(path: str = BAD) -> Classifier:
    return Classifier.load_from_checkpoint(path, net=MLP([192, 16, 4]), num_classes=4)


def new_data() -> SyntheticImages:
    return SyntheticImages([3, 8, 8], 4, 350, 75, batch_size=16)


def train_objects(path: str) -> Any:
    module = Classifier(MLP([192, 16, 4]), num_classes=4)
    return lightbase.train(module, new_data(), ckpt_path=path, max_epochs=3)


PYTHON: tuple[Callable[[str], Any], ...] = (
    lightbase.load,
    train_objects,
    Classifier.load_from_checkpoint,
    partial(BaseModule.load_from_checkpoint, map_location="cpu"),
    BaseDataModule.load_from_checkpoint,
)


def named(class_path: str, /, **arguments: Any) -> dict[str, Any]:
    return {"class_path": class_path, "init_args": arguments}


def most_are_slow(names: Iterable[str], every: int) -> list[Any]:
    """Parameters, of which one of so many is for the quick tests. Of a long list, the
    slow tests take one of seven of the others; with the variable FAULT_HOSTILE they
    take all."""
    names = list(names)
    step = 1 if os.environ.get("FAULT_HOSTILE") or len(names) <= 20 else 7
    params = []
    for i, name in enumerate(names):
        if i % every == 0:
            params.append(pytest.param(name))
        elif i % step == 0:
            params.append(pytest.param(name, marks=pytest.mark.slow))
    return params


STRANGE = (HERE / "strange.yaml").read_text()
NAMES = yaml.safe_load(STRANGE)
CRITERION = "config model init_args criterion"
UNTRUSTED = "is not in your folder of runs"


@pytest.mark.parametrize("name", most_are_slow(NAMES, 8))
def test_nothing_that_a_strange_file_names_is_built(name, place):
    place.write_strange(name)
    Path("came/config.yaml").write_text(
        yaml.safe_dump({"model": named("hostile.Model")})
    )
    for command in COMMANDS:
        error = place.refused(command, BAD)
        assert UNTRUSTED in error
        assert "\x1b" not in error
        if command == TRAIN:
            assert f"--model.weights {BAD}" in error
        else:
            assert "--config FILE" in error
            assert "--trust_checkpoint true" in error
            shown = ("hostile.Net", "example.data.synthetic", "Data")
            assert any(part in error for part in shown)
    if name == "control characters":
        assert "\\x1b[2Jhostile.Net" in place.refused(EVALUATE, BAD)
    for way in PYTHON:
        with pytest.raises(UserError):
            way(BAD)
    assert isinstance(from_arguments().net, MLP)


@pytest.mark.parametrize("name", most_are_slow(NAMES, 25))
def test_any_file_gives_its_weights(name, place):
    metrics = place.write_strange(name)
    before = place.outside()
    assert run(EVALUATE, BAD, "--config", TINY)["test/acc"] == metrics["test/acc"]
    module, data = from_arguments(), new_data()
    weights = torch.load(BAD, weights_only=True)["state_dict"]
    lightbase.load(BAD, module, data)
    for key, value in module.state_dict().items():
        assert torch.equal(value, weights[key])
    assert place.outside() == before


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    "way", most_are_slow(["a run", "dots", "a similar name", "a folder", "a link"], 4)
)
def test_no_path_makes_a_strange_file_the_users(way, command, place):
    place.write()
    place.logs.mkdir()
    came = Path(BAD).absolute()
    path: Path | str = place.logs / ".." / "work" / BAD
    if way == "a link":
        path = place.logs / "own.ckpt"
        path.symlink_to(came)
    elif way == "a folder":
        (place.logs / "tiny").symlink_to(came.parent)
        path = place.logs / "tiny" / "bad.ckpt"
    elif way == "a similar name":
        path = place.root / "logs_of_others" / "bad.ckpt"
        path.parent.mkdir()
        shutil.copy(BAD, path)
    elif way == "a run":
        shutil.copytree(place.trained()[0], place.root / "tiny" / "version_0")
        (place.logs / "tiny").symlink_to(place.root / "tiny")
        path = "tiny"
        if command == TRAIN:
            command, path = "train --name tiny --ckpt_path", "last"
    assert UNTRUSTED in place.refused(command, path)


def holding_itself() -> dict[str, Any]:
    value: dict[str, Any] = {}
    value["ready"] = value["itself"] = value
    return value


def deep() -> list[Any]:
    value: list[Any] = []
    for _ in range(100):
        value = [value]
    return value


SPECIAL = {
    "gone": GONE,
    "itself": holding_itself(),
    "deep": deep(),
    "big": {str(i): i for i in range(200_000)},
    "huge": 10**400,
    "bytes": torch.zeros(0, dtype=torch.uint8),
    "complex": torch.zeros(16, 192, dtype=torch.complex64),
}


class StatesLoader(yaml.SafeLoader):
    """Reads states.yaml, which explains its tags."""


StatesLoader.add_constructor("!special", lambda _, node: SPECIAL[node.value])
StatesLoader.add_constructor("!number", lambda _, node: torch.tensor(float(node.value)))
StatesLoader.add_constructor(
    "!zeros", lambda loader, node: torch.zeros(loader.construct_sequence(node))
)
SECTIONS = yaml.load((HERE / "states.yaml").read_text(), StatesLoader)
STATES: dict[str, tuple[str, Any]] = {}  # by section, keys and value: keys, value
for section, values_by_keys in SECTIONS.items():
    for keys, values in values_by_keys.items():
        for i, value in enumerate(values):
            shown = "missing" if value is GONE else str(value)[:30]
            STATES[f"{section}: {keys} {shown} {i}"] = keys, value
SCHEDULE = ("--model.scheduler", "StepLR", "--model.scheduler_args", "{step_size: 1}")
BEST = "callbacks RunCheckpoint/best"


def states(section: str) -> list[str]:
    return [name for name in STATES if name.startswith(f"{section}: ")]


def damage(folder: Path, keys: str, value: Any) -> dict[Path, bytes]:
    """Changes both checkpoints of a run; returns them."""
    files = [*folder.glob("checkpoints/*.ckpt")]
    for file in files:
        content = torch.load(file, weights_only=True)
        set_value(content, keys, value)
        torch.save(content, file)
    return {file: file.read_bytes() for file in files}


def damaged_run(place: Place, name: str) -> tuple[Path, dict[Path, bytes]]:
    """A run of the user with a state of states.yaml, and its checkpoints."""
    flags = SCHEDULE if "with a schedule: " in name else ()
    folder = place.own("tiny", None, *flags)
    return folder, damage(folder, *STATES[name])


@pytest.mark.parametrize(
    "name",
    [
        *most_are_slow(states("damaged"), 60),
        *most_are_slow(states("damaged with a schedule"), 16),
    ],
)
def test_a_damaged_state_ends_in_two_lines(name, place):
    """A resume is refused. An evaluation may work: it does not need all of the state.
    From somebody else, the same file gives its weights at most."""
    folder, files = damaged_run(place, name)
    place.refused(RESUME)
    assert {file: file.read_bytes() for file in files} == files
    best = folder / "checkpoints" / "best.ckpt"
    place.holds(EVALUATE, "tiny")
    with contextlib.suppress(UserError):
        lightbase.load(best)
    shutil.copy(best, BAD)
    place.holds(EVALUATE, BAD, "--config", TINY)
    for command in COMMANDS:
        place.refused(command, BAD)
    with contextlib.suppress(UserError):
        from_arguments()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [*states("harmless"), *states("harmless with a schedule")]
)
def test_what_a_resume_need_not_read_does_no_harm(name, place):
    folder, _ = damaged_run(place, name)
    place.holds(EVALUATE, "tiny")
    place.holds(RESUME)
    place.holds(TRAIN, folder / "checkpoints" / "last.ckpt")


class Global:
    def __reduce__(self) -> Any:
        return os.system, ("touch WRITTEN",)


CONTENTS: dict[str, Callable[[Path], Any]] = {
    "nothing": lambda path: path.write_bytes(b""),
    "text": lambda path: path.write_text("weights"),
    "a pickle that calls": lambda path: path.write_bytes(pickle.dumps(Global())),
    "a file of torch that calls": partial(torch.save, {"config": Global()}),
    "an old file that calls": partial(
        torch.save, Global(), _use_new_zipfile_serialization=False
    ),
    "a cut file": lambda path: path.write_bytes(path.read_bytes()[:-2000]),
    "a list": partial(torch.save, [1, 2]),
    "None": partial(torch.save, None),
    "a tensor": partial(torch.save, torch.zeros(3)),
    "a number": partial(torch.save, 5),
    "a mapping of lists": partial(torch.save, {"state_dict": [], "config": []}),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "a named pipe": lambda path: (path.unlink(), os.mkfifo(path)),
    "zeros without end": lambda path: (path.unlink(), path.symlink_to("/dev/zero")),
    "a link to itself": lambda path: (path.unlink(), path.symlink_to(path)),
}
IRREGULAR = pytest.mark.parametrize(
    "name", ["a named pipe", "zeros without end", "a folder"]
)


@pytest.fixture
def limited_memory() -> Iterator[None]:
    """Reading without end fails instead of filling the memory."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 4 * 2**30, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.usefixtures("limited_memory")
@pytest.mark.parametrize("is_own", [False, True], ids=["strange", "own"])
@pytest.mark.parametrize("name", most_are_slow(CONTENTS, 6))
def test_what_is_no_checkpoint_ends_in_two_lines(name, is_own, place):
    place.logs.mkdir()
    path = place.logs / "bad.ckpt" if is_own else Path(BAD).absolute()
    place.write(None, path)
    CONTENTS[name](path)
    for command in COMMANDS:
        place.refused(command, path)
    for command in (EVALUATE, PREDICT, EXPORT):
        place.refused(command, path, "--config", TINY)
    place.refused("train --config", TINY, "--model.weights", path)
    for way in (*PYTHON, from_arguments):
        with pytest.raises(UserError):
            way(path)


@pytest.mark.usefixtures("limited_memory")
@IRREGULAR
@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_weights_are_a_regular_file(suffix, name, place):
    path = Path(f"came/weights{suffix}")
    path.touch()
    CONTENTS[name](path)
    place.refused("train --config", TINY, "--model.weights", path)
    place.refused(EVALUATE, path, "--config", TINY)


@pytest.mark.usefixtures("limited_memory")
@IRREGULAR
def test_a_config_is_a_regular_file(name, place):
    place.write()
    Path("config.yaml").touch()
    CONTENTS[name](Path("config.yaml"))
    for command in COMMANDS:
        place.refused(command, BAD, "--config", "config.yaml")
    place.refused("train --config config.yaml")
    place.refused("sweep --search model.lr=0.1 --config config.yaml")


@pytest.mark.usefixtures("limited_memory")
@IRREGULAR
@pytest.mark.parametrize("file", ["config.yaml", "progress.json", "metrics.json"])
def test_runs_reads_regular_files(file, name, place):
    CONTENTS[name](place.own() / file)
    run("runs")
    out, error = place.capsys.readouterr()
    assert "tiny" in out
    assert f"{file} is damaged" in error
    assert len(error.splitlines()) == 1


WRITTEN = [
    *("environment.txt", "config.yaml", "hparams.yaml", "metrics.json"),
    *("progress.json", ".lock", ".progress.json.part"),
    *("checkpoints/last.ckpt", "checkpoints/best.ckpt"),
]


@pytest.mark.parametrize("name", ["a named pipe", "a folder"])
@pytest.mark.parametrize("file", most_are_slow(WRITTEN, 9))
def test_a_resume_reads_and_writes_regular_files(file, name, place):
    path = place.own() / file
    path.touch()
    CONTENTS[name](path)
    place.holds(RESUME)


@pytest.mark.usefixtures("limited_memory")
@pytest.mark.parametrize("name", ["zeros without end", "a folder"])
def test_curves_are_drawn_of_regular_files(name, place):
    folder = place.own()
    CONTENTS[name](next(folder.glob("events.*")))
    place.own("other")
    place.holds("runs --plot", place.logs / "x.png")


IN_A_RUN = [
    *("config.yaml", "environment.txt", "events.*", "hparams.yaml", "metrics.json"),
    *("progress.json", ".lock", ".config.yaml.part", ".progress.json.part"),
    *("checkpoints", "checkpoints/last.ckpt", "checkpoints/best.ckpt"),
    *("checkpoints/.last.ckpt.part", "checkpoints/new", "", ".."),
]


def replace_by_link(path: Path, elsewhere: Path) -> None:
    """Moves a file or folder, and leaves a link that leads there. The link to what is
    missing leads to nothing."""
    if path.exists():
        shutil.move(path, elsewhere)
    path.symlink_to(elsewhere)


@pytest.mark.parametrize("is_typed", [False, True], ids=["last", "path"])
@pytest.mark.parametrize("file", most_are_slow(IN_A_RUN, 6))
def test_a_resume_follows_no_link(file, is_typed, place):
    folder = place.own()
    path = {"": folder, "..": folder.parent}.get(file) or next(
        folder.glob(file), folder / file
    )
    replace_by_link(path, place.root / "elsewhere")
    if is_typed:
        place.refused(TRAIN, folder / "checkpoints" / "last.ckpt")
    else:
        place.refused(RESUME)
    assert path.is_symlink()


@pytest.mark.parametrize(
    "path",
    most_are_slow(["{folder}/../../../../victim", "{victim}", "local://{victim}"], 3),
)
def test_a_resume_deletes_nothing_elsewhere(path, place):
    folder = place.own() / "checkpoints"
    path = path.format(folder=folder, victim=place.victim)
    number = torch.tensor(0.0)
    damage(folder.parent, f"{BEST} dirpath", str(folder))
    damage(folder.parent, f"{BEST} best_k_models", {path: number})
    for key in ("best_model_path", "kth_best_model_path"):
        damage(folder.parent, f"{BEST} {key}", path)
    for key in ("kth_value", "best_model_score"):
        damage(folder.parent, f"{BEST} {key}", number)
    place.holds(RESUME)


@pytest.mark.parametrize("name", ["tiny", "a/tiny", "a/b/tiny"])
def test_a_new_run_follows_no_link(name, place):
    (place.root / "elsewhere" / "b").mkdir(parents=True)
    path = place.logs / name.partition("/")[0]
    path.parent.mkdir()
    path.symlink_to(place.root / "elsewhere")
    place.refused("train --config", TINY, "--name", name)


@pytest.mark.parametrize("file", ["best.pth", ".best.pth.part", "checkpoints"])
@pytest.mark.parametrize("is_missing", [False, True], ids=["", "to nothing"])
def test_export_writes_through_no_link(file, is_missing, place):
    folder = place.own() / "checkpoints"
    if file == "checkpoints":
        replace_by_link(folder, place.root / "elsewhere")
    else:
        (folder / file).symlink_to(place.target if is_missing else place.victim)
    if file == ".best.pth.part":
        place.holds(EXPORT, "tiny")
        assert torch.load(folder / "best.pth", weights_only=True)
    else:
        place.refused(EXPORT, "tiny")


@pytest.mark.parametrize(
    "file", ["report.csv", "confusion_matrix.csv", ".report.csv.part", ""]
)
@pytest.mark.parametrize("is_typed", [False, True], ids=["run", "folder"])
def test_a_report_is_written_through_no_link(file, is_typed, place):
    folder = place.own()
    command = "evaluate --ckpt_path tiny --report"
    if is_typed:
        folder = place.logs / "reports"
        folder.mkdir()
        command += f" {folder}"
    if file:
        (folder / file).symlink_to(place.victim)
    else:
        replace_by_link(folder, place.root / "elsewhere")
    if file.endswith(".part"):
        run(command)
        assert (folder / "report.csv").is_file()
    else:
        place.refused(command)


@pytest.mark.parametrize(
    "command",
    [
        "predict --ckpt_path tiny grey.png --output x.csv",
        "predict --ckpt_path tiny grey.png --output x.npz",
        "runs --csv x.csv",
        "runs --plot x.png",
        "export --ckpt_path tiny --format pth --output x.pth",
        "export --ckpt_path tiny --format pth --output folder/new.pth",
        pytest.param(
            "export --ckpt_path tiny --format pt2 --output x.pt2",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_file_that_is_typed_is_written_through_no_link(command, place):
    place.own()
    Path("folder").symlink_to(place.root)
    output = Path(command.split()[-1])
    if output.parent.name != "folder":
        output.symlink_to(place.victim)
    place.refused(command)


@pytest.fixture(scope="module")
def tried(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a sweep, in which a trial has not ended."""
    root = tmp_path_factory.mktemp("swept")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(optuna.Study, "tell", lambda *_, **__: sys.exit(1))
        with pytest.raises(SystemExit):
            run(SWEEP, "--trainer.default_root_dir", root)
    (root / "tried" / "trial_000" / "version_0" / "metrics.json").unlink()
    return root / "tried"


@pytest.fixture
def sweep(place: Place, request: pytest.FixtureRequest) -> Path:
    """A copy of this folder in the user's folder of runs."""
    # asked for here: it needs what other fixtures have set
    tried = request.getfixturevalue("tried")
    return Path(shutil.copytree(tried, place.logs / "tried"))


IN_A_SWEEP = [
    *("", ".lock", "study.journal", "trial_000", "trial_000/.lock"),
    *("trial_000/output.txt", "trial_000/version_0"),
    "trial_000/version_0/config.yaml",
    "trial_000/version_0/checkpoints/last.ckpt",
]


@pytest.mark.parametrize("file", most_are_slow(IN_A_SWEEP, 4))
def test_a_sweep_follows_no_link(file, sweep, place):
    replace_by_link(sweep / file, place.root / "elsewhere")
    place.refused(SWEEP)


@pytest.mark.usefixtures("limited_memory")
@pytest.mark.parametrize(
    "name", most_are_slow(["a named pipe", "zeros without end", "a folder"], 3)
)
def test_a_sweep_reads_regular_files(name, sweep, place):
    CONTENTS[name](sweep / "study.journal")
    place.refused(SWEEP)


@pytest.mark.parametrize(
    "line",
    most_are_slow(["x", "null", "[]", "{}", '{"op_code": 5}', '{"op_code": "x"}'], 3),
)
def test_a_damaged_sweep_ends_in_two_lines(line, sweep, place):
    with (sweep / "study.journal").open("a") as journal:
        journal.write(f"{line}\n")
    place.refused(SWEEP)


def test_a_sweep_does_not_continue_a_trial_elsewhere(sweep, place):
    checkpoints = sweep / "trial_000" / "version_0" / "checkpoints"
    replace_by_link(checkpoints, place.root / "elsewhere")
    before = place.outside()
    with pytest.raises(SystemExit):
        run(SWEEP)
    assert place.outside() == before
    reasons = (sweep / "study.journal").read_text()
    assert UNTRUSTED in reasons or "through a link" in reasons


def test_runs_prints_no_control_characters(tmp_path, capsys):
    rates = ("a\x1b[2Jb", "c\x9bd")
    configs = [yaml.safe_dump({"model": {"init_args": {"lr": lr}}}) for lr in rates]
    configs.append(f"a: !!python/object/apply:os.system [touch {tmp_path}/WRITTEN]")
    for i, text in enumerate(configs):
        folder = tmp_path / "\x1b[31mx" / f"version_{i}"
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text(text)
        (folder / "environment.txt").touch()
    run("runs --trainer.default_root_dir", tmp_path)
    out, error = capsys.readouterr()
    assert "a\\x1b[2Jb" in out
    assert "\\x1b[31mx" in out
    assert not {"\x1b", "\x9b"} & {*out, *error}
    assert "is damaged" in error
    assert not (tmp_path / "WRITTEN").exists()


@pytest.mark.parametrize("name", states("control characters"))
@pytest.mark.slow
def test_an_error_quotes_no_control_characters(name, place):
    damaged_run(place, name)
    for command in (RESUME, "evaluate --ckpt_path tiny", f"{PREDICT} tiny"):
        with contextlib.suppress(SystemExit):
            run(command)
        assert "\x1b" not in "".join(place.capsys.readouterr())


# What works without a question.


@pytest.mark.parametrize(
    "way", most_are_slow(["moved into a link", "moved", "renamed", "logs is a link"], 4)
)
def test_own_runs_are_the_users_wherever_they_are(way, place, monkeypatch):
    elsewhere = place.root / "elsewhere"
    elsewhere.mkdir()
    root, flags, name = place.logs, [], "tiny"
    if way == "renamed":
        name = "other/than"
    elif way == "logs is a link":
        place.logs.symlink_to(elsewhere)
        monkeypatch.setattr("lightbase.core.project.Project.logs", LOGS)
        monkeypatch.setattr(PROJECT, "root", place.root)
    else:
        root = elsewhere
        if way == "moved into a link":
            root = place.root / "link"
            root.symlink_to(elsewhere)
        flags = ["--trainer.default_root_dir", str(root)]
    folder = place.own(name, root)
    best, last = (folder / "checkpoints" / f"{x}.ckpt" for x in ("best", "last"))
    for path in (name, best):
        tested = run(EVALUATE, path, *flags)
        assert tested["test/acc"] == place.trained()[1]["test/acc"]
    run(PREDICT, best, *flags)
    assert run(EXPORT, best, *flags).exists()
    assert run(TRAIN, "last", "--name", name, *flags)
    if way == "renamed":
        flags = ["--name", name]
    resumed = run(TRAIN, last, *flags, "--trainer.max_epochs", 4)
    assert resumed["epochs"] == 4
    assert [x.name for x in folder.parent.iterdir()] == ["version_0"]
    fresh = run(TRAIN, best, *flags, "--trainer.max_epochs", 5)
    assert fresh["epochs"] == 5
    assert (folder.parent / "version_1" / "metrics.json").exists()


def test_python_loads_own_runs(place):
    best = place.own() / "checkpoints" / "best.ckpt"
    module, data = lightbase.load(best)
    assert isinstance(module, Classifier)
    assert isinstance(data, SyntheticImages)
    assert isinstance(Classifier.load_from_checkpoint(best), Classifier)
    place.write()
    for loaded in (lightbase.load(BAD, trust=True)[0], from_arguments()):
        for key, value in module.state_dict().items():
            assert torch.equal(loaded.state_dict()[key], value)
    trusted = Classifier.load_from_checkpoint(BAD, map_location="cpu", trust=True)
    assert isinstance(trusted.net, MLP)


def save_prefixed(net: dict[str, torch.Tensor], path: str) -> None:
    torch.save({f"net.{key}": net[key] for key in net}, path)


FORMS: dict[str, Callable[[dict[str, Any], str], None]] = {
    "came.ckpt": lambda net, path: torch.save({"model": net}, path),
    "exported.pth": torch.save,
    "prefixed.pt": save_prefixed,
    "x.safetensors": save_file,
}


@pytest.mark.parametrize("path", most_are_slow([BAD, *FORMS], 4))
def test_the_users_yaml_takes_any_file_of_weights(path, place):
    accuracy = place.write()["test/acc"]
    weights = torch.load(BAD, weights_only=True)["state_dict"]
    net = {name.removeprefix("net."): value for name, value in weights.items()}
    if path in FORMS:
        FORMS[path](net, path)
    before = place.outside()
    assert run(EVALUATE, path, "--config", TINY)["test/acc"] == accuracy
    assert place.outside() == before
    place.capsys.readouterr()
    run(PREDICT, path, "--config", TINY)
    assert "stripes_" in place.capsys.readouterr().out
    file = run(EXPORT, path, "--config", TINY, "--output", "o.pth")
    exported = torch.load(file, weights_only=True)
    for name, value in net.items():
        assert torch.equal(exported[name], value)
    assert run(EVALUATE, "o.pth", "--config", TINY)["test/acc"] == accuracy
    layer = from_arguments(path).net.layers[1]
    assert torch.equal(layer.weight, net["layers.1.weight"])
    assert run("train --config", TINY, "--model.weights", path)["epochs"] == 2


def test_the_users_yaml_refuses_weights_of_another_network(place):
    place.write({"state_dict net.layers.1.weight": torch.zeros(17, 192)})
    error = place.refused(EVALUATE, BAD, "--config", TINY)
    assert "net.layers.1.weight" in error


@pytest.mark.slow
def test_a_file_that_is_trusted_is_built(place):
    metrics = place.write()
    assert run(EVALUATE, BAD, *TRUST)["test/acc"] == metrics["test/acc"]
    run(PREDICT, BAD, *TRUST)
    assert run(TRAIN, BAD, *TRUST)["epochs"] == 3
    place.write_strange("a loss")
    for command in (EVALUATE, EXPORT):
        assert run(command, BAD, *TRUST)
        place.forget()
    assert lightbase.load(BAD, trust=True)
    place.forget()


def test_a_new_run_does_not_go_where_the_file_says(place):
    place.write_strange("a place for runs")
    assert run(TRAIN, BAD, *TRUST)["epochs"] == 3
    assert (place.logs / "tiny" / "version_0" / "metrics.json").exists()


def test_what_the_user_types_is_built(place):
    content = {"model": {"init_args": {"criterion": "hostile.Loss"}}}
    Path("named.yaml").write_text(yaml.safe_dump(content))
    metrics = place.write()
    tested = run(EVALUATE, BAD, "--config", TINY, "--config", "named.yaml")
    assert tested["test/loss"] == metrics["test/loss"]
    place.forget()


LOSS = """\
from collections.abc import Callable
from torch import Tensor, nn

class Loss(nn.CrossEntropyLoss):
    def __init__(self, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
"""


@pytest.mark.parametrize("function", ["relu", "gelu"])
def test_an_own_file_may_name_code_of_the_working_folder(function, place):
    Path("own_loss.py").write_text(LOSS)
    loss = named("own_loss.Loss", activation=f"torch.nn.functional.{function}")
    place.logs.mkdir()
    metrics = place.write({CRITERION: loss}, place.logs / "own.ckpt")
    tested = run(EVALUATE, place.logs / "own.ckpt")
    assert tested["test/loss"] == metrics["test/loss"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "net",
    [
        named("torchvision.models.resnet18", num_classes=4),
        named("timm.create_model", model_name="resnet18"),
    ],
    ids=["torchvision", "timm"],
)
def test_a_function_that_makes_networks_is_called(net, place):
    own: Any = pkgutil.resolve_name(net["class_path"])(**net["init_args"])
    weights = own.state_dict()
    place.logs.mkdir()
    changes = {
        "state_dict": {f"net.{name}": value for name, value in weights.items()},
        "config model init_args net": net,
    }
    place.write(changes, place.logs / "net.ckpt")
    file = run(EXPORT, place.logs / "net.ckpt", "--output", "net.pth")
    exported = torch.load(file, weights_only=True)
    for name, value in weights.items():
        assert torch.equal(exported[name], value)
