"""Copies of the repository: scripts/rename.py, a project that a user has made of the
template, and a newer version of the library in the place of the older one."""

import importlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from pages import PACKAGE, REPO, commands, text_of

import lightbase
from lightbase.core.errors import UserError

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


def commit(folder: Path) -> None:
    call(folder, *GIT, "add", ".")
    call(folder, *GIT, "commit", "-q", "-m", "work")


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return copy_to(tmp_path / "user")


def test_mentions_change_and_nothing_else(copy: Path) -> None:
    texts = {"docs/mentions.md": (MENTIONS, NEW), "docs/others.py": (OTHERS, PACKAGE)}
    texts["logs/x.md"] = (MENTIONS, PACKAGE)
    for name, (text, _) in texts.items():
        (copy / name).write_text(text.replace("PKG", PACKAGE), newline="\r\n")
    library = (copy / "lightbase/tests/template/pages.py").read_bytes()
    output = call(copy, sys.executable, "scripts/rename.py", NEW)
    assert output.startswith(f"{PACKAGE} is {NEW} now: the folder, and ")
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


@pytest.mark.parametrize("name", ["2fast", "class", "tests", "json", PACKAGE, ""])
def test_a_bad_name_is_refused(name, monkeypatch):
    monkeypatch.syspath_prepend(str(REPO / "scripts"))
    with pytest.raises(UserError, match=f"^'{name}' cannot name a package"):
        importlib.import_module("rename").check_name(name)


@pytest.mark.slow
@pytest.mark.linux
def test_a_newer_library_takes_the_place_of_the_older_one(
    copy: Path, tmp_path: Path
) -> None:
    """In a project with another name, whose run then continues."""
    template = copy_to(tmp_path / "template")
    commit(template)
    call(copy, sys.executable, "scripts/rename.py", NEW)
    init = copy / "lightbase" / "__init__.py"
    new = init.read_text()
    init.write_text(new.replace(f'"{lightbase.__version__}"', '"0.2.9"'))
    gone = copy / "lightbase" / "tests" / "test_gone.py"
    gone.write_text("")
    commit(copy)
    train = "scripts/train.py --config configs/discs_mlp.yaml --trainer.accelerator cpu"
    train += " --trainer.limit_train_batches 2 --trainer.max_epochs"
    call(copy, sys.executable, *train.split(), "2")

    page, _, _ = text_of("docs/upgrade.md").partition("## From 0.3\n")
    typed = [command for command in commands(page) if command.startswith("git ")]
    assert len(typed) == 4
    for command in typed:
        call(copy, *GIT, *shlex.split(command.replace("URL", str(template)))[1:])
    assert init.read_text() == new
    assert not gone.exists()
    assert not call(copy, "git", "status", "--porcelain")
    resume = [*train.split(), "4", "--ckpt_path", "last"]
    assert "epochs" in call(copy, sys.executable, *resume)
    tests = "-m pytest -o addopts= -q tests lightbase/tests/template"
    pytest_options = [*tests.split(), "lightbase/tests/test_house.py", "-m", "not slow"]
    assert "skipped" in call(copy, sys.executable, *pytest_options)
