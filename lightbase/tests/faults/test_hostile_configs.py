"""Trust by place: what a file from somebody else names is not built, damaged files and
links in a run end in two lines, and nothing is read without end or written
elsewhere."""

import contextlib
import os
import pickle
import pkgutil
import shutil
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
import yaml
from example.classifier import Classifier
from example.data.synthetic import SyntheticImages
from example.models.mlp import MLP
from paths import TINY, Trained, script
from PIL import Image
from safetensors.torch import save_file

import lightbase
from lightbase import BaseDataModule, BaseModule, UserError
from lightbase.commands.train import main as train_main
from lightbase.core.project import PROJECT, Project

pytestmark = pytest.mark.linux  # links, named pipes and alarms
LOGS = vars(Project)["logs"]  # which the fixture `repository` replaces
Change = Callable[
    [dict[str, Any], str], None
]  # of a checkpoint, to write the file of this name
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


def sweep_main(args: list[str]) -> Any:
    """Call sweep.py."""
    return script("sweep").main(args)


@pytest.fixture(autouse=True)
def alarm() -> Iterator[None]:
    """A test that hangs fails."""

    def stop(*_: Any) -> None:
        pytest.fail("hangs")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@dataclass
class Place:
    """The user's folder of runs, beside which the file `came/bad.ckpt` has come.

    target: A file that an installed module `hostile`, and `came/with_it.py`, write when
        they are imported.
    """

    root: Path
    logs: Path
    work: Path
    target: Path
    victim: Path
    trained: Trained

    def outside(self) -> dict[str, Any]:
        """All that is not below logs/."""
        paths = [x for x in self.root.rglob("*") if not x.is_relative_to(self.logs)]
        return {str(x): x.read_bytes() if x.is_file() else None for x in paths}

    def write(
        self, change: Change | None = None, path: str | Path = BAD, *flags: str
    ) -> Any:
        """A copy of a run's checkpoint with a change; returns the run's metrics."""
        folder, metrics = self.trained(*flags)
        content = torch.load(folder / "checkpoints" / "best.ckpt", weights_only=True)
        if change:
            change(content, str(self.target))
        torch.save(content, path)
        return metrics

    def own(self, name: str = "tiny", root: Path | None = None, *flags: str) -> Path:
        """The folder of a copy of a run in the user's folder of runs."""
        folder = (root or self.logs) / name / "version_0"
        shutil.copytree(self.trained(*flags)[0], folder)
        return folder


@pytest.fixture
def place(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Place]:
    logs, work, target = tmp_path / "logs", tmp_path / "work", tmp_path / "WRITTEN"
    (tmp_path / "site-packages").mkdir()
    (work / "came").mkdir(parents=True)
    for name in ("site-packages/hostile.py", "work/came/with_it.py"):
        (tmp_path / name).write_text(MODULE.format(target=str(target)))
    monkeypatch.syspath_prepend(str(tmp_path / "site-packages"))
    monkeypatch.chdir(work)
    monkeypatch.setattr("lightbase.core.project.Project.logs", logs)
    Image.new("L", (8, 8)).save("grey.png")
    victim = tmp_path / "victim"
    victim.write_text("mine")
    yield Place(tmp_path, logs, work, target, victim, trained)
    imported = HOSTILE & sys.modules.keys()
    for name in (*HOSTILE, "own_loss"):
        sys.modules.pop(name, None)
    assert victim.read_text() == "mine"
    assert not target.exists()
    assert not imported


def refused(place: Place, capsys: Any, run: Callable[[], Any]) -> str:
    """The two lines of a script that has read and written nothing else."""
    error = holds(place, capsys, run)
    assert error, "nothing is refused"
    return error


def holds(place: Place, capsys: Any, run: Callable[[], Any]) -> str:
    """The two lines with which a script ends; empty if it works. Nothing is written
    elsewhere."""
    before = place.outside()
    capsys.readouterr()
    status, error = 0, ""
    try:
        run()
    except SystemExit as end:
        status, error = int(end.code or 0), capsys.readouterr().err.rstrip("\n")
    if status:
        assert status in (1, 2), error
        assert 1 <= len(error.splitlines()) <= 2, error
        assert error.startswith("error: ")
    assert place.outside() == before
    return error


def train(*flags: object) -> dict[str, Any]:
    return train_main([*map(str, flags)])


def resume(*flags: object, path: object = "last") -> dict[str, Any]:
    name = ["--name", "tiny"] if path == "last" else []
    return train(*name, "--ckpt_path", path, "--trainer.max_epochs", 3, *flags)


def evaluate(path: object = BAD, *flags: object) -> dict[str, Any]:
    metrics: dict[str, Any] = script("evaluate").main(
        ["--ckpt_path", *map(str, (path, *flags))]
    )
    return metrics


def predict(path: object = BAD, *flags: object) -> None:
    script("predict").main(["--ckpt_path", *map(str, (path, *flags)), "grey.png"])


