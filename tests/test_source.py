"""The code of a run: commit, changes, and files that git does not know yet."""

import subprocess
from pathlib import Path

import pytest

from project.engine.source import LARGEST, source


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    root = tmp_path / "repository"
    (root / "project").mkdir(parents=True)
    (root / "project" / "old.py").write_text("x = 1\n")
    (root / ".gitignore").write_text("*.npz\n")
    git(root, "init", "-q")
    git(root, "add", "-A")
    git(root, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "first")
    return root


def git(root: Path, *args: str) -> str:
    return subprocess.run(["git", "-C", str(root), *args], check=True, capture_output=True, text=True).stdout


def test_a_clean_checkout_has_no_patch(repository: Path) -> None:
    assert source(repository) == (git(repository, "rev-parse", "HEAD").strip(), "")


def test_the_patch_gives_the_code_back_with_files_that_git_does_not_know(repository: Path, tmp_path: Path) -> None:
    code = {"project/old.py": "x = 2\n", "project/data/new über.py": "y = 3\n", "mine.py": "z = 4\n"}
    for name, text in code.items():
        (repository / name).parent.mkdir(exist_ok=True)
        (repository / name).write_text(text)
    (repository / "project" / "weights.npz").write_text("ignored")
    (repository / "project" / "large.txt").write_text("x" * (LARGEST + 1))
    (repository / "notes.txt").write_text("no code")
    before = git(repository, "status", "--porcelain")
    commit, patch = source(repository)
    assert git(repository, "status", "--porcelain") == before
    assert patch.splitlines()[0].endswith("not here: project/large.txt")
    (tmp_path / "code.diff").write_text(patch)
    copy = tmp_path / "copy"
    git(tmp_path, "clone", "-q", str(repository), str(copy))
    git(copy, "checkout", "-q", commit)
    git(copy, "apply", str(tmp_path / "code.diff"))
    assert {name: (copy / name).read_text() for name in code} == code
    assert not (copy / "notes.txt").exists()


def test_without_a_repository_there_is_no_commit(tmp_path: Path) -> None:
    assert source(tmp_path) == ("none", "")
