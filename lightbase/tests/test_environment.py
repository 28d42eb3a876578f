"""Limits and faults of the machine: closed output, few files, a folder that goes."""

import errno
import os
import resource
import subprocess
import sys
from unittest.mock import Mock

import pytest
from filelock import FileLock
from paths import HERE, TINY, fails
from ranks import on_ranks

from lightbase.commands.train import main


@pytest.mark.slow
@pytest.mark.linux
def test_closed_output(tmp_path):
    command = [sys.executable, str(HERE / "scripts" / "train.py"), "--config", TINY]
    command += ["--trainer.default_root_dir", str(tmp_path)]
    options = {"stderr": subprocess.PIPE, "preexec_fn": lambda: os.close(1)}
    result = subprocess.run(command, text=True, timeout=200, **options)
    assert (result.returncode, result.stderr) == (0, "")
    assert (tmp_path / "tiny" / "version_0" / "metrics.json").is_file()


def train_with_few_files(folder):
    resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
    place = ["--config", TINY, "--trainer.default_root_dir", folder]
    main([*place, "--data.num_workers=4"])


@pytest.mark.linux
def test_too_few_files_for_the_workers(tmp_path):
    function = "test_environment.train_with_few_files"
    result = on_ranks(tmp_path, 1, function, tmp_path)
    assert result.statuses == [1]
    # torch's iterator may add a traceback of its own when it is deleted
    problem, way_out = result.outputs[0].partition("error: ")[2].splitlines()[:2]
    assert "Too many open files" in problem
    assert "--data.num_workers, such as 0" in way_out


def test_a_file_system_without_locks(train, monkeypatch, capsys):
    no_locks = OSError(errno.ENOLCK, "No locks available")
    monkeypatch.setattr(FileLock, "acquire", Mock(side_effect=no_locks))
    problem, way_out = fails(capsys, 1, train).splitlines()
    assert problem.endswith("No locks available")
    assert way_out == "give another one"
