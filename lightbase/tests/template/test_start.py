"""The start of each script: in an environment that lacks something, and Ctrl-C while
packages are imported."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
from pages import REPO

INTERRUPTED = {
    "yaml": """
import os, signal
os.kill(os.getpid(), signal.SIGINT)
""",
    "torch": """
import os, signal
try:
    os.kill(os.getpid(), signal.SIGINT)
except BaseException:
    raise ImportError("torch failed to import")
""",
}


def start(*words: str | Path, path: str = "") -> tuple[int, str]:
    """Start Python with these arguments. Return the status and the text of stderr.

    path: The value of PYTHONPATH.
    """
    environment = os.environ | {"PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, *words], env=environment, stderr=subprocess.PIPE, text=True
    )
    return done.returncode, done.stderr


def test_an_empty_environment_ends_in_two_lines() -> None:
    status, error = start("-S", REPO / "scripts/train.py")  # without site-packages
    assert status == 1
    first, second = error.splitlines()
    assert first.startswith("error: No module named ")
    assert second.endswith('or type pip install -c constraints.txt -e ".[tools]"')


def test_an_old_python_reads_the_scripts() -> None:
    for file in (REPO / "scripts").glob("*.py"):
        ast.parse(file.read_text(), feature_version=(3, 9))


@pytest.mark.linux
@pytest.mark.parametrize(("name", "script"), [("yaml", "runs"), ("torch", "evaluate")])
def test_ctrl_c_ends_an_import_at_once(name: str, script: str, tmp_path: Path) -> None:
    (tmp_path / f"{name}.py").write_text(INTERRUPTED[name])
    (tmp_path / "x.ckpt").touch()
    words = [REPO / f"scripts/{script}.py"]
    if script == "evaluate":
        words += ["--ckpt_path", str(tmp_path / "x.ckpt")]
    assert start(*words, path=str(tmp_path)) == (130, "Stopped by Ctrl-C\n")
