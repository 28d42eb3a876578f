"""Loggers by a flag or YAML: where they write, what they get, and how they go on after a resume."""

import csv
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning import Callback, LightningModule
from lightning.pytorch.loggers import CSVLogger
from paths import argv
from tensorboard.backend.event_processing import plugin_event_accumulator
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util import tensor_util

Train = Callable[..., dict[str, Any]]
Points = dict[str, list[tuple[int, float]]]
SHOWN = ("train/", "val/", "test/", "lr")  # of which a resume repeats the numbers


def of_csv(file: Path) -> Points:
    found: Points = {}
    with file.open(newline="") as lines:
        for row in csv.DictReader(lines):
            for name, value in row.items():
                if name.startswith(SHOWN) and value:
                    found.setdefault(name, []).append((int(row["step"]), float(value)))
    return found


def of_tensorboard(folder: Path) -> Points:
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    names = [name for name in events.Tags()["scalars"] if name.startswith(SHOWN)]
    return {name: [(event.step, event.value) for event in events.Scalars(name)] for name in names}


def without_data_server(folder: Path) -> Points:
    """As of_tensorboard, with the reader of `tensorboard --load_fast=false`."""
    events = plugin_event_accumulator.EventAccumulator(
        str(folder), tensor_size_guidance={"scalars": 0}
    )
    events.Reload()
    names = [name for name in events.Tags()["tensors"] if name.startswith(SHOWN)]
    return {
        name: [
            (event.step, tensor_util.make_ndarray(event.tensor_proto).item())
            for event in events.Tensors(name)
        ]
        for name in names
    }


def rounded(points: Points) -> dict[str, list[tuple[int, float]]]:
    return {
        name: [(step, round(value, 4)) for step, value in found]
        for name, found in sorted(points.items())
    }


def as_if_killed(folder: Path, epoch: int) -> None:
    """As after kill -9 in the epoch after this one."""
    shutil.copy(
        folder / "checkpoints" / f"epoch_{epoch:03d}.ckpt", folder / "checkpoints" / "last.ckpt"
    )


def yaml_of(path: Path, *loggers: str) -> Path:
    path.write_text(
        yaml.safe_dump({"trainer": {"logger": [{"class_path": name} for name in loggers]}})
    )
    return path


def test_tensorboard_without_its_data_server_shows_no_point_twice(train, tmp_path):
    train("--keep_every_epoch", "true", "--trainer.max_epochs", 3)
    folder = tmp_path / "tiny" / "version_0"
    before = rounded(of_tensorboard(folder))
    assert rounded(without_data_server(folder)) == before
    for epoch in (0, 1):
        as_if_killed(folder, epoch)
        train("--ckpt_path", "last")
        assert rounded(without_data_server(folder)) == before
    (folder / "metrics.json").unlink()
    shutil.rmtree(folder / "checkpoints")  # as if killed before the first one
    train("--ckpt_path", "last")
    assert rounded(without_data_server(folder)) == rounded(of_tensorboard(folder)) == before
    assert list(folder.parent.iterdir()) == [folder]


