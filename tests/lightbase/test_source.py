"""The code of a run: the commit, a patch since then, and the names of untracked files."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightbase.folder import PROJECT
from lightbase.run.record import source


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "repository"
    root.mkdir()
    (root / "old.py").write_text("x = 1\n")
    git(root, "init", "-q")
    git(root, "add", "-A")
    git(root, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "first")
    monkeypatch.setattr(PROJECT, "root", root)
    source.cache_clear()
    return root


def git(root: Path, *args: str) -> str:
    return subprocess.run(
        ["git", "-C", str(root), *args], check=True, capture_output=True, text=True
    ).stdout


def test_the_patch_gives_the_code_back_and_new_files_are_named(repository, tmp_path):
    commit = git(repository, "rev-parse", "HEAD").strip()
    assert source() == (commit, "")
    source.cache_clear()
    (repository / "old.py").write_text("x = 2\n")
    (repository / "new.py").write_text("y = 3\n")
    before = git(repository, "status", "--porcelain")
    text, patch = source()
    assert text == commit
    assert patch.splitlines()[0] == "untracked, not here: new.py"
    assert git(repository, "status", "--porcelain") == before
    (tmp_path / "code.diff").write_text(patch)
    copy = tmp_path / "copy"
    git(tmp_path, "clone", "-q", str(repository), str(copy))
    git(copy, "apply", str(tmp_path / "code.diff"))
    assert (copy / "old.py").read_text() == "x = 2\n"


@pytest.fixture
def fake_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Puts a shell script in the place of git."""

    def fake(program: str) -> None:
        (tmp_path / "git").write_text(f"#!/bin/sh\n{program}\n")
        (tmp_path / "git").chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)

    return fake


@pytest.mark.linux
@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("echo 'fatal: dubious ownership' >&2; exit 128", "fatal: dubious ownership"),
        ("exec nothing", ""),
        ("exec sleep 60", "Command '['git'"),
    ],
)
@pytest.mark.usefixtures("repository")
def test_a_git_that_fails_or_hangs(fake_git: Any, program: str, reason: str) -> None:
    fake_git(program)
    text, patch = source()
    assert text.startswith(f"not recorded ({reason}"), text
    assert patch == ""


@pytest.mark.linux
def test_a_training_writes_down_what_git_did_not_tell(train, tmp_path, fake_git):
    fake_git("exit 3")
    source.cache_clear()
    train("--trainer.max_steps", 1)
    source.cache_clear()
    text = (tmp_path / "tiny" / "version_0" / "environment.txt").read_text()
    assert "git commit: not recorded (git ended with 3)\n" in text
