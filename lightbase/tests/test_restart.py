"""A resume keeps the run's own config. It may change the length, the machine and what
only watches."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from paths import TINY, Train
from test_training import checkpoint, curves, equal, weights

from lightbase.commands.train import main


def config(folder: Path) -> dict[str, Any]:
    return yaml.safe_load((folder / "config.yaml").read_text())


def test_a_resume_goes_on_with_the_flags_of_the_first_start(
    train: Train, tmp_path: Path
) -> None:
    flags = (
        "--model.lr",
        0.03,
        "--model.net.activation",
        "tanh",
        "--data.batch_size",
        8,
    )
    train(*flags, "--trainer.max_epochs", 3, "--name", "whole")
    train(*flags, "--trainer.max_epochs", 2)
    train("--ckpt_path", "last", "--trainer.max_epochs", 3)
    folder = tmp_path / "tiny" / "version_0"
    assert equal(weights(folder), weights(tmp_path / "whole" / "version_0"))
    for found in (config(folder), checkpoint(folder)["config"]):
        assert found["model"]["init_args"]["lr"] == 0.03
        assert found["data"]["init_args"]["batch_size"] == 8
        assert found["trainer"]["max_epochs"] == 3
    hparams = yaml.safe_load((folder / "hparams.yaml").read_text())
    assert hparams["trainer.max_epochs"] == 3
    train("--name", "again", config=str(folder / "config.yaml"))
    assert equal(weights(folder), weights(tmp_path / "again" / "version_0"))


def test_a_checkpoint_alone_is_enough(train, tmp_path, capsys):
    train("--name", "mine", "--model.lr", 0.03)
    last = tmp_path / "mine" / "version_0" / "checkpoints" / "last.ckpt"
    assert main(["--ckpt_path", str(last), "--trainer.max_epochs", "3"])["epochs"] == 3
    assert "No --config given" not in capsys.readouterr().out
    assert checkpoint(last.parents[1])["config"]["model"]["init_args"]["lr"] == 0.03
    assert [folder.name for folder in (tmp_path / "mine").iterdir()] == ["version_0"]


def resume_lines(out: str) -> list[str]:
    return [line for line in out.splitlines() if line.startswith("Resume")]


def test_a_config_file_does_not_count_and_flags_do(train, tmp_path, capsys):
    file = tmp_path / "mine.yaml"
    text = Path(TINY).read_text()
    file.write_text(text)
    train("--trainer.max_epochs", 1, config=str(file))
    file.write_text(text.replace("lr: 0.01", "lr: 0.5") + "patience: 3\n")
    train("--ckpt_path", "last", "--trainer.max_epochs", 2, config=str(file))
    assert resume_lines(capsys.readouterr().out) == [
        "Resume: model.lr stays 0.01, not 0.5: config files do not count",
        "Resume: patience stays None, not 3: config files do not count",
        "Resume: trainer.max_epochs 2, before 1",
    ]
    assert (
        checkpoint(tmp_path / "tiny" / "version_0")["config"]["model"]["init_args"][
            "lr"
        ]
        == 0.01
    )


@pytest.mark.parametrize(
    "flags",
    [
        ("--seed_everything", 7),
        ("--data.batch_size", 8),
        ("--model.lr", 0.5),
        ("--model.freeze", "layers.0"),
        ("--trainer.accumulate_grad_batches", 2),
        ("--model.net", "small.ConvNet"),
    ],
)
def test_what_a_run_cannot_go_on_with_is_refused(
    train, trained, tmp_path, capsys, flags
):
    folder = tmp_path / "tiny" / "version_0"
    shutil.copytree(trained("--trainer.max_epochs", 1)[0], folder)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(SystemExit) as caught:
        train("--ckpt_path", "last", "--trainer.max_epochs", 2, *flags)
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert f"{flags[0]} {flags[1]}" in error
    assert len(error.splitlines()) == 2
    assert {
        path: path.read_bytes() for path in folder.rglob("*") if path.is_file()
    } == before


def test_a_run_that_was_killed_before_its_first_checkpoint_starts_again(
    train, tmp_path, capsys
):
    train()
    train("--model.lr", 0.03)
    older, newest = (tmp_path / "tiny" / f"version_{i}" for i in (0, 1))
    expected, points = weights(newest), curves(newest)
    before = {path: path.read_bytes() for path in older.rglob("*") if path.is_file()}
    shutil.rmtree(newest / "checkpoints")
    (newest / "metrics.json").unlink()
    train("--ckpt_path", "last")
    assert (
        f"{newest} was stopped before its first checkpoint" in capsys.readouterr().out
    )
    assert equal(weights(newest), expected)
    assert curves(newest) == points, "each point once"
    assert {
        path: path.read_bytes() for path in older.rglob("*") if path.is_file()
    } == before
    (newest / "checkpoints" / "last.ckpt").unlink()
    with pytest.raises(SystemExit):  # a run that has ended is not one to start again
        train("--ckpt_path", "last")
    assert f"{newest} has no last.ckpt" in capsys.readouterr().err


def test_best_is_that_of_the_newest_run(train, tmp_path, capsys):
    train()
    train("--trainer.enable_checkpointing", "false")
    with pytest.raises(SystemExit):
        train("--ckpt_path", "best")
    assert "version_1 has no best.ckpt" in capsys.readouterr().err


def test_a_restart_of_torchrun_goes_on_in_its_run(train, tmp_path, monkeypatch):
    train("--trainer.max_epochs", 1)
    run = tmp_path / "tiny" / "version_0"
    (run / "metrics.json").unlink()  # as if a process had been killed
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert train("--trainer.max_epochs", 2)["epochs"] == 2
    assert [path.name for path in run.parent.iterdir()] == ["version_0"]
    train("--trainer.max_epochs", 1)  # the newest run is complete
    assert (tmp_path / "tiny" / "version_1").exists()


def test_a_run_in_a_renamed_folder_goes_on_there(train, tmp_path):
    train("--trainer.max_epochs", 1)
    folder = (tmp_path / "tiny" / "version_0").rename(
        tmp_path / "tiny" / "version_good"
    )
    last = folder / "checkpoints" / "last.ckpt"
    assert train("--trainer.max_epochs", 2, "--ckpt_path", last)["epochs"] == 2
    assert [path.name for path in folder.parent.iterdir()] == ["version_good"]