@pytest.mark.slow
def test_csv_beside_tensorboard_goes_on_after_a_kill(train, tmp_path, capsys):
    config = yaml_of(
        tmp_path / "both.yaml", "TensorBoardLogger", "lightning.pytorch.loggers.CSVLogger"
    )
    train("--config", config, "--keep_every_epoch true --trainer.max_epochs 3 --step_timer true")
    folder = tmp_path / "tiny" / "version_0"
    shown = capsys.readouterr().out
    assert f"Curves: tensorboard --logdir {tmp_path}\n" in shown
    assert f"Curves: {folder / 'metrics.csv'}\n" in shown
    before = rounded(of_csv(folder / "metrics.csv"))
    assert before == rounded(of_tensorboard(folder))
    assert before["lr"][-1][0] == 56
    assert [step for step, _ in before["val/acc"]] == [18, 37, 56]
    assert before["test/acc"][0][0] == 57
    parameters = yaml.safe_load((folder / "hparams.yaml").read_text())
    assert parameters["model.net"] == "example.models.mlp.MLP"
    with (folder / "metrics.csv").open("a") as file:
        file.write("0,0.01,5")  # a row that the kill cut short

    as_if_killed(folder, 0)
    train("--ckpt_path", "last", "--trainer.max_epochs", 3)
    assert rounded(of_csv(folder / "metrics.csv")) == before
    assert rounded(of_tensorboard(folder)) == before
    assert (folder / "hparams.yaml").exists()
    saved = yaml.safe_load((folder / "config.yaml").read_text())["trainer"]["logger"]
    assert [logger["class_path"].rpartition(".")[2] for logger in saved] == [
        "TensorBoardLogger",
        "CSVLogger",
    ]
    assert saved[1]["init_args"]["save_dir"] is None

    # the recorded config starts a run of its own
    capsys.readouterr()
    train("--config", folder / "config.yaml", "--trainer.max_epochs", 1)
    assert of_csv(folder.with_name("version_1") / "metrics.csv")["val/acc"]
    assert rounded(of_csv(folder / "metrics.csv")) == before


class Reads(Callback):
    """What metrics.csv has when an epoch begins, whose checkpoint of before a run that is killed
    goes on from."""

    found: list[Points] = []

    def on_train_epoch_start(self, trainer: Any, pl_module: LightningModule) -> None:
        Reads.found += (
            [of_csv(Path(trainer.logger.log_dir, "metrics.csv"))] if trainer.current_epoch else []
        )


def test_the_point_of_an_epochs_end_is_in_the_file_when_its_checkpoint_is(train: Train) -> None:
    Reads.found = []
    train(
        "--trainer.logger CSVLogger --trainer.callbacks test_loggers.Reads --trainer.max_epochs 2"
    )
    (points,) = Reads.found
    assert [step for step, _ in points["train/loss"]][-1] == 18


@pytest.mark.slow
@pytest.mark.linux
def test_the_test_of_several_processes_drops_no_point_of_their_training(train, tmp_path):
    loggers = "[lightning.pytorch.loggers.TensorBoardLogger, lightning.pytorch.loggers.CSVLogger]"
    train("--trainer.logger", loggers, "--trainer.strategy", "ddp_fork", "--trainer.devices", 2)
    folder = tmp_path / "tiny" / "version_0"
    for found in (
        of_tensorboard(folder),
        without_data_server(folder),
        of_csv(folder / "metrics.csv"),
    ):
        assert len(found["val/loss"]) == 2
        assert len(found["test/loss"]) == 1


def test_csv_alone_speaks_of_no_other_logger(train, tmp_path, capsys):
    train("--trainer.logger CSVLogger --figures_every_n_epochs 1 --trainer.max_epochs 1")
    assert "tensorboard" not in capsys.readouterr().out
    assert not list((tmp_path / "tiny" / "version_0").glob("events*"))


