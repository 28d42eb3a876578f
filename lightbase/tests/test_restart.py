"""A resume keeps the run's own config. It may change the length, the machine and what
only watches."""

import functools
import shutil
from pathlib import Path

import pytest
from paths import TINY, Train, fails, script
from torch import Tensor, nn
from written import checkpoint, checkpoint_file, curves, equal, weights

from lightbase.commands.train import main
from lightbase.run import folder
from lightbase.setup import resume
from lightbase.watch import environment


def files_in(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_resume_goes_on_with_the_flags_of_the_first_start(
    train: Train, tmp_path: Path
) -> None:
    flags = "--model.lr 0.03 --model.net.activation tanh --data.batch_size 8"
    train(flags, "--trainer.max_epochs 3 --name whole")
    train(flags, "--trainer.max_epochs 2")
    folder = tmp_path / "tiny" / "version_0"
    # the checkpoint alone is enough
    main(["--ckpt_path", f"{folder}/checkpoints/last.ckpt", "--trainer.max_epochs=3"])
    assert equal(weights(folder), weights(tmp_path / "whole" / "version_0"))
    train("--name", "again", config=str(folder / "config.yaml"))
    assert equal(weights(folder), weights(tmp_path / "again" / "version_0"))


def test_a_config_file_does_not_count_and_flags_do(train, tmp_path, capsys):
    file = tmp_path / "mine.yaml"
    text = Path(TINY).read_text()
    file.write_text(text)
    train("--trainer.max_epochs", 1, config=str(file))
    file.write_text(text.replace("lr: 0.01", "lr: 0.5"))
    train("--ckpt_path", "last", "--trainer.max_epochs", 2, config=str(file))
    assert "Resume: config files do not count" in capsys.readouterr().out
    saved = checkpoint(tmp_path / "tiny" / "version_0")["config"]
    assert saved["model"]["init_args"]["lr"] == 0.01


@pytest.mark.parametrize(
    "flag",
    ["--data.batch_size 8", "--model.freeze layers.0", "--model.net small.ConvNet"],
)
def test_what_a_run_cannot_go_on_with_is_refused(
    train, trained, tmp_path, capsys, flag
):
    folder = tmp_path / "tiny" / "version_0"
    shutil.copytree(trained("--trainer.max_epochs", 1)[0], folder)
    before = files_in(folder)
    more = "--ckpt_path last --trainer.max_epochs 2"
    assert flag in fails(capsys, 2, lambda: train(more, flag))
    assert files_in(folder) == before


class Edited(nn.Module):
    """Two layers of one shape. An edit of the code changes their order."""

    order = ("first", "second")

    def __init__(self) -> None:
        super().__init__()
        for name in self.order:
            self.add_module(name, nn.Linear(8, 8))
        self.head = nn.Linear(192, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(x).relu()).flatten(1))


def test_moments_of_parameters_in_another_order_are_refused(
    train, tmp_path, monkeypatch, capsys
):
    """The optimizer would take the moments of the other layer without an error. The
    weights have names: an evaluation needs no order."""
    result = train("--model.net test_restart.Edited --trainer.max_epochs 1")
    monkeypatch.setattr(Edited, "order", ("second", "first"))
    more = "--ckpt_path last --trainer.max_epochs 2"
    error = fails(capsys, 1, lambda: train(more))
    assert "the parameters have another order than in" in error
    best = checkpoint_file(tmp_path / "tiny" / "version_0")
    again = script("evaluate").main(["--ckpt_path", str(best)])
    assert again["test/loss"] == result["test/loss"]


def test_a_run_that_was_killed_before_its_first_checkpoint_starts_again(
    train, tmp_path, capsys
):
    train()
    train("--model.lr", 0.03)
    newest = tmp_path / "tiny" / "version_1"
    expected, points = weights(newest), curves(newest)
    shutil.rmtree(newest / "checkpoints")
    (newest / "metrics.json").unlink()
    train("--ckpt_path", "last")
    out = capsys.readouterr().out
    assert f"{newest} was stopped before its first checkpoint" in out
    assert equal(weights(newest), expected)
    assert curves(newest) == points, "each point once"


def begin_job(monkeypatch, job):
    """Begin a job of torchrun. Lightning does not see it."""
    for module in (folder, environment, resume):
        monkeypatch.setattr(module, "torchrun_id", lambda: job)


def test_a_restart_of_torchrun_goes_on_in_its_run(train, tmp_path, monkeypatch):
    runs = [tmp_path / "tiny" / f"version_{i}" for i in range(3)]
    begin = functools.partial(begin_job, monkeypatch)
    for run, job in zip(runs, ("7", "8"), strict=False):  # two jobs with one name
        begin(job)
        train("--trainer.max_epochs", 1)
        (run / "metrics.json").unlink()  # as if a process had been killed
    begin("7")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert train("--trainer.max_epochs", 2)["epochs"] == 2
    assert (runs[0] / "metrics.json").exists()
    assert not runs[2].exists()
    train("--trainer.max_epochs", 1)  # the run of the job is complete
    assert runs[2].exists()


@pytest.mark.parametrize(
    ("job", "has_last", "continues"),
    [("7", True, True), ("7", False, False), ("none", True, False)],
)
def test_a_machine_without_a_restart_of_its_own_finds_the_run_of_its_job(
    train, tmp_path, monkeypatch, job, has_last, continues
):
    begin_job(monkeypatch, job)
    train("--trainer.max_epochs", 1)
    run = tmp_path / "tiny" / "version_0"
    (run / "metrics.json").unlink()  # as if a process had been killed
    if not has_last:
        (run / "checkpoints" / "last.ckpt").unlink()
    assert train("--trainer.max_epochs", 2)["epochs"] == 2
    assert (run / "metrics.json").exists() == continues
