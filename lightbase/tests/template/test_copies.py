"""Copies of the repository: scripts/rename.py, a project that a user has made of the
template."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from pages import PACKAGE, REPO, text_of

NEW = f"my_{PACKAGE}"
GIT = ["git", "-c", "user.name=x", "-c", "user.email=x@example.org"]
UNCHANGED = ("lightbase/", "logs/", "CHANGELOG.md")
# PKG stands for the package's name
MENTIONS = r"""
import PKG
import PKG as package, os
    from PKG import models
    from PKG.models.mlp import MLP  # of the project
python -c "import PKG" && python -m PKG.models.mlp
class_path: PKG.models.mlp.MLP
net: {class_path: PKG.new.Net, "name": "PKG"}
[PKG.models.mlp.MLP, 'PKG.data.mnist.MNIST']
monkeypatch.setattr("PKG.models.mlp.MLP", match=r"PKG\.models")
f"{folder}/PKG/models"
see PKG/models/mlp.py, ./PKG/data, `PKG/`, or (../PKG/models/*.py).
include = ["PKG*"]
module = ["PKG.*", "PKG[dev]"]
if parts[0] == "PKG":
The package `PKG`: yours.
"""
OTHERS = r"""
A PyTorch Lightning PKG template. Lines of the PKG. "a small PKG", sub-PKG/x
The PKG's contributors
import what the PKG needs, from PKG to PKG
    import PKG_of_others, PKGs
for PKG in PKGs: print(PKG.name, PKG["data"])
[PKG]
[PKG.optional-dependencies]
dependencies = toml["PKG"]["dependencies"]
log = {"PKG": 1, 'PKG': 2}
PKG: demo
--logger.PKG demo --PKG.name demo PKG=demo
self.PKG.name, wandb.PKG.data, MyPKG.data, PKG_x.data, xPKG/data, "PKGs"
/home/me/PKG/data, https://PKG.org/x, https://github.com/me/PKG/issues
~/x/PKG/data, tests/PKG
"""


def call(folder: Path, *command: str) -> str:
    """Run a command in the copy. Return its output."""
    env = os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def copy_to(folder: Path) -> Path:
    """Copy the files that git tracks or would add into a new repository."""
    listed = call(REPO, "git", "ls-files", "-co", "--exclude-standard").splitlines()
    for name in listed:
        if (REPO / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPO / name, folder / name)
    call(folder, "git", "init", "-q", "-b", "main")
    return folder


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return copy_to(tmp_path / "user")


def test_mentions_change_and_nothing_else(copy: Path) -> None:
    texts = {"docs/mentions.md": (MENTIONS, NEW), "docs/others.py": (OTHERS, PACKAGE)}
    texts["logs/x.md"] = (MENTIONS, PACKAGE)
    for name, (text, _) in texts.items():
        (copy / name).write_text(text.replace("PKG", PACKAGE), newline="\r\n")
    library = (copy / "lightbase/tests/template/pages.py").read_bytes()
    call(copy, sys.executable, "scripts/rename.py", NEW)
    for name, (text, package) in texts.items():
        lines = (copy / name).read_bytes().decode().split("\r\n")
        assert lines == text.replace("PKG", package).split("\n")
        (copy / name).unlink()
    assert (copy / "lightbase/tests/template/pages.py").read_bytes() == library
    module = rf"(?<![\w./-]){PACKAGE}(\.(classifier|regressor|models|data)\b|/)"
    mention = re.compile(rf"{module}|import {PACKAGE}\b".encode())
    for path in copy.rglob("*.*"):
        name = path.relative_to(copy).as_posix()
        if path.is_file() and not name.startswith((".git/", *UNCHANGED)):
            assert not mention.search(path.read_bytes()), name


@pytest.mark.slow
def test_a_users_tests_pass_after_an_edit_of_the_step(copy: Path) -> None:
    """The edit that docs/extending.md shows, and the lines that it mentions. The
    pre-commit hook accepts it, too."""
    edit = re.findall(
        r"```python\n( +loss = .*?)```", text_of("docs/extending.md"), re.S
    )
    assert len(edit) == 1
    line = edit[0].splitlines(keepends=True)[0]
    file = copy / PACKAGE / "classifier.py"
    code = file.read_text()
    assert line in code
    more = '        self.log("train/anything", loss)\n'
    file.write_text(code.replace(line, edit[0] + more, 1))
    call(copy, sys.executable, "-m", "pytest", "-q", "-n0", "tests")
    pytest.importorskip("ruff")
    for check in ("check", "format --check"):
        call(copy, sys.executable, "-m", "ruff", *check.split(), PACKAGE)