def export(path: object = BAD, *flags: object) -> Any:
    return script("export").main(["--ckpt_path", *map(str, (path, *flags))])


COMMANDS: dict[str, Callable[..., Any]] = {
    "train": lambda path=BAD, *flags: resume(*flags, path=path),
    "evaluate": evaluate,
    "predict": predict,
    "export": export,
}


def from_arguments(path: str = BAD) -> Classifier:
    return Classifier.load_from_checkpoint(path, net=MLP([192, 16, 4]), num_classes=4)


def new_data() -> SyntheticImages:
    return SyntheticImages([3, 8, 8], 4, 350, 75, batch_size=16)


def train_objects(path: str) -> Any:
    module = Classifier(MLP([192, 16, 4]), num_classes=4)
    return lightbase.train(module, new_data(), ckpt_path=path, max_epochs=3)


PYTHON: dict[str, Callable[[str], Any]] = {
    "load": lightbase.load,
    "train": train_objects,
    "load_from_checkpoint": Classifier.load_from_checkpoint,
    "load_from_checkpoint of the base": lambda path: BaseModule.load_from_checkpoint(
        path, "cpu"
    ),
    "load_from_checkpoint of the data": BaseDataModule.load_from_checkpoint,
}


def filled(value: Any, target: str) -> Any:
    if "TARGET" not in str(value):  # it may hold itself
        return value
    if isinstance(value, dict):
        return {key: filled(inner, target) for key, inner in value.items()}
    if isinstance(value, list):
        return [filled(inner, target) for inner in value]
    return value.replace("TARGET", target)


def at(keys: str, value: Any) -> Change:
    """Sets what stands at the keys, which blanks separate; GONE removes it."""

    def change(content: Any, target: str) -> None:
        *parents, last = [int(key) if key.isdigit() else key for key in keys.split()]
        for key in parents:
            content = (
                content[key]
                if isinstance(content, list)
                else content.setdefault(key, {})
            )
        if value is GONE:
            del content[last]
        else:
            content[last] = filled(value, target)

    return change


def of_model(name: str, value: Any) -> Change:
    return at(f"config model init_args {name}", value)


def of_trainer(name: str, value: Any) -> Change:
    return at(f"config trainer {name}", value)


def named(class_path: str, /, **arguments: Any) -> dict[str, Any]:
    return {"class_path": class_path, "init_args": arguments}


def anything(class_path: str, /, **arguments: Any) -> Change:
    """Where any object may stand."""
    return of_model("optimizer_args", {"weight_decay": named(class_path, **arguments)})


def callback(name: str, /, **arguments: str) -> Change:
    return of_trainer(
        "callbacks", [named(f"lightning.pytorch.callbacks.{name}", **arguments)]
    )


def logger(name: str, /, **arguments: str) -> Change:
    return of_trainer("logger", named(f"lightning.pytorch.loggers.{name}", **arguments))


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


