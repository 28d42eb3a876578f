"""lightbase.train and lightbase.load: a training of objects, or of a YAML, without a
command line."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from example.classifier import Classifier
from example.models.mlp import MLP
from lightning import Callback, LightningDataModule, LightningModule, seed_everything
from paths import TINY
from small import Points
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightbase
from lightbase.commands.evaluate import main as evaluate
from lightbase.commands.train import main as command
from lightbase.core.errors import UserError
from lightbase.core.project import PROJECT

QUIET = {"device_monitor": False, "step_timer": False, "figures_every_n_epochs": 0}


def objects(**arguments: Any) -> tuple[Classifier, Points]:
    seed_everything(1, verbose=False)
    module = Classifier(MLP([10, 4, 2]), num_classes=2, **arguments)
    return module, Points(batch_size=10)


def equal(module: nn.Module, other: nn.Module) -> bool:
    pairs = zip(module.parameters(), other.parameters(), strict=True)
    return all(torch.equal(weight, other_weight) for weight, other_weight in pairs)


def test_a_run_of_objects_has_all_that_a_run_has(tmp_path: Path) -> None:
    module, data = objects(lr=0.1)
    flags: Any = {"default_root_dir": str(tmp_path), "max_epochs": 2, **QUIET}
    metrics = lightbase.train(module, data, name="try", **flags)
    run = tmp_path / "try" / "version_0"
    files = {file.name for file in run.iterdir()}
    assert files >= {"config.yaml", "metrics.json", "progress.json", "checkpoints"}
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["model"] == {"class_path": "example.classifier.Classifier"}
    assert config["trainer"]["max_epochs"] == 2

    best = run / "checkpoints" / "best.ckpt"
    # after the test the module has the best weights
    net = MLP([10, 4, 2])
    loaded = Classifier.load_from_checkpoint(best, net=net, num_classes=2)
    assert equal(loaded, module)
    other, other_data = objects(lr=0.5)
    loaded, loaded_data = lightbase.load(best, other, other_data)
    assert loaded is other
    assert equal(loaded, module)
    assert loaded_data.classes == data.classes
    assert metrics["epochs"] == 2


def test_the_scripts_say_that_they_cannot_open_a_run_of_objects(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags: Any = {"default_root_dir": str(tmp_path), "max_epochs": 1, **QUIET}
    module = Classifier(nn.Sequential(nn.Flatten(), nn.Linear(10, 2)), num_classes=2)
    lightbase.train(module, Points(), name="net", **flags)
    assert "lightbase.load(path, module, data)" in capsys.readouterr().out
    best = tmp_path / "net" / "version_0" / "checkpoints" / "best.ckpt"
    with pytest.raises(UserError, match=r"were built in Python"):
        lightbase.load(best)
    with pytest.raises(SystemExit):
        evaluate(["--ckpt_path", str(best)])
    assert "give the objects: lightbase.load" in capsys.readouterr().err
    last = ["--ckpt_path", str(best.with_name("last.ckpt"))]
    with pytest.raises(SystemExit):
        command([*last, f"--trainer.default_root_dir={tmp_path}"])
    assert "were built in Python" in capsys.readouterr().err


def test_a_run_of_a_yaml_is_opened_by_every_script(tmp_path: Path) -> None:
    settings = {"model.lr": 0.05, "model.net.sizes": [192, 8, 4], "name": "yaml"}
    metrics = lightbase.train(
        TINY, settings, default_root_dir=str(tmp_path), max_epochs=1
    )
    folder = tmp_path / "yaml" / "version_0"
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert config["model"]["init_args"]["lr"] == 0.05
    best = folder / "checkpoints" / "best.ckpt"
    again = evaluate(["--ckpt_path", str(best)])
    assert {key: metrics[key] for key in again} == again
    module, data = lightbase.load(best)
    assert module.net.layers[1].out_features == 8
    assert isinstance(data, LightningDataModule)
    with pytest.raises(UserError, match=r"is of a Classifier"):
        type("Other", (Classifier,), {}).load_from_checkpoint(best)


def test_python_loads_a_run_of_the_command(tmp_path: Path, monkeypatch: Any) -> None:
    flags = ["--data=small.Points", "--model.net=example.models.mlp.MLP"]
    flags += ["--model.net.sizes=[10,4,2]", "--trainer.max_epochs=1"]
    flags += ["--device_monitor=false", "--trainer.accelerator=cpu"]
    command([*flags, f"--trainer.default_root_dir={tmp_path}"])
    monkeypatch.setattr(PROJECT, "default_model", "")  # no script has set it
    [best] = tmp_path.glob("*/version_0/checkpoints/best.ckpt")
    assert isinstance(lightbase.load(best)[0], Classifier)
    assert isinstance(Classifier.load_from_checkpoint(best), Classifier)


def test_an_interrupted_training_goes_on_to_the_weights_of_a_long_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags: Any = {"default_root_dir": str(tmp_path), "max_epochs": 3, **QUIET}
    arguments = {"scheduler": "CosineAnnealingLR"}
    lightbase.train(*objects(**arguments), name="long", **flags)
    stop = {"callbacks": [Interrupt()], "name": "x"}
    with pytest.raises(KeyboardInterrupt):  # twice in this process
        lightbase.train(*objects(**arguments), **stop, **flags)
    expected = 'Stopped by Ctrl-C; the same call with ckpt_path="last" goes on'
    assert expected in capsys.readouterr().out
    resume = {"name": "x", "ckpt_path": "last", **flags}
    with pytest.raises(UserError, match=r"lr 0.5: a resume goes on with"):
        lightbase.train(*objects(**arguments, lr=0.5), **resume)
    with pytest.raises(UserError, match=r"seed_everything 1: a resume goes on with 42"):
        lightbase.train(*objects(**arguments), seed_everything=1, **resume)
    assert lightbase.train(*objects(**arguments), **resume)["epochs"] == 3
    states = []
    for name in ("long", "x"):
        path = tmp_path / name / "version_0" / "checkpoints" / "last.ckpt"
        content = torch.load(path, map_location="cpu", weights_only=True)
        states.append(content["state_dict"])
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


class Interrupt(Callback):
    """Ctrl-C in the third batch of the second epoch."""

    def on_train_batch_start(
        self, trainer: Any, module: Any, batch: Any, batch_idx: int
    ) -> None:
        if (trainer.current_epoch, batch_idx) == (1, 2):
            os.kill(os.getpid(), signal.SIGINT)


TWO_TRAININGS = """
import multiprocessing, os, signal, time
from lightbase.core import signals

