"""Checkpoints, runs and sweeps from somebody else: what their configs name writes no file and runs
no code."""

import json
import pkgutil
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from paths import TINY, Trained, script
from PIL import Image

from lightbase.run.train import main as train_main

Change = Callable[[dict[str, Any], str], None]  # of a config, to write the file of this name
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


def of_model(**arguments: Any) -> Change:
    return lambda config, target: config["model"]["init_args"].update(filled(arguments, target))


def of_trainer(**arguments: Any) -> Change:
    return lambda config, target: config["trainer"].update(filled(arguments, target))


def anything(class_path: str, **arguments: Any) -> Change:
    """Where any object may stand."""
    return of_model(
        optimizer_args={"weight_decay": {"class_path": class_path, "init_args": arguments}}
    )


def filled(value: Any, target: str) -> Any:
    if isinstance(value, dict):
        return {key: filled(inner, target) for key, inner in value.items()}
    if isinstance(value, list):
        return [filled(inner, target) for inner in value]
    return value.replace("TARGET", target) if isinstance(value, str) else value


def named(class_path: str, **arguments: Any) -> dict[str, Any]:
    return {"class_path": class_path, "init_args": arguments}


def callback(name: str, **arguments: str) -> Change:
    return of_trainer(callbacks=[named(f"lightning.pytorch.callbacks.{name}", **arguments)])


def logger(name: str, /, **arguments: str) -> Change:
    return of_trainer(logger=named(f"lightning.pytorch.loggers.{name}", **arguments))


PROFILER = named("lightning.pytorch.profilers.SimpleProfiler", dirpath="TARGET", filename="x")
OF_TRAINING: dict[str, Change] = {  # which evaluate.py, predict.py and export.py do not read
    "a callback calls os.system": callback("LambdaCallback", setup="os.system"),
    "a callback saves elsewhere": callback("ModelCheckpoint", dirpath="TARGET"),
    "a callback's file lies elsewhere": callback("ModelCheckpoint", filename="../../../TARGET"),
    "a checkpoint's field is a path": callback("ModelCheckpoint", filename="{TARGET}"),
    "a logger writes into another run": logger("CSVLogger", name="own", version="version_0"),
    "a logger's version has a variable": logger("TensorBoardLogger", version=".$E./.$E./TARGET"),
    "artifacts elsewhere": logger("MLFlowLogger", artifact_location="file://TARGET"),
    "a profiler": of_trainer(profiler=PROFILER),
    "a profiler's name": of_trainer(profiler="came.with_it.X"),
    "a plugin": of_trainer(plugins=[named("hostile.Net")]),
}
WRITES = "import pathlib; pathlib.Path('TARGET').touch()"
CODE = {"_code": "def forward(self, x): return x"}
GRAPH = named("torch.fx.graph_module.reduce_graph_module", body=CODE, import_block=WRITES)
FEATURES = named("timm.models._features_fx.GraphExtractNet", return_nodes=["b"])
TIMM = named("timm.create_model", model_name="resnet18", checkpoint_path="TARGET")
WRITER = "lightning.pytorch.loggers.csv_logs.ExperimentWriter"
POPEN = named("lightbase.errors.imported", argument="x", path="subprocess.Popen")
ANYWHERE: dict[str, Change] = {
    "a function that executes its argument": of_model(net=GRAPH),
    "a network": of_model(net=named("hostile.Net")),
    "a metric": of_model(metrics={"x": named("logging.FileHandler", filename="TARGET")}),
    "an optimizer": of_model(optimizer="hostile.SGD"),
    "a scheduler": of_model(scheduler="hostile.SGD"),
    "an optimizer is the debugger": of_model(optimizer="builtins.breakpoint"),
    "a program": anything("subprocess.Popen", args=["touch", "TARGET"]),
    "a program by a detour": anything("lightbase.run.record.subprocess.Popen", args=["TARGET"]),
    "a program by a function that imports": anything(
        "lightbase.data.downloads.open_or_download", source=POPEN, data_dir="x", files="x"
    ),
    "a script": anything("export.main", args=["--ckpt_path", BAD, "--output", "TARGET"]),
    "a class where none belongs": lambda config, _: config.update(class_path="hostile.Net"),
    "a network that generates code": of_model(net=FEATURES),
    "an archive": anything("torchvision.datasets.Cityscapes", root="TARGET"),
    "a module that came with the file": anything("came.with_it.Net"),
    "a program of the tests": anything("tests.programs.Program", args=["touch", "TARGET"]),
    "a folder of a run": anything("lightbase.folder.Run", root="TARGET", name="x"),
    "a logger's writer": anything(WRITER, log_dir="TARGET"),
    "weights from a file": of_model(net=TIMM),
    "a model": lambda config, _: config.update(model=named("hostile.Model")),
    "data": lambda config, _: config.update(data=named("hostile.Data")),
}
ALL = OF_TRAINING | ANYWHERE