def test_what_is_given_is_kept(train, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = argv(
        "--trainer.logger CSVLogger --trainer.logger.save_dir own --trainer.logger.prefix x"
    )
    train(*flags, "--trainer.max_epochs", 1)
    header = (
        (tmp_path / "own" / "tiny" / "version_0" / "metrics.csv").read_text().partition("\n")[0]
    )
    assert "x-val/acc" in header


class NoServer(CSVLogger):
    def __init__(self) -> None:
        raise ConnectionError("http://localhost:1 does not answer")


def test_a_start_that_fails_leaves_nothing(train, tmp_path, capsys):
    with pytest.raises(SystemExit) as caught:
        train("--trainer.logger test_loggers.NoServer")
    assert caught.value.code == 1
    error = capsys.readouterr().err
    assert "error: NoServer cannot start: " in error
    assert "http://localhost:1 does not answer\n" in error
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("is_relative", [True, False])
def test_mlflow_keeps_files_where_a_uri_says_so(train, tmp_path, monkeypatch, is_relative):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "")
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE")
    monkeypatch.chdir(tmp_path)
    uri = "own" if is_relative else f"file://{tmp_path}/own"
    flags = argv(
        "--trainer.logger MLFlowLogger --trainer.logger.tracking_uri",
        uri,
        "--figures_every_n_epochs 0",
    )
    train(*flags, "--trainer.max_epochs", 1)
    assert list((tmp_path / "own").glob("*/*/metrics/val/acc"))
    config = yaml.safe_load((tmp_path / "tiny" / "version_0" / "config.yaml").read_text())
    assert str(tmp_path) in config["trainer"]["logger"]["init_args"]["tracking_uri"]


@pytest.mark.slow
def test_a_trial_run_leaves_nothing(train: Train, tmp_path: Path) -> None:
    train("--trainer.logger", "MLFlowLogger", "--trainer.fast_dev_run")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_mlflow_and_wandb_go_on_after_a_kill(train, tmp_path, monkeypatch, capsys):
    from mlflow.tracking import MlflowClient

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE", raising=False)
    monkeypatch.chdir(tmp_path)
    config = yaml_of(tmp_path / "two.yaml", "MLFlowLogger", "WandbLogger", "CSVLogger")
    flags = argv("--name deep/x --figures_every_n_epochs 3 --keep_every_epoch true")
    groups = ("--model.parameter_groups", "{'*.bias': {lr: 0.02}}")
    train("--config", config, *flags, *groups, "--trainer.max_epochs 3")
    folder = tmp_path / "deep" / "x" / "version_0"
    assert f"mlflow ui --backend-store-uri {Path('mlruns')}\n" in capsys.readouterr().out
    assert of_mlflow(tmp_path) == as_sets(of_csv(folder / "metrics.csv"))

    as_if_killed(folder, 0)
    train("--name deep/x --ckpt_path last --trainer.max_epochs 4")
    expected = as_sets(of_csv(folder / "metrics.csv"))
    found = of_mlflow(tmp_path)
    assert {step for step, _ in found["val/acc"]} == {18, 37, 56, 75}
    for name in expected:
        if not name.startswith("test/"):  # a test after three epochs, and one after four
            assert found[name] == expected[name]
    assert [step for step, _ in sorted(found["test/acc"])] == [57, 76]

    client = MlflowClient(f"file:{tmp_path}/mlruns")
    (experiment,) = (item for item in client.search_experiments() if item.name != "Default")
    assert experiment.name == "deep/x"
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("version_0", "FINISHED")
    assert run.data.params["model.net"] == "example.models.mlp.MLP"
    pictures = client.list_artifacts(run.info.run_id, "view/confusion_matrix/val")
    assert "view/confusion_matrix/val/56.png" in [file.path for file in pictures]

    files = list(folder.glob("wandb/offline-run-*/run-*.wandb"))
    assert len(files) == 2
    assert len({file.name for file in files}) == 1  # run-ID.wandb
    assert not list(tmp_path.glob("wandb"))
    assert not wandb_run()


def as_sets(points: Points) -> dict[str, set[tuple[int, float]]]:
    return {name: set(found) for name, found in rounded(points).items()}


def of_mlflow(root: Path) -> dict[str, set[tuple[int, float]]]:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"file:{root}/mlruns")
    (run,) = client.search_runs([found.experiment_id for found in client.search_experiments()])
    names = [name for name in run.data.metrics if name.startswith(SHOWN)]
    histories = {name: client.get_metric_history(run.info.run_id, name) for name in names}
    return as_sets(
        {name: [(point.step, point.value) for point in found] for name, found in histories.items()}
    )


def wandb_run() -> Any:
    import wandb

    return wandb.run