signals.CHECK_S = 0.1
worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=[60])
try:
    with signals.SIGNALS.handled():
        worker.start()  # it shares the sockets of this process
        os.kill(os.getpid(), signal.SIGINT)
except signals.Stopped:
    pass
with signals.SIGNALS.handled():
    time.sleep(0.5)
worker.kill()
print("both ended")
"""


@pytest.mark.linux
def test_a_signal_of_one_training_does_not_end_the_next_one() -> None:
    command = [sys.executable, "-c", TWO_TRAININGS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout == "both ended\n", done.stderr


class Plain(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(10, 2))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class PlainData(LightningDataModule):
    def train_dataloader(self) -> DataLoader:
        return DataLoader(TensorDataset(torch.randn(20, 10), torch.zeros(20).long()), 5)


def test_plain_lightning_objects_train(tmp_path: Path) -> None:
    flags: Any = {"default_root_dir": str(tmp_path), "max_epochs": 1, **QUIET}
    assert (
        lightbase.train(
            Plain(), PlainData(), name="plain", log_every_n_steps=1, **flags
        )["epochs"]
        == 1
    )


def test_mistakes_are_user_errors(tmp_path: Path) -> None:
    mistakes: list[tuple[dict[str, Any], str]] = [
        ({"max_epoch": 1}, r"--max_epoch; did you mean --trainer.max_epochs"),
        ({"max_epochs": "many"}, r"trainer.max_epochs: 'many'"),
        ({"ckpt_path": "last", "name": "none"}, r"ckpt_path last: no run in"),
    ]
    for flags, text in mistakes:
        with pytest.raises(UserError, match=text):
            lightbase.train(*objects(), default_root_dir=str(tmp_path), **flags)
    with pytest.raises(UserError, match=r"takes a module and its data module"):
        lightbase.train(objects()[0])


def test_without_a_script_the_repository_names_the_project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PROJECT, "default_model", "")
    with pytest.raises(UserError, match=r"none\.ckpt"):
        lightbase.load(tmp_path / "none.ckpt")
    assert PROJECT.package == "example"


def test_in_a_notebook_main_raises_what_it_is_and_ignores_the_arguments_of_the_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "ps1", "In [1]:", raising=False)
    with pytest.raises(UserError, match=r"unknown key model.lrr"):
        lightbase.main(["--model.lrr", "3"])
    monkeypatch.setattr(sys, "argv", ["ipykernel_launcher.py", "-f", "kernel.json"])
    monkeypatch.setattr(
        "lightbase.commands.train.parse", lambda args: pytest.fail(f"{args}")
    )
    with pytest.raises(pytest.fail.Exception, match=r"\[\]"):
        lightbase.main()
