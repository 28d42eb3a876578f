"""lightbase.train and lightbase.load: a training of objects, or of a YAML, without a
command line."""

import json
import signal
import subprocess
import sys

import programs
import pytest
import yaml
from example.classifier import Classifier
from example.models.mlp import MLP
from lightning import LightningDataModule, seed_everything
from paths import TINY, fails, script
from small import Points
from stops import Terminate
from written import checkpoint, checkpoint_file, equal, weights

import lightbase
from lightbase.config.errors import UserError
from lightbase.config.paths import PROJECT


@pytest.fixture
def flags(tmp_path):
    """Return the flags of a short training that writes below `tmp_path`."""
    quiet = {"device_monitor": False, "step_timer": False, "figures_every_n_epochs": 0}
    return {"default_root_dir": str(tmp_path), "max_epochs": 1, **quiet}


def objects(**arguments):
    seed_everything(1, verbose=False)
    module = Classifier(MLP([10, 4, 2]), num_classes=2, **arguments)
    return module, Points(batch_size=10)


def test_a_run_of_objects(tmp_path, flags, capsys):
    """It has all that a run has. Objects open it, and the scripts cannot."""
    module, data = objects(lr=0.1)
    result = lightbase.train(module, data, name="try", **flags)
    assert result["epochs"] == 1
    run = tmp_path / "try" / "version_0"
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["model"] == {"class_path": "example.classifier.Classifier"}
    assert config["trainer"]["max_epochs"] == 1
    check_result(result, run, module)

    best = checkpoint_file(run)
    expected = module.state_dict()  # after the test the best weights
    other, other_data = objects(lr=0.5)
    loaded, loaded_data = lightbase.load(best, other, other_data)
    assert loaded is other
    assert equal(loaded.state_dict(), expected)
    assert loaded_data.classes == data.classes

    assert "lightbase.load(path, module, data)" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"were built in Python"):
        lightbase.load(best)
    last = f"--ckpt_path={checkpoint_file(run, 'last')}"
    root = f"--trainer.default_root_dir={tmp_path}"
    for name in ("evaluate", "train"):
        error = fails(capsys, 2, lambda name=name: script(name).main([last, root]))
        assert "were built in Python" in error


def check_result(result, run, module):
    """It is the content of metrics.json, and has the metrics of the best epoch."""
    assert result == json.loads((run / "metrics.json").read_text())
    assert (result.folder, result.module, result.best_epoch) == (run, module, 1)
    names = {"train/loss", "train/acc", "val/loss", "val/acc", "test/loss", "test/acc"}
    assert result.metrics.keys() >= names
    best = checkpoint(run)["callbacks"]["RunCheckpoint/best"]["best_model_score"]
    assert result.metrics["val/acc"] == pytest.approx(float(best))
    assert [*result.history["epoch"]] == [1]
    assert len(result.plot().axes) == 2


def test_load_finds_runs_as_the_scripts_do(tmp_path, flags, monkeypatch):
    monkeypatch.setattr("lightbase.config.paths.Project.logs", tmp_path / "logs")
    monkeypatch.setattr(PROJECT, "root", tmp_path)
    del flags["default_root_dir"]
    for _ in range(2):
        module, _ = objects()
        lightbase.train(module, Points(), name="a/b", **flags)
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    monkeypatch.chdir(folder)
    file = "a/b/version_1/checkpoints/best.ckpt"
    for name in ("a/b", "a/b/version_1", "last", "best", f"logs/{file}"):
        loaded, _ = lightbase.load(name, *objects())
        assert equal(loaded.state_dict(), module.state_dict()), name
    with pytest.raises(UserError, match=r"^--ckpt_path c: no such file"):
        lightbase.load("c", *objects())
    with pytest.raises(UserError, match=r"the data of this run is an object"):
        lightbase.load("a/b", module)
    flags["max_epochs"] = 2
    path = "logs/a/b/version_0/checkpoints/last.ckpt"
    result = lightbase.train(*objects(), name="a/b", ckpt_path=path, **flags)
    assert [row["epoch"] for row in result.epochs] == [1, 2]


def test_a_run_of_a_yaml_is_opened_by_every_script(tmp_path, flags, monkeypatch):
    settings = {"model.lr": 0.05, "model.net.sizes": [192, 8, 4], "name": "yaml"}
    metrics = lightbase.train(TINY, settings, **flags)
    folder = tmp_path / "yaml" / "version_0"
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert config["model"]["init_args"]["lr"] == 0.05
    best = checkpoint_file(folder)
    again = script("evaluate").main(["--ckpt_path", str(best)])
    assert {key: metrics[key] for key in again} == again
    module, data = lightbase.load(best)
    assert module.net.layers[1].out_features == 8
    assert isinstance(data, LightningDataModule)


def test_an_interrupted_training_goes_on_to_the_weights_of_a_long_one(
    tmp_path, flags, capsys
):
    flags |= {"max_epochs": 3}
    arguments = {"scheduler": "CosineAnnealingLR"}
    lightbase.train(*objects(**arguments), name="long", **flags)
    ctrl_c = Terminate()
    ctrl_c.at_batch, ctrl_c.number = 2, signal.SIGINT
    stop = {"callbacks": [ctrl_c], "name": "x"}
    with pytest.raises(KeyboardInterrupt):
        lightbase.train(*objects(**arguments), **stop, **flags)
    expected = 'Stopped by Ctrl-C; the same call with ckpt_path="last" continues'
    assert expected in capsys.readouterr().out
    flags |= {"name": "x", "ckpt_path": "last"}
    with pytest.raises(UserError, match=r"lr 0.5: a resume keeps"):
        lightbase.train(*objects(**arguments, lr=0.5), **flags)
    with pytest.raises(UserError, match=r"^--seed_everything 1: a resume keeps 42"):
        lightbase.train(*objects(**arguments), seed_everything=1, **flags)
    assert lightbase.train(*objects(**arguments), **flags)["epochs"] == 3
    long, resumed = (weights(tmp_path / name / "version_0") for name in ("long", "x"))
    assert equal(long, resumed)


NOTEBOOK = """
import os, signal, sys
from lightbase.run.signals import SIGNALS

sys.ps1 = ">>> "
with SIGNALS.handled():
    SIGNALS.waits = True  # as in a training
    os.kill(os.getpid(), signal.SIGINT)
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except KeyboardInterrupt:
        print("alive")
"""


@pytest.mark.linux
def test_two_interrupts_in_a_notebook_leave_its_kernel_alive():
    command = [sys.executable, "-c", NOTEBOOK]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=programs.LIMIT_S
    )
    assert done.stdout == "alive\n", done.stderr


@pytest.mark.parametrize("name", ["model.lr", "data.batch_size"])
def test_settings_of_objects_are_refused(tmp_path, flags, name):
    with pytest.raises(UserError, match="has no effect: this part of the run"):
        lightbase.train(*objects(), **flags, **{name: 5})
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (
            {"max_epoch": 1},
            r"argument --max_epoch; did you mean --trainer.max_epochs\?",
        ),
        ({"max_epochs": "many"}, r"^trainer.max_epochs: 'many'"),
        ({"data": Points}, r"LightningModule and its data, as objects"),
        ({"val": [1]}, r"a data module has its own"),
    ],
)
def test_mistakes_are_user_errors(tmp_path, wrong, text):
    module, data = objects()
    options = {"data": data, "default_root_dir": str(tmp_path), **wrong}
    with pytest.raises(UserError, match=text):
        lightbase.train(module, **options)