def most_are_slow(names: Iterable[str], every: int) -> list[Any]:
    """Parameters, of which one of so many is for the quick tests."""
    marks = [[pytest.mark.slow] * (i % every > 0) for i, _ in enumerate(names)]
    return [pytest.param(name, marks=mark) for name, mark in zip(names, marks, strict=True)]


COMMANDS: dict[str, Callable[[list[str]], Any]] = {
    "train": train_main,
    "evaluate": lambda args: script("evaluate").main(args),
    "predict": lambda args: script("predict").main([*args, "grey.png"]),
    "export": lambda args: script("export").main([*args, "--format", "pth"]),
}


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """What must not come to be; an installed module `hostile` writes it when it is imported."""
    found = tmp_path / "WRITTEN"
    package = tmp_path / "site-packages"
    package.mkdir()
    (package / "hostile.py").write_text(MODULE.format(target=str(found)))
    monkeypatch.syspath_prepend(str(package))
    work = tmp_path / "work"
    (work / "came").mkdir(parents=True)
    (work / "came" / "with_it.py").write_text(MODULE.format(target=str(found)))
    monkeypatch.chdir(work)
    Image.new("L", (8, 8)).save("grey.png")
    monkeypatch.setattr("lightbase.folder.Project.logs", tmp_path / "logs")
    yield found
    for name in ("hostile", "own_loss"):
        sys.modules.pop(name, None)


def changed(checkpoint: Path, copy: Path, change: Change, target: Path) -> dict[str, Any]:
    content = torch.load(checkpoint, weights_only=True)
    change(content["config"], str(target))
    copy.parent.mkdir(parents=True, exist_ok=True)
    torch.save(content, copy)
    return content["config"]


@pytest.fixture
def bad(trained: Trained, target: Path) -> Callable[..., dict[str, Any]]:
    """Writes a copy of a run's checkpoint with another config; returns the run's metrics."""

    def write(change: Change, path: str = BAD) -> dict[str, Any]:
        folder, metrics = trained()
        changed(folder / "checkpoints" / "best.ckpt", Path(path), change, target)
        return metrics

    return write


def evaluate(path: str = BAD) -> dict[str, Any]:
    return COMMANDS["evaluate"](["--ckpt_path", path])


def train(path: str = BAD, *flags: str) -> dict[str, Any]:
    return train_main(["--ckpt_path", path, "--trainer.max_epochs", "3", *flags])


def check_refused(
    command: Callable[[], Any],
    target: Path,
    capsys: pytest.CaptureFixture[str],
    reason: str = "a file may only name",
) -> None:
    with pytest.raises(SystemExit) as caught:
        command()
    assert not target.exists()
    assert "hostile" not in sys.modules
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 2, error
    assert reason in error
    assert "--trust_checkpoint true" in error


@pytest.mark.parametrize("name", most_are_slow(ALL, 3))
def test_train_refuses(name, bad, target, capsys):
    bad(ALL[name])
    check_refused(train, target, capsys)


@pytest.mark.parametrize("command", ["evaluate", "predict", "export"])
@pytest.mark.parametrize("name", most_are_slow(ANYWHERE, 6))
def test_scripts_refuse(name, command, bad, target, capsys):
    bad(ANYWHERE[name])
    check_refused(lambda: COMMANDS[command](["--ckpt_path", BAD]), target, capsys)


def test_evaluate_does_not_construct_what_is_for_training(bad, target):
    metrics = bad(OF_TRAINING["a callback calls os.system"])
    assert evaluate()["test/acc"] == metrics["test/acc"]
    assert not target.exists()


MESSAGE = "x\n- Problem with given class_path 'hostile.X':\n  - No module named q"


@pytest.mark.parametrize(
    "change",
    [
        of_model(net="hostile.yaml"),
        of_model(net=MESSAGE),
        lambda config, target: config.update({"trainer.default_root_dir": target}),
        lambda config, _: config.update(model=None),
        lambda config, _: config.update(trainer="x"),
        lambda config, _: config.update(data=config),
    ],
)
def test_what_is_no_config_of_a_run_is_an_error(change, bad, target, capsys):
    Path("hostile.yaml").write_text(yaml.safe_dump(named("hostile.Net")))
    bad(change)
    with pytest.raises(SystemExit):
        evaluate()
    assert not target.exists()
    assert "hostile" not in sys.modules
    assert len(capsys.readouterr().err.splitlines()) <= 2


def test_a_new_run_does_not_go_where_the_file_says(bad: Any, target: Path) -> None:
    bad(of_trainer(default_root_dir="TARGET"), "hostile.ckpt")  # whose name imports nothing
    assert train("hostile.ckpt")["epochs"] == 3
    assert not target.exists()
    assert (target.parent / "logs" / "tiny" / "version_0" / "metrics.json").exists()


