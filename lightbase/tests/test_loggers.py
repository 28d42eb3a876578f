"""Loggers by a flag or YAML: where they write, what they get, and how they go on after
a resume."""

import csv
import shutil
from pathlib import Path

import pytest
import yaml
from lightning.pytorch.loggers import CSVLogger
from paths import fails
from written import curves

Points = dict[str, list[tuple[int, float]]]
CSV = "lightning.pytorch.loggers.CSVLogger"
# the curves of which a resume repeats the numbers
SHOWN = ("train/", "val/", "test/acc", "test/loss", "lr")


def shown(points: Points) -> Points:
    """Return the curves in SHOWN, with rounded values."""
    return {
        name: [(step, round(value, 4)) for step, value in points[name]]
        for name in sorted(points)
        if name.startswith(SHOWN)
    }


def of_csv(folder: Path, start: int = 0) -> Points:
    points: Points = {}
    file = folder / "csv" / f"version_{start}" / "metrics.csv"
    with file.open(newline="") as lines:
        for row in csv.DictReader(lines):
            for name, value in row.items():
                if value:
                    points.setdefault(name, []).append((int(row["step"]), float(value)))
    return shown(points)


def as_if_killed(folder: Path, epoch: int) -> None:
    """As after kill -9 in the epoch after this one."""
    checkpoints = folder / "checkpoints"
    shutil.copy(checkpoints / f"epoch_{epoch:03d}.ckpt", checkpoints / "last.ckpt")


def yaml_of(path: Path, *names: str) -> Path:
    loggers = [{"class_path": name} for name in names]
    path.write_text(yaml.safe_dump({"trainer": {"logger": loggers}}))
    return path


def test_csv_beside_tensorboard_has_the_same_points_and_a_file_for_each_start(
    train, tmp_path, capsys
):
    config = yaml_of(tmp_path / "both.yaml", "TensorBoardLogger", CSV)
    train("--config", config, "--keep_every_epoch true --trainer.max_epochs 3")
    folder = tmp_path / "tiny" / "version_0"
    assert f"Curves: tensorboard --logdir {tmp_path}\n" in capsys.readouterr().out
    before = of_csv(folder)
    assert before == shown(curves(folder))
    assert [step for step, _ in before["val/acc"]] == [18, 37, 56]

    as_if_killed(folder, 0)
    train("--ckpt_path last")
    assert of_csv(folder) == before
    later = {
        name: [point for point in before[name] if point[0] > 18] for name in before
    }
    assert of_csv(folder, start=1) == later
    assert shown(curves(folder)) == before
    (folder / "metrics.json").unlink()
    shutil.rmtree(folder / "checkpoints")  # as if killed before the first one
    train("--ckpt_path last")
    assert shown(curves(folder)) == before


class NoServer(CSVLogger):
    def __init__(self) -> None:
        raise ConnectionError("http://localhost:1 does not answer")


def test_a_start_that_fails_leaves_nothing(train, tmp_path, capsys):
    error = fails(capsys, 1, lambda: train("--trainer.logger test_loggers.NoServer"))
    assert "NoServer cannot start: " in error
    assert "http://localhost:1 does not answer" in error
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_mlflow_and_wandb_get_all_points_in_runs_of_their_own(
    train, tmp_path, monkeypatch
):
    wandb = pytest.importorskip("wandb")
    tracking = pytest.importorskip("mlflow.tracking")
    monkeypatch.setenv("WANDB_MODE", "offline")
    for name in ("MLFLOW_ALLOW_FILE_STORE", "MLFLOW_TRACKING_URI"):
        monkeypatch.setenv(name, "")  # so that it is deleted in the end
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    config = yaml_of(tmp_path / "two.yaml", "MLFlowLogger", "WandbLogger", "CSVLogger")
    groups = ("--model.parameter_groups", "{'*.bias': {lr: 0.02}}")
    train("--config", config, "--name deep/x --figures_every_n_epochs 2", *groups)
    folder = tmp_path / "deep" / "x" / "version_0"

    client = tracking.MlflowClient(f"file:{tmp_path}/mlruns")
    experiment = client.get_experiment_by_name("deep/x").experiment_id
    (run,) = client.search_runs([experiment])
    assert run.info.status == "FINISHED"
    assert run.data.params["model.net"] == "example.models.mlp.MLP"
    points: Points = {}
    for name in run.data.metrics:
        history = client.get_metric_history(run.info.run_id, name)
        points[name] = [(point.step, point.value) for point in history]
    assert shown(points) == of_csv(folder)
    assert client.list_artifacts(run.info.run_id, "view/confusion_matrix/val")

    assert len(list(folder.glob("wandb/offline-run-*/run-*.wandb"))) == 1

    train("--name deep/x --ckpt_path last --trainer.max_epochs 3")
    assert len(client.search_runs([experiment])) == 2
    wandb.teardown()
