"""Loggers by a flag or YAML: where they write, what they get, and how they go on after
a resume."""

import csv
import shutil
from pathlib import Path

import pytest
import yaml
from lightning.pytorch.loggers import CSVLogger
from written import curves

Points = dict[str, list[tuple[int, float]]]
CSV = "lightning.pytorch.loggers.CSVLogger"
SHOWN = (
    "train/",
    "val/",
    "test/acc",
    "test/loss",
    "lr",
)  # of which a resume repeats the numbers


def of_csv(folder: Path, start: int = 0) -> Points:
    found: Points = {}
    file = folder / "csv" / f"version_{start}" / "metrics.csv"
    with file.open(newline="") as lines:
        for row in csv.DictReader(lines):
            for name, value in row.items():
                if name.startswith(SHOWN) and value:
                    found.setdefault(name, []).append((int(row["step"]), float(value)))
    return found


def of_tensorboard(folder: Path) -> Points:
    return {
        name: points
        for name, points in curves(folder).items()
        if name.startswith(SHOWN)
    }


def rounded(points: Points) -> dict[str, list[tuple[int, float]]]:
    return {
        name: [(step, round(value, 4)) for step, value in found]
        for name, found in sorted(points.items())
    }


def as_if_killed(folder: Path, epoch: int) -> None:
    """As after kill -9 in the epoch after this one."""
    checkpoints = folder / "checkpoints"
    shutil.copy(checkpoints / f"epoch_{epoch:03d}.ckpt", checkpoints / "last.ckpt")


def yaml_of(path: Path, *names: str) -> Path:
    loggers = [{"class_path": name} for name in names]
    path.write_text(yaml.safe_dump({"trainer": {"logger": loggers}}))
    return path


def test_tensorboard_shows_no_point_twice(train, tmp_path):
    train("--keep_every_epoch", "true", "--trainer.max_epochs", 3)
    folder = tmp_path / "tiny" / "version_0"
    before = rounded(of_tensorboard(folder))
    for epoch in (0, 1):
        as_if_killed(folder, epoch)
        train("--ckpt_path", "last")
        assert rounded(of_tensorboard(folder)) == before
    (folder / "metrics.json").unlink()
    shutil.rmtree(folder / "checkpoints")  # as if killed before the first one
    train("--ckpt_path", "last")
    assert rounded(of_tensorboard(folder)) == before
    assert list(folder.parent.iterdir()) == [folder]


@pytest.mark.slow
def test_csv_beside_tensorboard_has_the_same_points_and_a_file_for_each_start(
    train, tmp_path, capsys
):
    config = yaml_of(tmp_path / "both.yaml", "TensorBoardLogger", CSV)
    train(
        "--config",
        config,
        "--keep_every_epoch true --trainer.max_epochs 3 --step_timer true",
    )
    folder = tmp_path / "tiny" / "version_0"
    assert f"Curves: tensorboard --logdir {tmp_path}\n" in capsys.readouterr().out
    before = rounded(of_csv(folder))
    assert before == rounded(of_tensorboard(folder))
    assert before["lr"][-1][0] == 56
    assert [step for step, _ in before["val/acc"]] == [18, 37, 56]
    assert before["test/acc"][0][0] == 57
    parameters = yaml.safe_load((folder / "hparams.yaml").read_text())
    assert parameters["model.net"] == "example.models.mlp.MLP"

    as_if_killed(folder, 0)
    train("--ckpt_path", "last", "--trainer.max_epochs", 3)
    assert rounded(of_csv(folder)) == before
    later = {
        name: [point for point in before[name] if point[0] > 18] for name in before
    }
    assert rounded(of_csv(folder, start=1)) == later
    assert rounded(of_tensorboard(folder)) == before
    saved = yaml.safe_load((folder / "config.yaml").read_text())["trainer"]["logger"]
    assert (
        saved[1]["init_args"]["save_dir"] is None
    )  # the recorded config starts a run of its own


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
def test_mlflow_and_wandb_get_all_points_in_runs_of_their_own(
    train, tmp_path, monkeypatch
):
    import wandb
    from mlflow.tracking import MlflowClient

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE", raising=False)
    monkeypatch.chdir(tmp_path)
    config = yaml_of(tmp_path / "two.yaml", "MLFlowLogger", "WandbLogger", "CSVLogger")
    groups = ("--model.parameter_groups", "{'*.bias': {lr: 0.02}}")
    train("--config", config, "--name deep/x --figures_every_n_epochs 2", *groups)
    folder = tmp_path / "deep" / "x" / "version_0"

    client = MlflowClient(f"file:{tmp_path}/mlruns")
    (experiment,) = (
        item for item in client.search_experiments() if item.name != "Default"
    )
    (run,) = client.search_runs([experiment.experiment_id])
    assert (experiment.name, run.info.run_name) == ("deep/x", "version_0")
    assert run.info.status == "FINISHED"
    assert run.data.params["model.net"] == "example.models.mlp.MLP"
    names = [name for name in run.data.metrics if name.startswith(SHOWN)]
    histories = {
        name: client.get_metric_history(run.info.run_id, name) for name in names
    }
    points = {
        name: [(p.step, p.value) for p in found] for name, found in histories.items()
    }
    assert rounded(points) == rounded(of_csv(folder))
    pictures = client.list_artifacts(run.info.run_id, "view/confusion_matrix/val")
    assert "view/confusion_matrix/val/37.png" in [file.path for file in pictures]

    assert len(list(folder.glob("wandb/offline-run-*/run-*.wandb"))) == 1
    assert not list(tmp_path.glob("wandb"))
    assert not wandb.run

    train(
        "--name deep/x --ckpt_path last --trainer.max_epochs 3"
    )  # starts other runs there
    assert len(client.search_runs([experiment.experiment_id])) == 2