@pytest.mark.parametrize("path", ["DIR/../../../../victim", "local:///victim", "a link"])
def test_a_resume_deletes_and_writes_nothing_elsewhere(path, trained, target, capsys):
    content = torch.load(trained()[0] / "checkpoints" / "last.ckpt", weights_only=True)
    copy = target.parent / "logs" / "tiny" / "version_0" / "checkpoints" / "last.ckpt"
    copy.parent.mkdir(parents=True)
    reason = f"has the path {path!r}, which leads out of the run's folder"
    if path == "a link":
        reason = "is a link"
        (copy.parents[1] / "config.yaml").symlink_to(target)
    else:
        content["callbacks"]["RunCheckpoint/last"]["best_k_models"] = {path: torch.tensor(1.0)}
    torch.save(content, copy)
    check_refused(lambda: train(str(copy)), target, capsys, reason)


def test_a_typed_class_takes_no_place_from_the_file(bad, target, capsys):
    bad(logger("CSVLogger", save_dir="TARGET"))
    flags = ("--trainer.logger", "lightning.pytorch.loggers.CSVLogger")
    check_refused(lambda: train(BAD, *flags), target, capsys)


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
        of_model(net=named("\x1b[2Jhere.Net")),
        lambda config, _: config["model"].update(class_path="example.\x1b[2Jhere.Net"),
    ],
)
def test_an_error_quotes_no_control_characters(change, bad, capsys):
    bad(change)
    with pytest.raises(SystemExit):
        train()
    assert "\x1b" not in "".join(capsys.readouterr())


def test_a_sweep_refuses_what_the_run_of_a_trial_names(target, tmp_path, capsys):
    main = script("sweep").main
    root = ["--trainer.default_root_dir", str(tmp_path / "logs"), "--name", "tried"]
    args = ["--config", TINY, "--search", "model.lr=0.01", *root]
    (trial,) = main(args)
    assert trial.state == "finished"
    (trial.run / "metrics.json").unlink()
    last = trial.run / "checkpoints" / "last.ckpt"
    change = ALL["a callback calls os.system"]
    (trial.run / "config.yaml").write_text(yaml.safe_dump(changed(last, last, change, target)))
    trial.state = "running"
    trial.write()
    with pytest.raises(SystemExit):
        main(args)
    assert not target.exists()
    assert "hostile" not in sys.modules
    record = json.loads((trial.folder / "trial.json").read_text())
    assert "a file may only name" in record["reason"]


def test_what_is_typed_is_constructed(bad: Any, target: Path) -> None:
    bad(of_model(criterion=named("hostile.Loss")))
    with pytest.raises(SystemExit):
        train()
    assert not target.exists()
    content = {"model": {"init_args": {"criterion": "hostile.Loss"}}}
    Path("named.yaml").write_text(yaml.safe_dump(content))
    trusted = ("--trust_checkpoint", "true")
    for flags in (trusted, ("--model.criterion", "hostile.Loss"), ("--config", "named.yaml")):
        assert train(BAD, *flags)["epochs"] == 3
        assert target.exists()


LOSS = """\
from collections.abc import Callable
from torch import Tensor, nn

class Loss(nn.CrossEntropyLoss):
    def __init__(self, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
"""


@pytest.mark.parametrize("function", ["relu", "gelu"])
def test_code_of_the_working_folder_is_trusted_and_functions_of_torch(function, bad):
    Path("own_loss.py").write_text(LOSS)
    loss = named("own_loss.Loss", activation=f"torch.nn.functional.{function}")
    metrics = bad(of_model(criterion=loss), "own.ckpt")
    assert evaluate("own.ckpt")["test/loss"] == metrics["test/loss"]


def test_the_users_own_run_is_trusted(train: Callable[..., Any], target: Path) -> None:
    profiler = ("--trainer.profiler", "lightning.pytorch.profilers.PassThroughProfiler")
    train(*profiler)
    train("--ckpt_path", "last", "--trainer.max_epochs", 3)
    last = str(next(target.parent.glob("tiny/version_0/checkpoints/last.ckpt")))
    args = ["--ckpt_path", last, "--trainer.max_epochs", "4"]
    with pytest.raises(SystemExit):
        train_main(args)
    assert train_main([*args, *profiler])["epochs"] == 4


@pytest.mark.parametrize("net", ["torchvision.models.resnet18", "timm.create_model"])
def test_a_function_that_makes_networks_is_called(net: str, trained: Trained, target: Path) -> None:
    arguments: dict[str, Any] = {"model_name": "resnet18"} if "timm" in net else {"num_classes": 4}
    own: Any = pkgutil.resolve_name(net)(**arguments)
    content = torch.load(trained()[0] / "checkpoints" / "best.ckpt", weights_only=True)
    content["state_dict"] = {f"net.{name}": value for name, value in own.state_dict().items()}
    content["config"]["model"]["init_args"]["net"] = named(net, **arguments)
    torch.save(content, "net.ckpt")
    COMMANDS["export"](["--ckpt_path", "net.ckpt", "--output", "net.pth"])
    exported = torch.load("net.pth", weights_only=True)
    assert all(torch.equal(exported[name], value) for name, value in own.state_dict().items())