PROFILER = named(
    "lightning.pytorch.profilers.SimpleProfiler", dirpath="TARGET", filename="x"
)
WRITES = "import pathlib; pathlib.Path('TARGET').touch()"
CODE = {"_code": "def forward(self, x): return x"}
GRAPH = named(
    "torch.fx.graph_module.reduce_graph_module", body=CODE, import_block=WRITES
)
TIMM = named("timm.create_model", model_name="resnet18", checkpoint_path="TARGET")
POPEN = named("lightbase.core.errors.imported", argument="x", path="subprocess.Popen")
EXPORT = ["--ckpt_path", BAD, "--output", "TARGET"]
NAMES: dict[str, Change] = {
    "a model": at("config model class_path", "hostile.Model"),
    "a model beside the file": at("config model class_path", "came.with_it.Model"),
    "a network": of_model("net", named("hostile.Net")),
    "a network by its path alone": of_model("net", "hostile.Net"),
    "a network beside the file": of_model("net", named("with_it.Net")),
    "a loss": of_model("criterion", named("hostile.Loss")),
    "a metric": of_model(
        "metrics", {"x": named("logging.FileHandler", filename="TARGET")}
    ),
    "an optimizer": of_model("optimizer", "hostile.SGD"),
    "an optimizer is the debugger": of_model("optimizer", "builtins.breakpoint"),
    "a scheduler": of_model("scheduler", "hostile.SGD"),
    "deep in a group": of_model(
        "parameter_groups", {"x": {"lr": [named("hostile.write")]}}
    ),
    "weights": of_model("weights", "TARGET"),
    "code that is executed": of_model("net", GRAPH),
    "weights of a network": of_model("net", TIMM),
    "data": at("config data class_path", "hostile.Data"),
    "deep in the data": at("config data init_args noise", named("hostile.write")),
    "a callback": of_trainer("callbacks", [named("hostile.Net")]),
    "callbacks are one": of_trainer("callbacks", named("hostile.Net")),
    "a callback calls os.system": callback("LambdaCallback", setup="os.system"),
    "a callback saves elsewhere": callback("ModelCheckpoint", dirpath="TARGET"),
    "a callback's file is elsewhere": callback(
        "ModelCheckpoint", filename="../../../TARGET"
    ),
    "a logger": logger("CSVLogger", save_dir="TARGET", name="own", version="version_0"),
    "a logger of no class": of_trainer("logger", [named("hostile.Net"), "hostile.Net"]),
    "artifacts": logger("MLFlowLogger", artifact_location="file://TARGET"),
    "a profiler": of_trainer("profiler", PROFILER),
    "a profiler's name": of_trainer("profiler", "came.with_it.X"),
    "a plugin": of_trainer("plugins", [named("hostile.Net")]),
    "a strategy": of_trainer("strategy", named("hostile.Net")),
    "an accelerator": of_trainer("accelerator", named("hostile.Net")),
    "a place for runs": of_trainer("default_root_dir", "TARGET"),
    "a program": anything("subprocess.Popen", args=["touch", "TARGET"]),
    "a program by a detour": anything(
        "lightbase.core.record.subprocess.Popen", args=["TARGET"]
    ),
    "a program by a function that imports": anything(
        "lightbase.extras.downloads.open_or_download",
        source=POPEN,
        data_dir="x",
        files="x",
    ),
    "a script of the library": anything("lightbase.commands.export.main", args=EXPORT),
    "a function of the library": anything(
        "lightbase.core.files.write_whole", path="TARGET"
    ),
    "a function of lightbase": anything("lightbase.load", path=BAD, trust=True),
    "a folder of a run": anything("lightbase.core.folder.Run", root="TARGET", name="x"),
    "an archive": anything("torchvision.datasets.Cityscapes", root="TARGET"),
    "code from the net": anything("torch.hub.load", repo_or_dir="TARGET", model="x"),
    "a pickle": anything("torch.load", f="TARGET", weights_only=False),
    "a class of the whole": at("config class_path", "hostile.Net"),
    "a maker of the config": at("config _class_path", "hostile.Net"),
    "a flag in the config": at("config config", "came/config.yaml"),
    "a maker": at("hyper_parameters _instantiator", "hostile.write"),
    "the maker of Lightning": at(
        "hyper_parameters",
        {
            "_instantiator": "lightning.pytorch.cli.instantiate_module",
            "_class_path": "hostile.Net",
        },
    ),
    "a class of the arguments": at("hyper_parameters", named("hostile.Net")),
    "a maker of the data": at(
        "datamodule_hyper_parameters _instantiator", "hostile.write"
    ),
    "a class of the data": at(
        "datamodule_hyper_parameters _class_path", "hostile.Data"
    ),
    "control characters": of_model("net", named("\x1b[2Jhostile.Net")),
}
UNTRUSTED = "is not in your folder of runs"


@pytest.mark.parametrize("name", most_are_slow(NAMES, 8))
def test_nothing_that_a_strange_file_names_is_built(name, place, capsys):
    place.write(NAMES[name])
    Path("came/config.yaml").write_text(
        yaml.safe_dump({"model": named("hostile.Model")})
    )
    for command in COMMANDS:
        error = refused(place, capsys, lambda command=command: COMMANDS[command]())
        assert UNTRUSTED in error
        assert "\x1b" not in error
        if command == "train":
            assert f"--model.weights {BAD}" in error
        else:
            assert "--config FILE" in error
            assert "--trust_checkpoint true" in error
            assert (
                "hostile.Net" in error
                or "example.data.synthetic" in error
                or "Data" in error
            )
    for way in PYTHON:
        with pytest.raises(UserError):
            PYTHON[way](BAD)
    assert isinstance(from_arguments().net, MLP)


@pytest.mark.parametrize("name", most_are_slow(NAMES, 25))
def test_any_file_gives_its_weights(name, place, capsys):
    metrics = place.write(NAMES[name])
    before = place.outside()
    assert evaluate(BAD, "--config", TINY)["test/acc"] == metrics["test/acc"]
    module, data = from_arguments(), new_data()
    weights = torch.load(BAD, weights_only=True)["state_dict"]
    lightbase.load(BAD, module, data)
    assert all(
        torch.equal(value, weights[key]) for key, value in module.state_dict().items()
    )
    assert place.outside() == before


