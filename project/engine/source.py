"""Which code a run had: the commit, and what is not in it."""

import contextlib
import functools
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from project.base.errors import first_line
from project.engine.older import PACKAGE

CODE = (PACKAGE, "configs", "scripts", ":(glob)*.py", "pyproject.toml")
LARGEST = 2**18  # bytes of an untracked file
SECONDS = 2  # for all git commands together, because the training waits for them


@functools.cache  # what a process has imported stays
def source(root: Path = Path(__file__).parents[2]) -> tuple[str, str]:
    """The commit, and a patch from it to the code of today, untracked files included: `git apply`
    of the patch in a checkout of the commit gives the code of the run.

    Where git fails, the first text says what was not recorded and why.
    """
    commit, end = "", time.monotonic() + SECONDS
    try:
        # a new index: the user's index does not change, and may be damaged
        with tempfile.TemporaryDirectory() as folder:
            git = functools.partial(run_git, root, Path(folder, "index"), end)
            commit = git("rev-parse", "HEAD").strip()
            if not commit:
                raise ChildProcessError("git rev-parse: printed nothing")
            git("read-tree", "HEAD")
            untracked = git("ls-files", "-zo", "--exclude-standard", "--", *CODE).split("\0")[:-1]
            large = [file for file in untracked if (root / file).lstat().st_size > LARGEST]
            git("add", "--intent-to-add", "--", *(file for file in untracked if file not in large))
            patch = git("diff", "HEAD", "--", *CODE)
    except subprocess.TimeoutExpired:
        reason = f"git takes longer than {SECONDS} s"
    except OSError as error:
        reason = first_line(error)
    else:
        why = f"untracked and over {LARGEST:,} bytes"
        return commit, "".join(f"{why}, not here: {file}\n" for file in large) + patch
    return f"{commit}{', changes ' * bool(commit)}not recorded ({reason})", ""


def run_git(root: Path, index: Path, end: float, *args: str) -> str:
    """Return what a git command prints. Raises OSError if the command fails, and TimeoutExpired if
    it still runs at `end`, a time of time.monotonic; the command is ended then."""
    with subprocess.Popen(
        ["git", "-C", str(root), "-c", "core.quotepath=off", *args],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"GIT_INDEX_FILE": str(index)},
        errors="replace",
        start_new_session=True,  # a terminal's Ctrl-C is for the run alone
    ) as process:
        try:
            output, message = process.communicate(timeout=end - time.monotonic())
        except BaseException:
            if sys.platform == "win32":
                process.kill()
            else:
                with contextlib.suppress(ProcessLookupError):  # it has just ended
                    os.killpg(process.pid, signal.SIGKILL)  # with its children
            raise
    if process.returncode:
        reason = message.strip() or f"status {process.returncode}"
        raise ChildProcessError(f"git {args[0]}: {reason}")
    return output
