"""Limits and faults of the machine: closed output, few files, a folder that goes."""

import errno
import os
import resource
import subprocess
import sys
from functools import partial
from unittest.mock import Mock

import pytest
from filelock import FileLock
from paths import HERE, TINY, fails


def run(root, *flags, **options):
    command = [sys.executable, str(HERE / "scripts" / "train.py"), "--config", TINY]
    command += ["--trainer.default_root_dir", str(root), *flags]
    return subprocess.run(
        command, text=True, timeout=200, check=False, stderr=subprocess.PIPE, **options
    )


@pytest.mark.slow
@pytest.mark.linux
def test_closed_output(tmp_path):
    result = run(tmp_path, preexec_fn=lambda: os.close(1))
    assert (result.returncode, result.stderr) == (0, "")
    assert (tmp_path / "tiny" / "version_0" / "metrics.json").is_file()


@pytest.mark.slow
@pytest.mark.linux
def test_too_few_files_for_the_workers(tmp_path):
    limit = partial(resource.setrlimit, resource.RLIMIT_NOFILE, (40, 40))
    result = run(tmp_path, "--data.num_workers=4", preexec_fn=limit)
    assert result.returncode == 1
    # torch's iterator may add a traceback of its own when it is deleted
    problem, way_out = result.stderr.partition("error: ")[2].splitlines()[:2]
    assert "Too many open files" in problem
    assert "--data.num_workers, such as 0" in way_out


def test_a_file_system_without_locks(train, monkeypatch, capsys):
    no_locks = OSError(errno.ENOLCK, "No locks available")
    monkeypatch.setattr(FileLock, "acquire", Mock(side_effect=no_locks))
    problem, way_out = fails(capsys, 1, train).splitlines()
    assert problem.endswith("No locks available")
    assert way_out == "give another one"