def test_the_classes_of_a_strange_file_are_shown_escaped(place, capsys):
    place.write(NAMES["control characters"])
    assert "\\x1b[2Jhostile.Net" in refused(place, capsys, evaluate)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    "way", most_are_slow(["a run", "dots", "a similar name", "a folder", "a link"], 4)
)
def test_no_path_makes_a_strange_file_the_users(way, command, place, capsys):
    place.write()
    place.logs.mkdir()
    path: Path | str = place.logs / ".." / "work" / BAD
    if way == "a link":
        path = place.logs / "own.ckpt"
        path.symlink_to(place.work / BAD)
    elif way == "a folder":
        (place.logs / "tiny").symlink_to(place.work / "came")
        path = place.logs / "tiny" / "bad.ckpt"
    elif way == "a similar name":
        path = place.root / "logs_of_others" / "bad.ckpt"
        path.parent.mkdir()
        shutil.copy(BAD, path)
    elif way == "a run":
        shutil.copytree(place.trained()[0], place.root / "tiny" / "version_0")
        (place.logs / "tiny").symlink_to(place.root / "tiny")
        path = "last" if command == "train" else "tiny"
    assert UNTRUSTED in refused(place, capsys, lambda: COMMANDS[command](path))


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


def changes(section: str) -> dict[str, Change]:
    """The changes of a section of states.yaml, by the keys and the value there."""
    text = Path(__file__).with_name("states.yaml").read_text()
    by_name = {}
    for keys, values in yaml.load(text, StatesLoader)[section].items():
        for i, value in enumerate(values):
            shown = "missing" if value is GONE else str(value)[:30]
            by_name[f"{keys} {shown} {i}"] = at(keys, value)
    return by_name


STATES = changes("damaged")
OF_SCHEDULES = changes("damaged with a schedule")
HARMLESS = changes("harmless")  # what a resume need not read
HARMLESS_OF_SCHEDULES = changes("harmless with a schedule")
SCHEDULE = ("--model.scheduler", "StepLR", "--model.scheduler_args", "{step_size: 1}")
BEST = "callbacks RunCheckpoint/best"
DATA = "SyntheticImages"


def damage(place: Place, folder: Path, change: Change) -> dict[Path, bytes]:
    """Changes both checkpoints of a run; returns them."""
    files = [*folder.glob("checkpoints/*.ckpt")]
    for file in files:
        content = torch.load(file, weights_only=True)
        change(content, str(place.target))
        torch.save(content, file)
    return {file: file.read_bytes() for file in files}


@pytest.mark.parametrize("name", most_are_slow(STATES, 60))
def test_a_damaged_state_ends_in_two_lines(name, place, capsys):
    files = damage(place, place.own(), STATES[name])
    refused(place, capsys, resume)
    assert {file: file.read_bytes() for file in files} == files


@pytest.mark.parametrize("name", most_are_slow(OF_SCHEDULES, 16))
def test_a_damaged_schedule_ends_in_two_lines(name, place, capsys):
    files = damage(place, place.own("tiny", None, *SCHEDULE), OF_SCHEDULES[name])
    refused(place, capsys, resume)
    assert {file: file.read_bytes() for file in files} == files


@pytest.mark.slow
@pytest.mark.parametrize("name", [*HARMLESS, *HARMLESS_OF_SCHEDULES])
def test_what_a_resume_need_not_read_does_no_harm(name, place, capsys):
    flags = () if name in HARMLESS else SCHEDULE
    folder = place.own("tiny", None, *flags)
    damage(place, folder, (HARMLESS | HARMLESS_OF_SCHEDULES)[name])
    holds(place, capsys, lambda: evaluate("tiny"))
    holds(place, capsys, resume)
    holds(place, capsys, lambda: resume(path=folder / "checkpoints" / "last.ckpt"))


@pytest.mark.parametrize("name", most_are_slow(STATES, 60))
def test_a_damaged_file_of_the_user_is_evaluated_or_ends_in_two_lines(
    name, place, capsys
):
    folder = place.own()
    damage(place, folder, STATES[name])
    holds(place, capsys, lambda: evaluate("tiny"))
    with contextlib.suppress(UserError):
        lightbase.load(folder / "checkpoints" / "best.ckpt")


@pytest.mark.parametrize("name", most_are_slow(STATES, 60))
def test_a_damaged_strange_file_gives_its_weights_or_two_lines(name, place, capsys):
    place.write(STATES[name])
    holds(place, capsys, lambda: evaluate(BAD, "--config", TINY))
    for command in COMMANDS.values():
        refused(place, capsys, command)
    with contextlib.suppress(UserError):
        from_arguments()


class Global:
    def __reduce__(self) -> Any:
        return os.system, ("touch WRITTEN",)


CONTENTS: dict[str, Callable[[Path], Any]] = {
    "nothing": lambda path: path.write_bytes(b""),
    "text": lambda path: path.write_text("weights"),
    "a pickle that calls": lambda path: path.write_bytes(pickle.dumps(Global())),
    "a file of torch that calls": lambda path: torch.save({"config": Global()}, path),
    "an old file that calls": lambda path: torch.save(
        Global(), path, _use_new_zipfile_serialization=False
    ),
    "a cut file": lambda path: path.write_bytes(path.read_bytes()[:-2000]),
    "a list": lambda path: torch.save([1, 2], path),
    "None": lambda path: torch.save(None, path),
    "a tensor": lambda path: torch.save(torch.zeros(3), path),
    "a number": lambda path: torch.save(5, path),
    "a mapping of lists": lambda path: torch.save(
        {"state_dict": [], "config": []}, path
    ),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "a named pipe": lambda path: (path.unlink(), os.mkfifo(path)),
    "zeros without end": lambda path: (path.unlink(), path.symlink_to("/dev/zero")),
    "a link to itself": lambda path: (path.unlink(), path.symlink_to(path)),
}


