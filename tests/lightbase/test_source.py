"""The code of a run: commit, changes, and files that git does not know yet."""

import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightbase.run.record import LARGEST, source

GIT = shutil.which("git")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    root = tmp_path / "repository"
    (root / "example").mkdir(parents=True)
    (root / "example" / "old.py").write_text("x = 1\n")
    (root / ".gitignore").write_text("*.npz\n")
    git(root, "init", "-q")
    git(root, "add", "-A")
    git(root, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "first")
    return root


def git(root: Path, *args: str) -> str:
    return subprocess.run(
        ["git", "-C", str(root), *args], check=True, capture_output=True, text=True
    ).stdout


def test_a_clean_checkout_has_no_patch(repository: Path) -> None:
    assert source(repository) == (git(repository, "rev-parse", "HEAD").strip(), "")


def test_the_patch_gives_the_code_back_with_files_that_git_does_not_know(repository, tmp_path):
    code = {"example/old.py": "x = 2\n", "example/data/new über.py": "y = 3\n"}
    for name, text in code.items():
        (repository / name).parent.mkdir(exist_ok=True)
        (repository / name).write_text(text)
    (repository / "example" / "weights.npz").write_text("ignored")
    (repository / "example" / "large.txt").write_text("x" * (LARGEST + 1))
    (repository / "notes.txt").write_text("no code")
    before = git(repository, "status", "--porcelain")
    commit, patch = source(repository)
    assert git(repository, "status", "--porcelain") == before
    assert patch.splitlines()[0].endswith("not here: example/large.txt")
    (tmp_path / "code.diff").write_text(patch)
    copy = tmp_path / "copy"
    git(tmp_path, "clone", "-q", str(repository), str(copy))
    git(copy, "checkout", "-q", commit)
    git(copy, "apply", str(tmp_path / "code.diff"))
    assert {name: (copy / name).read_text() for name in code} == code
    assert not (copy / "notes.txt").exists()


def test_without_a_repository_or_a_commit_nothing_is_recorded(tmp_path: Path) -> None:
    for _ in range(2):
        text, patch = source(tmp_path)
        assert text.startswith("not recorded (git rev-parse: fatal: "), text
        assert patch == ""
        git(tmp_path, "init", "-q")
        source.cache_clear()


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
        ("echo 'fatal: dubious ownership' >&2; exit 128", "git rev-parse: fatal: dubious"),
        ("exec nothing", "git rev-parse: "),
    ],
)
def test_a_git_that_fails(repository: Path, fake_git: Any, program: str, reason: str) -> None:
    fake_git(program)
    text, patch = source(repository)
    assert text.startswith(f"not recorded ({reason}"), text
    assert patch == ""


@pytest.mark.linux
def test_a_git_that_hangs_is_ended(repository, fake_git, monkeypatch):
    monkeypatch.setattr("lightbase.run.record.SECONDS", 1)
    commit = git(repository, "rev-parse", "HEAD").strip()
    fake_git(f'case "$*" in *diff*) exec sleep 60; esac\nexec {GIT} "$@"')
    start = time.monotonic()
    assert source(repository) == (f"{commit}, changes not recorded (git takes longer than 1 s)", "")
    assert time.monotonic() - start < 10
