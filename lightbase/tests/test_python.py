"""lightbase.train and lightbase.load: a training of objects, without a command line."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from example.classifier import Classifier
from example.models.mlp import MLP
from lightning import Callback, LightningDataModule, LightningModule, seed_everything
from small import Points
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightbase
from lightbase.commands.evaluate import main as evaluate
from lightbase.core.errors import UserError
from lightbase.core.folder import PROJECT
from lightbase.core.run import main as command

QUIET = {"device_monitor": False, "step_timer": False, "figures_every_n_epochs": 0}


def objects(**arguments: Any) -> tuple[Classifier, Points]:
    seed_everything(1, verbose=False)
    return Classifier(MLP([10, 4, 2]), num_classes=2, **arguments), Points(
        batch_size=10
    )


def test_trained_objects_are_loaded_and_evaluated_like_a_run_of_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    module, data = objects(lr=0.1, criterion=criterion)
    module.lr = 0.05  # what trains is what is recorded
    metrics = lightbase.train(
        module, data, max_epochs=2, name="try", default_root_dir=str(tmp_path), **QUIET
    )
    run = tmp_path / "try" / "version_0"
    best = run / "checkpoints" / "best.ckpt"
    assert {file.name for file in run.iterdir()} >= {
        "config.yaml",
        "metrics.json",
        "checkpoints",
    }
    arguments = yaml.safe_load((run / "config.yaml").read_text())["model"]["init_args"]
    assert arguments["lr"] == 0.05
    assert arguments["net"]["init_args"]["sizes"] == [10, 4, 2]

    loaded = Classifier.load_from_checkpoint(best)
    assert isinstance(loaded, Classifier)
    assert loaded.criterion.label_smoothing == 0.1
    for weight, other in zip(loaded.parameters(), module.parameters(), strict=True):
        assert torch.equal(
            weight, other
        )  # after the test the module has the best weights
    again = evaluate(["--ckpt_path", str(best)])
    assert {key: metrics[key] for key in again} == again
    monkeypatch.setattr(
        PROJECT, "default_model", ""
    )  # a session that no script has started
    _, data = lightbase.load(best)
    assert isinstance(data, Points)
    assert data.batch_size == 10
    with pytest.raises(UserError, match=r"is of a Classifier"):
        type("Other", (Classifier,), {}).load_from_checkpoint(best)


def test_python_loads_a_run_of_the_command(tmp_path: Path, monkeypatch: Any) -> None:
    flags = ["--data=small.Points", "--model.net=example.models.mlp.MLP"]
    flags += [
        "--model.net.sizes=[10,4,2]",
        "--trainer.max_epochs=1",
        "--device_monitor=false",
    ]
    command(
        [*flags, "--trainer.accelerator=cpu", f"--trainer.default_root_dir={tmp_path}"]
    )
    monkeypatch.setattr(PROJECT, "default_model", "")  # no script has set it
    [best] = tmp_path.glob("*/version_0/checkpoints/best.ckpt")
    assert isinstance(lightbase.load(best)[0], Classifier)


def test_an_interrupted_training_goes_on_to_the_weights_of_a_long_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags: Any = {"default_root_dir": str(tmp_path), "max_epochs": 3, **QUIET}
    arguments = {"scheduler": "CosineAnnealingLR"}
    lightbase.train(*objects(**arguments), name="long", **flags)
    with pytest.raises(KeyboardInterrupt):  # twice in this process
        lightbase.train(
            *objects(**arguments), name="x", callbacks=[Interrupt()], **flags
        )
    assert (
        'Stopped by Ctrl-C; the same call with ckpt_path="last" goes on'
        in capsys.readouterr().out
    )
    resume = {"name": "x", "ckpt_path": "last", **flags}
    with pytest.raises(UserError, match=r"--model.*: a resume goes on with"):
        lightbase.train(*objects(**arguments, lr=0.5), **resume)
    assert lightbase.train(*objects(**arguments), **resume)["epochs"] == 3
    paths = [
        tmp_path / name / "version_0" / "checkpoints" / "last.ckpt"
        for name in ("long", "x")
    ]
    one, two = (
        torch.load(path, map_location="cpu", weights_only=True)["state_dict"]
        for path in paths
    )
    assert all(torch.equal(one[name], two[name]) for name in one)


class Interrupt(Callback):
    """Ctrl-C in the third batch of the second epoch."""

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if (trainer.current_epoch, trainer.fit_loop.batch_idx) == (1, 2):
            os.kill(os.getpid(), signal.SIGINT)


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


def test_objects_that_cannot_be_built_again_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags: Any = {"default_root_dir": str(tmp_path), "max_epochs": 1, **QUIET}
    net = nn.Sequential(nn.Flatten(), nn.Linear(10, 2))
    module = Classifier(net, num_classes=2)
    lightbase.train(module, Points(), name="net", **flags)
    assert "Objects that the config cannot hold: model.net:" in capsys.readouterr().out
    best = tmp_path / "net" / "version_0" / "checkpoints" / "best.ckpt"
    with pytest.raises(UserError, match=r"model.net was built in Python: Sequential"):
        lightbase.load(best)
    other = Classifier(nn.Sequential(nn.Flatten(), nn.Linear(10, 2)), num_classes=2)
    loaded, _ = lightbase.load(best, other, Points())
    assert loaded is other
    assert torch.equal(other.net[1].weight, net[1].weight)

    metrics = lightbase.train(Plain(), PlainData(), name="plain", **flags)
    assert metrics["epochs"] == 1


def test_mistakes_are_user_errors(tmp_path: Path) -> None:
    for flags, text in (
        (
            {"max_epoch": 1},
            r"unknown argument --max_epoch; did you mean --trainer.max_epochs",
        ),
        ({"max_epochs": "many"}, r"trainer.max_epochs: 'many'"),
        ({"ckpt_path": "last", "name": "none"}, r"ckpt_path last: no run in"),
    ):
        with pytest.raises(UserError, match=text):
            lightbase.train(*objects(), default_root_dir=str(tmp_path), **flags)


def test_without_a_script_the_repository_names_the_project(
    tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(PROJECT, "default_model", "")
    with pytest.raises(UserError, match=r"none\.ckpt"):
        lightbase.load(tmp_path / "none.ckpt")
    assert PROJECT.package == "example"


def test_in_a_notebook_main_raises_what_it_is_and_ignores_the_arguments_of_the_kernel(
    monkeypatch,
) -> None:
    monkeypatch.setattr(sys, "ps1", "In [1]:", raising=False)
    with pytest.raises(UserError, match=r"unknown argument --model.lrr"):
        lightbase.main(["--model.lrr", "3"])
    monkeypatch.setattr(sys, "argv", ["ipykernel_launcher.py", "-f", "kernel.json"])
    monkeypatch.setattr("lightbase.core.run.parse", lambda args: pytest.fail(f"{args}"))
    with pytest.raises(pytest.fail.Exception, match=r"\[\]"):
        lightbase.main()
