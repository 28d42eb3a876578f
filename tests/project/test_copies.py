"""scripts/rename.py in copies of the repository; then a network and a data set are
deleted, and a newer version of the library takes the place of the older one."""

import importlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from pages import PACKAGE, REPO, commands

import lightbase
from lightbase.core.errors import UserError

NEW = f"my_{PACKAGE}"
GIT = ["git", "-c", "user.name=x", "-c", "user.email=x@example.org"]
UNCHANGED = ("lightbase/", "logs/", "data/", "CHANGELOG.md")
# PKG stands for the package's name
MENTIONS = r"""
import PKG
import PKG as package, os
    from PKG import models
    from PKG.models.mlp import MLP  # of the project
python -c "import PKG" && python -m PKG.models.mlp
class_path: PKG.models.mlp.MLP
net: {class_path: PKG.models.mlp.MLP, "name": "PKG"}
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
A PyTorch Lightning PKG template. Lines of the PKG. The PKG's contributors; "a small PKG", sub-PKG/x
import what the PKG needs, from PKG to PKG
    import PKG_of_others, PKGs
[PKG]
[PKG.optional-dependencies]
dependencies = toml["PKG"]["dependencies"]
log = {"PKG": 1, 'PKG': 2}
PKG: demo
--logger.PKG demo --PKG.name demo PKG=demo
self.PKG.name, wandb.PKG.data, MyPKG.data, PKG_x.data, xPKG/data, "PKGs"
/home/me/PKG/data, https://PKG.org/x, https://github.com/me/PKG/issues, ~/x/PKG/data, tests/PKG
"""
VARIABLE = 'for PKG in PKGs:\n    print(PKG.name, PKG["data"])\n'


def call(folder: Path, *command: str) -> str:
    """Run a command in the copy; its output."""
    paths = [str(folder), str(folder / "blocks")]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def copy_to(folder: Path) -> Path:
    """Copy the files that git tracks or would add, into a repository."""
    names = call(REPO, "git", "ls-files", "-coz", "--exclude-standard").split("\0")[:-1]
    for name in names:
        if (REPO / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPO / name, folder / name)
    call(folder, "git", "init", "-q", "-b", "main")
    return folder


def commit(folder: Path) -> None:
    for command in ("add .", "commit -q -m work"):
        call(folder, *GIT, *command.split())


def content(folder: Path) -> dict[str, bytes]:
    paths = [
        path for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc"
    ]
    names = {path: path.relative_to(folder).as_posix() for path in paths}
    return {
        name: path.read_bytes()
        for path, name in names.items()
        if not name.startswith(".git/")
    }


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return copy_to(tmp_path / "user")


def test_mentions_change_and_nothing_else(copy: Path) -> None:
    texts = {"mentions.md": (MENTIONS, NEW), "others.md": (OTHERS, PACKAGE)}
    texts |= {"variable.py": (VARIABLE, PACKAGE)}
    for name, (text, _) in texts.items():
        (copy / "docs" / name).write_text(text.replace("PKG", PACKAGE), newline="\r\n")
    for name in ("logs", "data"):
        (copy / name).mkdir(exist_ok=True)
        (copy / name / "mentions.yaml").write_text(
            f"class_path: {PACKAGE}.models.mlp.MLP\n"
        )
    before = content(copy)
    output = call(copy, sys.executable, "scripts/rename.py", NEW)
    assert output.startswith(f"{PACKAGE} is {NEW} now: the folder, and ")
    for name, (text, package) in texts.items():
        lines = (copy / "docs" / name).read_bytes().decode().split("\r\n")
        assert lines == text.replace("PKG", package).split("\n")
    after = content(copy)
    new_names = {re.sub(rf"^{PACKAGE}/", f"{NEW}/", name): name for name in before}
    assert new_names.keys() == after.keys()
    changed = {
        name for name, old_name in new_names.items() if after[name] != before[old_name]
    }
    assert not [name for name in changed if name.startswith(UNCHANGED)]
    module = rf"(?<![\w./-]){PACKAGE}(\.(classifier|regressor|models|data)\b|/)"
    for name, text in after.items():
        if not name.startswith((*UNCHANGED, "docs/others.md")):
            assert not re.search(rf"{module}|import {PACKAGE}\b".encode(), text), name


@pytest.mark.parametrize(
    "name",
    ["2fast", "a-b", "_a", "class", "tests", "train", "json", "torch", PACKAGE, ""],
)
def test_a_bad_name_is_refused(name, monkeypatch):
    monkeypatch.syspath_prepend(str(REPO / "scripts"))
    with pytest.raises(UserError, match=f"^'{name}' (cannot name a package|is taken)"):
        importlib.import_module("rename").check_name(name)


@pytest.mark.slow
@pytest.mark.linux
def test_a_newer_library_takes_the_place_of_the_older_one(
    copy: Path, tmp_path: Path
) -> None:
    """In a project with its own name, without CIFAR-10 and its network."""
    template = copy_to(tmp_path / "template")
    commit(template)
    call(copy, sys.executable, "scripts/rename.py", NEW)
    init = copy / "lightbase" / "__init__.py"
    new = init.read_text()
    init.write_text(new.replace(f'"{lightbase.__version__}"', '"0.2.9"'))
    gone = [
        copy / "lightbase" / "gone.py",
        copy / "lightbase" / "tests" / "test_gone.py",
    ]
    for path in gone:
        path.write_text("")
    for module in ("data.cifar10", "models.cnn"):
        (copy / NEW / f"{module.replace('.', '/')}.py").unlink(missing_ok=True)
        for config in (copy / "configs").glob("*.yaml"):
            if f"{NEW}.{module}." in config.read_text():
                config.unlink()
    mine = copy / NEW / "models" / "mine.py"
    mine.write_text("from torch.nn import Linear\n\n\nclass Mine(Linear):\n    pass\n")
    commit(copy)
    flags = f"--model {NEW}.classifier.Classifier --data {NEW}.data.features.Features --name mine"
    flags += f" --model.net {NEW}.models.mine.Mine --model.net.in_features 10"
    flags += (
        " --model.net.out_features 2 --trainer.accelerator cpu --trainer.max_epochs"
    )
    train = [sys.executable, "scripts/train.py", *flags.split()]
    call(copy, *train, "2")

    page = (REPO / "docs" / "upgrade.md").read_text()
    typed = [command for command in commands(page) if command.startswith("git ")]
    assert len(typed) == 4
    for command in typed:
        call(copy, *GIT, *shlex.split(command.replace("URL", str(template)))[1:])
    assert init.read_text() == new
    assert not any(path.exists() for path in gone)
    assert mine.exists()
    assert not call(copy, "git", "status", "--porcelain")
    assert "epochs" in call(copy, *train, "4", "--ckpt_path", "last")
    # the package that is installed for these tests may have the old name
    (copy / "blocks").mkdir()
    (copy / "blocks" / "block.py").write_text(
        f"import sys\nsys.modules[{PACKAGE!r}] = None\n"
    )
    pytest_options = ["-p", "block", "-o", "addopts=", "-m", "not slow", "-q"]
    names = ("test_house.py", "test_config.py", "test_system.py", "test_restart.py")
    tests = ["tests/project", *(f"lightbase/tests/{name}" for name in names)]
    call(copy, sys.executable, "-m", "pytest", *pytest_options, *tests)
