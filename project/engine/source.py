"""Which code a run had: the commit, and what is not in it."""

import functools
import os
import subprocess
import tempfile
from pathlib import Path

from project.engine.older import PACKAGE

CODE = (PACKAGE, "configs", "scripts", ":(glob)*.py", "pyproject.toml")
LARGEST = 2**18  # bytes of an untracked file


@functools.cache  # what a process has imported stays
def source(root: Path = Path(__file__).parents[2]) -> tuple[str, str]:
    """The commit, "none" without git or a repository, and a patch from it to the code of today, untracked files
    included: `git apply` of it in a checkout of the commit gives the code of the run."""

    def git(*args: str, index: Path | None = None) -> str:
        command = ["git", "-C", str(root), "-c", "core.quotepath=off", *args]
        own = {"GIT_INDEX_FILE": str(index)} if index else {}
        return subprocess.run(command, capture_output=True, check=True, env=os.environ | own, errors="replace").stdout

    try:
        commit = git("rev-parse", "HEAD").strip()
    except (OSError, subprocess.CalledProcessError):  # no git, or not a repository
        return "none", ""
    untracked = [file for file in git("ls-files", "-zo", "--exclude-standard", "--", *CODE).split("\0") if file]
    large = [file for file in untracked if (root / file).stat().st_size > LARGEST]
    note = "".join(f"untracked and over {LARGEST:,} bytes, not here: {file}\n" for file in large)
    if untracked == large:
        return commit, note + git("diff", "HEAD", "--", *CODE)
    with tempfile.TemporaryDirectory() as folder:  # with an index of its own: that of the user stays as it is
        index = Path(folder, "index")
        git("read-tree", "HEAD", index=index)
        git("add", "--intent-to-add", "--", *(file for file in untracked if file not in large), index=index)
        return commit, note + git("diff", "HEAD", "--", *CODE, index=index)