@pytest.fixture
def limited_memory() -> Iterator[None]:
    """Reading without end fails instead of filling the memory."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 4 * 2**30, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.parametrize("is_own", [False, True], ids=["strange", "own"])
@pytest.mark.parametrize("name", most_are_slow(CONTENTS, 6))
def test_what_is_no_checkpoint_ends_in_two_lines(
    name, is_own, place, capsys, limited_memory
):
    place.logs.mkdir()
    path = place.logs / "bad.ckpt" if is_own else place.work / BAD
    place.write(None, path)
    CONTENTS[name](path)
    for command in COMMANDS.values():
        refused(place, capsys, lambda command=command: command(path))
    for command in (evaluate, predict, export):
        refused(place, capsys, lambda command=command: command(path, "--config", TINY))
    refused(place, capsys, lambda: train("--config", TINY, "--model.weights", path))
    for way in (*PYTHON.values(), from_arguments):
        with pytest.raises(UserError):
            way(path)


@pytest.mark.parametrize("name", ["a named pipe", "zeros without end", "a folder"])
@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_weights_are_a_regular_file(suffix, name, place, capsys, limited_memory):
    path = Path(f"came/weights{suffix}")
    path.touch()
    CONTENTS[name](path)
    place.write(None, "came/bad.ckpt")
    refused(place, capsys, lambda: train("--config", TINY, "--model.weights", path))
    refused(place, capsys, lambda: evaluate(path, "--config", TINY))


@pytest.mark.parametrize("name", ["a named pipe", "zeros without end", "a folder"])
def test_a_config_is_a_regular_file(name, place, capsys, limited_memory):
    place.write()
    path = Path("config.yaml")
    path.touch()
    CONTENTS[name](path)
    for command in COMMANDS.values():
        refused(place, capsys, lambda command=command: command(BAD, "--config", path))
    refused(place, capsys, lambda: train("--config", path))
    search = ["--search", "model.lr=0.1", "--config", str(path)]
    refused(place, capsys, lambda: sweep_main(search))


@pytest.mark.parametrize("name", ["a named pipe", "zeros without end", "a folder"])
@pytest.mark.parametrize("file", ["config.yaml", "progress.json", "metrics.json"])
def test_runs_reads_regular_files(file, name, place, capsys, limited_memory):
    path = place.own() / file
    CONTENTS[name](path)
    script("runs").main([])
    out, error = capsys.readouterr()
    assert "tiny" in out
    assert f"{file} is damaged" in error
    assert len(error.splitlines()) == 1


WRITTEN = [
    *(
        "environment.txt",
        "config.yaml",
        "hparams.yaml",
        "metrics.json",
        "progress.json",
    ),
    *(".lock", ".progress.json.part", "checkpoints/last.ckpt", "checkpoints/best.ckpt"),
]


@pytest.mark.parametrize("name", ["a named pipe", "a folder"])
@pytest.mark.parametrize("file", most_are_slow(WRITTEN, 9))
def test_a_resume_reads_and_writes_regular_files(file, name, place, capsys):
    path = place.own() / file
    path.touch()
    CONTENTS[name](path)
    holds(place, capsys, resume)


@pytest.mark.parametrize("name", ["a named pipe", "zeros without end", "a folder"])
def test_curves_are_drawn_of_regular_files(name, place, capsys, limited_memory):
    folder = place.own()
    CONTENTS[name](next(folder.glob("events.*")))
    place.own("other")
    holds(
        place,
        capsys,
        lambda: script("runs").main(["--plot", str(place.logs / "x.png")]),
    )


IN_A_RUN = [
    *("config.yaml", "environment.txt", "events.*", "hparams.yaml", "metrics.json"),
    *(
        "progress.json",
        ".lock",
        ".config.yaml.part",
        ".progress.json.part",
        "checkpoints",
    ),
    *("checkpoints/last.ckpt", "checkpoints/best.ckpt", "checkpoints/.last.ckpt.part"),
    *("checkpoints/new", "", ".."),
]


def replace_by_link(path: Path, elsewhere: Path) -> None:
    """Moves a file or folder, and leaves a link that leads there. The link to what is
    missing leads to nothing."""
    if path.exists():
        shutil.move(path, elsewhere)
    path.symlink_to(elsewhere)


@pytest.mark.parametrize("is_typed", [False, True], ids=["last", "path"])
@pytest.mark.parametrize("file", most_are_slow(IN_A_RUN, 6))
def test_a_resume_follows_no_link(file, is_typed, place, capsys):
    folder = place.own()
    path = {"": folder, "..": folder.parent}.get(file) or next(
        folder.glob(file), folder / file
    )
    replace_by_link(path, place.root / "elsewhere")
    last = folder / "checkpoints" / "last.ckpt"
    refused(place, capsys, lambda: resume(path=last if is_typed else "last"))
    assert path.is_symlink()


@pytest.mark.parametrize("file", [".lock", "config.yaml", "checkpoints/last.ckpt"])
def test_a_resume_writes_into_no_file_of_the_user(file, place, capsys):
    path = place.own() / file
    path.unlink(missing_ok=True)
    path.symlink_to(place.victim)
    refused(place, capsys, resume)


@pytest.mark.parametrize(
    "form", most_are_slow(["DIR/../../../../{}", "{}", "local://{}"], 3)
)
def test_a_resume_deletes_nothing_elsewhere(form, place, capsys):
    folder = place.own() / "checkpoints"
    path = form.format("victim" if "DIR" in form else place.victim).replace(
        "DIR", str(folder)
    )
    assert "DIR" not in form or Path(path).samefile(place.victim)
    for key, value in {
        "dirpath": str(folder),
        "best_k_models": {path: torch.tensor(0.0)},
        "best_model_path": path,
        "kth_best_model_path": path,
        "kth_value": torch.tensor(0.0),
        "best_model_score": torch.tensor(0.0),
    }.items():
        damage(place, folder.parent, at(f"{BEST} {key}", value))
    holds(place, capsys, resume)


@pytest.mark.parametrize("name", ["tiny", "a/tiny", "a/b/tiny"])
def test_a_new_run_follows_no_link(name, place, capsys):
    (place.root / "elsewhere" / "b").mkdir(parents=True)
    path = place.logs / name.partition("/")[0]
    path.parent.mkdir()
    path.symlink_to(place.root / "elsewhere")
    refused(place, capsys, lambda: train("--config", TINY, "--name", name))


@pytest.mark.parametrize("file", ["best.pth", ".best.pth.part", "checkpoints"])
@pytest.mark.parametrize("is_missing", [False, True], ids=["", "to nothing"])
def test_export_writes_through_no_link(file, is_missing, place, capsys):
    folder = place.own() / "checkpoints"
    if file == "checkpoints":
        replace_by_link(folder, place.root / "elsewhere")
    else:
        (folder / file).symlink_to(place.target if is_missing else place.victim)
    if file == ".best.pth.part":
        holds(place, capsys, lambda: export("tiny"))
        assert torch.load(folder / "best.pth", weights_only=True)
    else:
        refused(place, capsys, lambda: export("tiny"))


@pytest.mark.parametrize("suffix", most_are_slow(["pth", "pt2"], 2))
def test_export_writes_through_no_link_that_is_typed(suffix, place, capsys):
    place.own()
    Path(f"x.{suffix}").symlink_to(place.victim)
    Path("folder").symlink_to(place.root)
    for output in (f"x.{suffix}", f"folder/new.{suffix}"):
        flags = ["--format", suffix, "--output", output]
        refused(place, capsys, lambda flags=flags: export("tiny", *flags))


@pytest.mark.parametrize(
    "file", ["report.csv", "confusion_matrix.csv", ".report.csv.part", ""]
)
@pytest.mark.parametrize("is_typed", [False, True], ids=["run", "folder"])
def test_a_report_is_written_through_no_link(file, is_typed, place, capsys):
    folder = place.own()
    if is_typed:
        folder = place.logs / "reports"
        folder.mkdir()
    flags = ["--report", str(folder)] if is_typed else ["--report"]
    if file:
        (folder / file).symlink_to(place.victim)
    else:
        replace_by_link(folder, place.root / "elsewhere")
    if file.endswith(".part"):
        evaluate("tiny", *flags)
        assert (folder / "report.csv").is_file()
    else:
        refused(place, capsys, lambda: evaluate("tiny", *flags))


@pytest.mark.parametrize(
    "command",
    [
        "predict --ckpt_path tiny grey.png --output x.csv",
        "predict --ckpt_path tiny grey.png --output x.npz",
        "runs --csv x.csv",
        "runs --plot x.png",
    ],
)
def test_a_file_that_is_typed_is_written_through_no_link(command, place, capsys):
    place.own()
    name, *args = command.split()
    Path(args[-1]).symlink_to(place.victim)
    refused(place, capsys, lambda: script(name).main(args))


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Path]:
    """The folder of a sweep, in which a trial has not ended; made once."""
    root = tmp_path_factory.mktemp("swept")

    def sweep() -> Path:
        folder = root / "tried"
        if not folder.exists():
            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(optuna.Study, "tell", lambda *_, **__: sys.exit(1))
                with pytest.raises(SystemExit):
                    sweep_main([*SWEEP, "--trainer.default_root_dir", str(root)])
            (folder / "trial_000" / "version_0" / "metrics.json").unlink()
        return folder

    return sweep


SWEEP = ["--config", TINY, "--search", "model.lr=0.01", "--name", "tried"]
IN_A_SWEEP = [
    *("", ".lock", "study.journal", "trial_000", "trial_000/.lock"),
    *("trial_000/output.txt", "trial_000/version_0"),
    "trial_000/version_0/config.yaml",
    "trial_000/version_0/checkpoints/last.ckpt",
]


@pytest.mark.parametrize("file", most_are_slow(IN_A_SWEEP, 4))
def test_a_sweep_follows_no_link(file, swept, place, capsys):
    folder = place.logs / "tried"
    shutil.copytree(swept(), folder)
    replace_by_link(folder / file, place.root / "elsewhere")
    refused(place, capsys, lambda: sweep_main(SWEEP))


@pytest.mark.parametrize(
    "name", most_are_slow(["a named pipe", "zeros without end", "a folder"], 3)
)
def test_a_sweep_reads_regular_files(name, swept, place, capsys, limited_memory):
    folder = place.logs / "tried"
    shutil.copytree(swept(), folder)
    CONTENTS[name](folder / "study.journal")
    refused(place, capsys, lambda: sweep_main(SWEEP))


@pytest.mark.parametrize(
    "line",
    most_are_slow(["x", "null", "[]", "{}", '{"op_code": 5}', '{"op_code": "x"}'], 3),
)
def test_a_damaged_sweep_ends_in_two_lines(line, swept, place, capsys):
    folder = place.logs / "tried"
    shutil.copytree(swept(), folder)
    journal = folder / "study.journal"
    journal.write_text(f"{journal.read_text()}{line}\n")
    refused(place, capsys, lambda: sweep_main(SWEEP))


def test_a_sweep_does_not_continue_a_trial_elsewhere(swept, place, capsys):
    folder = place.logs / "tried"
    shutil.copytree(swept(), folder)
    checkpoints = folder / "trial_000" / "version_0" / "checkpoints"
    replace_by_link(checkpoints, place.root / "elsewhere")
    before = place.outside()
    with pytest.raises(SystemExit):
        sweep_main(SWEEP)
    assert place.outside() == before
    reasons = (folder / "study.journal").read_text()
    assert UNTRUSTED in reasons or "through a link" in reasons


def test_runs_prints_no_control_characters(tmp_path, capsys):
    rates = ("a\x1b[2Jb", "c\x9bd")
    configs = [yaml.safe_dump({"model": {"init_args": {"lr": lr}}}) for lr in rates]
    configs.append(f"a: !!python/object/apply:os.system [touch {tmp_path}/WRITTEN]")
    for i, text in enumerate(configs):
        folder = tmp_path / "\x1b[31mx" / f"version_{i}"
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text(text)
        (folder / "progress.json").write_text("{}")
    script("runs").main(["--trainer.default_root_dir", str(tmp_path)])
    out, error = capsys.readouterr()
    assert "a\\x1b[2Jb" in out
    assert "\\x1b[31mx" in out
    assert not {"\x1b", "\x9b"} & {*out, *error}
    assert "is damaged" in error
    assert not (tmp_path / "WRITTEN").exists()


@pytest.mark.parametrize(
    "change",
    [
        logger("CSVLogger", save_dir="\x1b[2Jhere"),
        of_model("net", named("\x1b[2Jhere.Net")),
        at("config model class_path", "example.\x1b[2Jhere.Net"),
        at("config name", "\x1b[2Jhere"),
        at("package", "\x1b[2Jhere"),
        at("state_dict", {"\x1b[2Jhere": torch.zeros(1)}),
        at(f"{DATA} classes", ["\x1b[2Jhere"]),
    ],
)
@pytest.mark.slow
def test_an_error_quotes_no_control_characters(change, place, capsys):
    damage(place, place.own(), change)
    for run in (resume, lambda: evaluate("tiny"), lambda: predict("tiny")):
        try:
            run()
        except SystemExit:
            continue
        finally:
            assert "\x1b" not in "".join(capsys.readouterr())


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
    last = place.own(name, root) / "checkpoints" / "last.ckpt"
    metrics = place.trained()[1]
    best = last.with_name("best.ckpt")
    assert evaluate(name, *flags)["test/acc"] == metrics["test/acc"]
    assert evaluate(best, *flags)["test/acc"] == metrics["test/acc"]
    predict(best, *flags)
    assert export(best, *flags).exists()
    assert train(
        "--name", name, "--ckpt_path", "last", "--trainer.max_epochs", 3, *flags
    )
    flags += ["--name", name] if way == "renamed" else []
    assert train("--ckpt_path", last, "--trainer.max_epochs", 4, *flags)["epochs"] == 4
    assert [x.name for x in last.parents[2].iterdir()] == ["version_0"]
    fresh = train("--ckpt_path", best, "--trainer.max_epochs", 5, *flags)
    assert fresh["epochs"] == 5
    assert (last.parents[2] / "version_1" / "metrics.json").exists()


def test_python_loads_own_runs(place):
    best = place.own() / "checkpoints" / "best.ckpt"
    metrics = place.trained()[1]
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
    assert 0 < metrics["test/acc"] <= 1


FORMS: dict[str, Callable[[dict[str, Any], str], None]] = {
    "came.ckpt": lambda net, path: torch.save({"model": net}, path),
    "exported.pth": torch.save,
    "prefixed.pt": lambda net, path: torch.save(
        {f"net.{key}": net[key] for key in net}, path
    ),
    "x.safetensors": save_file,
}


@pytest.mark.parametrize("path", most_are_slow([BAD, *FORMS], 4))
def test_the_users_yaml_takes_any_file_of_weights(path, place, capsys):
    metrics = place.write()
    weights = torch.load(BAD, weights_only=True)["state_dict"]
    net = {name.removeprefix("net."): value for name, value in weights.items()}
    if path in FORMS:
        FORMS[path](net, path)
    before = place.outside()
    assert evaluate(path, "--config", TINY)["test/acc"] == metrics["test/acc"]
    assert place.outside() == before
    capsys.readouterr()
    predict(path, "--config", TINY)
    assert "stripes_" in capsys.readouterr().out
    exported = torch.load(
        export(path, "--config", TINY, "--output", "o.pth"), weights_only=True
    )
    assert all(torch.equal(exported[name], value) for name, value in net.items())
    assert evaluate("o.pth", "--config", TINY)["test/acc"] == metrics["test/acc"]
    assert torch.equal(
        from_arguments(path).net.layers[1].weight, net["layers.1.weight"]
    )
    assert train("--config", TINY, "--model.weights", path)["epochs"] == 2


def test_the_users_yaml_refuses_weights_of_another_network(place, capsys):
    place.write(at("state_dict net.layers.1.weight", torch.zeros(17, 192)))
    error = refused(place, capsys, lambda: evaluate(BAD, "--config", TINY))
    assert "net.layers.1.weight" in error


@pytest.mark.slow
def test_a_file_that_is_trusted_is_built(place):
    metrics = place.write()
    trust = ("--trust_checkpoint", "true")
    assert evaluate(BAD, *trust)["test/acc"] == metrics["test/acc"]
    predict(BAD, *trust)
    export(BAD, *trust)
    assert resume(*trust, path=BAD)["epochs"] == 3
    place.write(of_model("criterion", named("hostile.Loss")))
    for run in (evaluate, export):
        assert run(BAD, *trust)
        place.target.unlink()
        sys.modules.pop("hostile")
    assert lightbase.load(BAD, trust=True)
    place.target.unlink()
    sys.modules.pop("hostile")


def test_a_new_run_does_not_go_where_the_file_says(place):
    place.write(of_trainer("default_root_dir", "TARGET"))
    assert resume("--trust_checkpoint", "true", path=BAD)["epochs"] == 3
    assert (place.logs / "tiny" / "version_0" / "metrics.json").exists()


def test_what_the_user_types_is_built(place, capsys):
    content = {"model": {"init_args": {"criterion": "hostile.Loss"}}}
    Path("named.yaml").write_text(yaml.safe_dump(content))
    metrics = place.write()
    tested = evaluate(BAD, "--config", TINY, "--config", "named.yaml")
    assert tested["test/loss"] == metrics["test/loss"]
    assert place.target.exists()
    place.target.unlink()
    sys.modules.pop("hostile")


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
    metrics = place.write(of_model("criterion", loss), place.logs / "own.ckpt")
    assert evaluate(place.logs / "own.ckpt")["test/loss"] == metrics["test/loss"]


@pytest.mark.slow
@pytest.mark.parametrize("net", ["torchvision.models.resnet18", "timm.create_model"])
def test_a_function_that_makes_networks_is_called(net, place):
    arguments: dict[str, Any] = (
        {"model_name": "resnet18"} if "timm" in net else {"num_classes": 4}
    )
    own: Any = pkgutil.resolve_name(net)(**arguments)
    weights = {f"net.{name}": value for name, value in own.state_dict().items()}
    file = place.logs / "net.ckpt"
    place.logs.mkdir()

    def change(content: dict[str, Any], _: str) -> None:
        content["state_dict"] = weights
        content["config"]["model"]["init_args"]["net"] = named(net, **arguments)

    place.write(change, file)
    exported = torch.load(export(file, "--output", "net.pth"), weights_only=True)
    assert all(
        torch.equal(exported[name], value) for name, value in own.state_dict().items()
    )
