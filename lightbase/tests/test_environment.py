"""Limits and faults of the machine: closed output, few files, a folder that goes."""

import errno
import os
import resource
import shutil
import subprocess
import sys
from typing import Any

import pytest
from filelock import FileLock
from lightning import Callback
from paths import HERE, TINY, Train

COMMAND = [sys.executable, str(HERE / "scripts" / "train.py"), "--config", TINY]


def run(*args: object, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *map(str, args)], text=True, timeout=200, check=False, **options
    )


@pytest.mark.slow
@pytest.mark.linux
def test_closed_output(tmp_path):
    place = ("--trainer.default_root_dir", tmp_path)
    result = run(*place, preexec_fn=lambda: os.close(1), stderr=subprocess.PIPE)
    assert (result.returncode, result.stderr) == (0, "")
    assert (tmp_path / "tiny" / "version_0" / "metrics.json").is_file()


@pytest.mark.slow
@pytest.mark.linux
def test_too_few_files_for_the_workers(tmp_path):
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))

    place = ("--trainer.default_root_dir", tmp_path)
    result = run(
        *(*place, "--data.num_workers", 4), preexec_fn=limit, stderr=subprocess.PIPE
    )
    assert result.returncode == 1
    # torch's iterator may add a traceback of its own when it is deleted
    _, found, text = result.stderr.partition("error: ")
    assert found, result.stderr
    problem, way_out = text.splitlines()[:2]
    assert "Too many open files" in problem
    assert "--data.num_workers, such as 0" in way_out


def test_a_file_system_without_locks(train: Train, monkeypatch, capsys):
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(FileLock, "acquire", refuse)
    with pytest.raises(SystemExit):
        train()
    problem, way_out = capsys.readouterr().err.splitlines()
    assert problem.endswith("is on a file system that refuses locks")
    assert way_out == "give another one"


class RemoveFolder(Callback):
    """Removes the folder of the run, as a user might, after the first epoch."""

    def on_train_epoch_end(self, trainer: Any, *_: Any) -> None:
        # TensorBoard's thread may write a file again while the folder is removed
        shutil.rmtree(trainer.logger.log_dir, ignore_errors=True)


def test_a_folder_that_is_removed_ends_the_run(train: Train, capsys):
    with pytest.raises(SystemExit):
        train("--trainer.callbacks", "test_environment.RemoveFolder")
    error = capsys.readouterr().err.splitlines()
    assert "it was removed while the run trained" in error[0]
    assert len(error) == 2
