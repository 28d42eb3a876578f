import contextlib
import os
import pickle
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from example.classifier import Classifier
from paths import Train, script

from lightbase.core.errors import UserError
from lightbase.core.load import load_run, read_checkpoint
from lightbase.core.record import RunRecorder


@pytest.fixture
def last(trained: Callable[..., tuple[Path, Any]], tmp_path: Path) -> Path:
    """Of a run that the test may change."""
    shutil.copytree(
        trained("--trainer.max_epochs", 1)[0], tmp_path / "tiny" / "version_0"
    )
    return tmp_path / "tiny" / "version_0" / "checkpoints" / "last.ckpt"


@pytest.mark.parametrize("how", ["half", "tail", "empty", "garbage"])
def test_a_broken_checkpoint_is_refused(last: Path, how: str) -> None:
    content = last.read_bytes()
    half = content[: len(content) // 2]
    broken = {"half": half, "tail": content[:-10], "empty": b"", "garbage": b"?" * 5000}
    last.write_bytes(broken[how])
    with pytest.raises(UserError, match=last.name) as caught:
        read_checkpoint(last)
    assert len(str(caught.value).splitlines()) == 1


class Payload:
    """Pickles to a call that makes a file."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.target),)


@pytest.mark.parametrize(
    "save", [torch.save, lambda value, path: path.write_bytes(pickle.dumps(value))]
)
def test_a_checkpoint_that_would_run_code_is_refused_and_does_not_run_it(
    train, tmp_path, save, capsys
):
    proof, path = tmp_path / "proof", tmp_path / "unsafe.ckpt"
    save({"state_dict": {}, "config": Payload(proof)}, path)
    with pytest.raises(SystemExit) as caught:
        train("--ckpt_path", path)
    assert caught.value.code == 1
    error = capsys.readouterr().err
    assert str(path) in error
    assert len(error.splitlines()) <= 2
    assert not proof.exists()
    assert not (tmp_path / "tiny").exists()


def test_weights_without_a_run_are_no_checkpoint(tmp_path: Path) -> None:
    torch.save({"layers.1.weight": torch.zeros(3)}, tmp_path / "weights.pth")
    with pytest.raises(UserError, match="no checkpoint of a run"):
        read_checkpoint(tmp_path / "weights.pth")


def test_a_resume_with_fewer_epochs_than_are_trained_is_refused(train, last, capsys):
    with pytest.raises(SystemExit):
        train("--ckpt_path", last, "--trainer.max_epochs", 0)
    assert "has 1 epochs behind it" in capsys.readouterr().err


def test_weights_of_another_network_are_two_lines(last: Path) -> None:
    content = torch.load(last, weights_only=True)
    content["config"]["model"]["init_args"]["net"]["init_args"]["sizes"] = [192, 17, 4]
    torch.save(content, last)
    with pytest.raises(
        UserError, match=r"is of another model: size mismatch for net\.layers"
    ) as caught:
        load_run(last)
    assert (
        str(caught.value).splitlines()[1]
        == "it was trained with example.models.mlp.MLP"
    )


@contextlib.contextmanager
def no_file_over(size: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Stands for the end of the disk: files cannot grow beyond `size` bytes."""
    import resource  # Windows has none

    # Python would write cut .pyc files, and git an index, which the test is not about
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setenv("GIT_OPTIONAL_LOCKS", "0")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.linux
def test_a_full_disk_ends_the_run_in_two_lines_and_keeps_what_was_saved(
    train, last, capsys, monkeypatch
):
    before = last.read_bytes()
    with (
        no_file_over(len(before) // 2, monkeypatch),
        pytest.raises(SystemExit) as caught,
    ):
        train("--trainer.max_epochs", 3, "--ckpt_path", "last")
    assert caught.value.code == 1
    assert len(capsys.readouterr().err.splitlines()) <= 2
    assert last.read_bytes() == before
    assert not list(last.parent.glob(".*.part"))


@pytest.mark.parametrize(
    "size", [40, 1000, 3000], ids=["events", "config", "checkpoint"]
)
@pytest.mark.linux
def test_a_new_run_on_a_full_disk_leaves_none(
    train, trained, tmp_path, size, capsys, monkeypatch
):
    trained()  # so that nothing is imported for the first time below
    with no_file_over(size, monkeypatch), pytest.raises(SystemExit) as caught:
        train()
    assert caught.value.code == 1
    assert 1 <= len(capsys.readouterr().err.splitlines()) <= 2
    assert not (tmp_path / "tiny").exists()


@pytest.mark.parametrize("how", ["cut", "deleted"])
def test_a_best_checkpoint_that_is_no_longer_whole_is_not_tested(
    train, tmp_path, monkeypatch, capsys, how
):
    best = tmp_path / "tiny" / "version_0" / "checkpoints" / "best.ckpt"

    def damage(*_: Any) -> None:
        best.write_bytes(best.read_bytes()[:5000]) if how == "cut" else best.unlink()

    monkeypatch.setattr(RunRecorder, "on_fit_end", damage)
    with pytest.raises(SystemExit) as caught:
        train()
    assert caught.value.code == 1
    error = capsys.readouterr().err
    assert "best.ckpt" in error
    assert len(error.splitlines()) <= 2
    assert not (best.parents[1] / "metrics.json").exists()


class KeepsMore(Classifier):
    """Has a number of its own in its checkpoints, which the test needs."""

    temperature = 1.0

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["temperature"] = 3.0

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.temperature = checkpoint["temperature"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) / self.temperature


def test_what_a_model_keeps_in_its_checkpoint_is_there_again(
    train: Train, tmp_path: Path
) -> None:
    result = train("--model", "test_checkpoints.KeepsMore", "--trainer.max_epochs", 1)
    best = tmp_path / "tiny" / "version_0" / "checkpoints" / "best.ckpt"
    _, model, _ = load_run(best)
    assert model.temperature == 3
    again = script("evaluate").main(["--ckpt_path", str(best)])
    assert again["test/loss"] == pytest.approx(result["test/loss"], rel=1e-6)


FORGETFUL = """
from example.classifier import Classifier

KEY = "epoch"

class Forgetful(Classifier):
    def on_load_checkpoint(self, checkpoint):
        self.value = checkpoint[KEY]
"""


def test_an_error_in_the_users_code_keeps_its_traceback(train, tmp_path, monkeypatch):
    (tmp_path / "users_code.py").write_text(FORGETFUL)
    monkeypatch.syspath_prepend(tmp_path)
    flags = ("--model", "users_code.Forgetful", "--trainer.max_epochs")
    train(*flags, 1)
    monkeypatch.setattr("users_code.KEY", "temperature")
    with pytest.raises(KeyError, match="temperature"):
        train(*flags, 2, "--ckpt_path", "last")
