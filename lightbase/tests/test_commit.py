"""The commit of the user's repository, in environment.txt."""

import subprocess

from lightbase.config.paths import PROJECT
from lightbase.watch.environment import git_commit


def test_the_commit_and_whether_the_code_has_changed_since(tmp_path, monkeypatch):
    def git(*args: str) -> str:
        author = ["-c", "user.name=a", "-c", "user.email=a@b"]
        return subprocess.check_output(["git", "-C", tmp_path, *author, *args])

    monkeypatch.setattr(PROJECT, "root", tmp_path)
    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", "first")
    commit = git("rev-parse", "HEAD").decode().strip()
    assert git_commit() == commit
    (tmp_path / "new.py").write_text("y = 3\n")
    assert git_commit() == f"{commit}, with uncommitted changes"
