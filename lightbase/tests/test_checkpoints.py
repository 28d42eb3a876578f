"""Checkpoints that do not fit, a disk that is full, and what a model keeps in its
checkpoint. Damaged and forged files: faults/test_hostile_configs.py."""

import contextlib
import json
import random
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from example.classifier import Classifier
from lightning import Callback
from paths import Trained, fails, script
from written import checkpoint_file, equal

from lightbase.config.errors import UserError
from lightbase.run.state import random_state, restore_random_state
from lightbase.setup.load import load_run


@pytest.fixture
def last(trained: Trained, tmp_path: Path) -> Path:
    """Of a run that the test may change."""
    folder = tmp_path / "tiny" / "version_0"
    shutil.copytree(trained("--trainer.max_epochs", 1)[0], folder)
    return folder / "checkpoints" / "last.ckpt"


def test_a_resume_with_fewer_epochs_than_are_trained_is_refused(train, last, capsys):
    error = fails(
        capsys, 2, lambda: train("--ckpt_path", last, "--trainer.max_epochs", 0)
    )
    assert "has 1 epochs behind it" in error


def test_a_state_that_does_not_fit_the_code_has_a_way_out(train, last, capsys) -> None:
    """The code has another number of optimizers, its layers are in another order, or
    there is one less. A fused step would read past the end of smaller moments."""
    content = torch.load(last, weights_only=True)
    (optimizer,) = content["optimizer_states"]
    state = optimizer["state"]
    swapped = state | {0: state[1], 1: state[0]}
    (group,) = optimizer["param_groups"]
    fewer = group | {"params": group["params"][1:]}
    for states, text in (
        ([], "there is another number of optimizers"),
        ([optimizer | {"state": swapped}], "exp_avg of the optimizer has another"),
        ([optimizer | {"state": {}, "param_groups": [fewer]}], "loaded state dict"),
    ):
        torch.save(content | {"optimizer_states": states}, last)
        resume = lambda: train("--ckpt_path last --trainer.max_epochs 2")  # noqa: E731
        error = fails(capsys, 1, resume)
        assert text in error
        assert "--model.weights" in error


class FailsLater(Callback):
    """Fails in the first step of a resumed training."""

    def on_train_batch_start(self, trainer, *_):
        if trainer.ckpt_path:
            raise RuntimeError("of the training")


def test_an_error_after_the_state_is_restored_is_not_about_it(train):
    flags = "--trainer.callbacks test_checkpoints.FailsLater --trainer.max_epochs"
    train(flags, 1)
    with pytest.raises(RuntimeError, match="of the training") as caught:
        train(flags, 2, "--ckpt_path last")
    assert not getattr(caught.value, "__notes__", [])


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
    with no_file_over(len(before) // 2, monkeypatch):
        fails(
            capsys, 1, lambda: train("--trainer.max_epochs", 3, "--ckpt_path", "last")
        )
    assert last.read_bytes() == before
    assert not list(last.parent.glob(".*.part"))


@pytest.mark.linux
def test_a_new_run_on_a_full_disk_leaves_none_before_its_first_step(
    train, trained, tmp_path, capsys, monkeypatch
):
    trained()  # so that nothing is imported for the first time below
    with no_file_over(40, monkeypatch):  # of the events
        fails(capsys, 1, train)
    assert not (tmp_path / "tiny").exists()
    with no_file_over(3000, monkeypatch):  # of the checkpoint
        fails(capsys, 1, train)
    folder = tmp_path / "tiny" / "version_0"
    progress = json.loads((folder / "progress.json").read_text())
    assert ".ckpt cannot be written" in progress["failed"]
    assert "make room" in (folder / "log.txt").read_text()
    assert not [*folder.rglob("*.ckpt")]


def test_a_damaged_checkpoint_gives_the_same_result_or_is_refused(last):
    """Bytes are changed anywhere, and in the directory behind the last record."""
    content = last.read_bytes()
    expected = load_run(last)[1].state_dict()
    draw = random.Random(0)
    errors = []
    for start in (0, content.index(b"PK\1\2")) * 20:
        damaged = bytearray(content)
        damaged[draw.randrange(start, len(content))] ^= draw.randrange(1, 256)
        last.write_bytes(damaged)
        try:
            assert equal(load_run(last)[1].state_dict(), expected)
        except UserError as error:
            errors.append(str(error))
    assert len(errors) > 20
    assert all("last.ckpt is damaged or" in error for error in errors)


def test_what_a_model_keeps_is_there_again_and_its_errors_have_tracebacks(
    train, tmp_path, monkeypatch
):
    flags = ("--model", "test_checkpoints.KeepsMore", "--trainer.max_epochs")
    result = train(*flags, 1)
    best = checkpoint_file(tmp_path / "tiny" / "version_0")
    again = script("evaluate").main(["--ckpt_path", str(best)])
    assert again["test/loss"] == pytest.approx(result["test/loss"], rel=1e-6)
    monkeypatch.setattr(KeepsMore, "key", "forgotten")
    with pytest.raises(KeyError, match="forgotten"):
        train(*flags, 2, "--ckpt_path", "last")


def test_the_random_numbers_of_an_apple_gpu_continue(monkeypatch) -> None:
    restored: list[int] = []
    monkeypatch.setattr(torch.mps, "get_rng_state", lambda: torch.tensor(5))
    monkeypatch.setattr(torch.mps, "set_rng_state", restored.append)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    state = random_state([])
    restore_random_state(state, [])
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    restore_random_state(state, [])  # on another computer
    assert restored == [5]


class KeepsMore(Classifier):
    temperature = 1.0
    key = "temperature"

    def on_save_checkpoint(self, checkpoint):
        checkpoint["temperature"] = 3.0

    def on_load_checkpoint(self, checkpoint):
        self.temperature = checkpoint[self.key]

    def forward(self, x):
        return super().forward(x) / self.temperature
