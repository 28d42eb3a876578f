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
from pages import PACKAGE, REPO, commands, files, text_of

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
A PyTorch Lightning PKG template. Lines of the PKG. "a small PKG", sub-PKG/x
The PKG's contributors
import what the PKG needs, from PKG to PKG
    import PKG_of_others, PKGs
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
    """Return the content of each file by its path, without git's and compiled ones."""
    contents = {}
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and path.suffix != ".pyc" and not name.startswith(".git/"):
            contents[name] = path.read_bytes()
    return contents


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return copy_to(tmp_path / "user")


def test_mentions_change_and_nothing_else(copy: Path) -> None:
    pages = copy / "docs"
    expected = {
        "mentions.md": (MENTIONS, NEW),
        "others.md": (OTHERS, PACKAGE),
        "variable.py": (VARIABLE, PACKAGE),
    }
    for name, (text, _) in expected.items():
        (pages / name).write_text(text.replace("PKG", PACKAGE), newline="\r\n")
    for name in ("logs", "data"):
        (copy / name).mkdir(exist_ok=True)
        config = f"class_path: {PACKAGE}.models.mlp.MLP\n"
        (copy / name / "mentions.yaml").write_text(config)
    before = content(copy)
    output = call(copy, sys.executable, "scripts/rename.py", NEW)
    assert output.startswith(f"{PACKAGE} is {NEW} now: the folder, and ")
    for name, (text, package) in expected.items():
        lines = (pages / name).read_bytes().decode().split("\r\n")
        assert lines == text.replace("PKG", package).split("\n")
    after = content(copy)
    new_names = {re.sub(rf"^{PACKAGE}/", f"{NEW}/", name): name for name in before}
    assert new_names.keys() == after.keys()
    module = rf"(?<![\w./-]){PACKAGE}(\.(classifier|regressor|models|data)\b|/)"
    mention = re.compile(rf"{module}|import {PACKAGE}\b".encode())
    for name, old_name in new_names.items():
        if name.startswith(UNCHANGED):
            assert after[name] == before[old_name], name
        elif name != "docs/others.md":
            assert not mention.search(after[name]), name


@pytest.mark.parametrize(
    "name",
    ["2fast", "a-b", "_a", "class", "tests", "train", "json", "torch", PACKAGE, ""],
)
def test_a_bad_name_is_refused(name, monkeypatch):
    monkeypatch.syspath_prepend(str(REPO / "scripts"))
    with pytest.raises(UserError, match=f"^'{name}' cannot name a package"):
        importlib.import_module("rename").check_name(name)


def delete_cifar10(folder: Path) -> None:
    """Delete the data set, its networks and each YAML that names one of them."""
    modules = ["data.cifar10", "models.cnn", "models.whitened_cnn"]
    for module in modules:
        (folder / NEW / f"{module.replace('.', '/')}.py").unlink()
    for config in (folder / "configs").glob("*.yaml"):
        if any(f"{NEW}.{module}." in config.read_text() for module in modules):
            config.unlink()


def add_multilabel(folder: Path) -> str:
    """Take the files of docs/tasks/multilabel.md, with weights of the labels. Delete
    the page. Return a command that trains."""
    page = folder / "docs" / "tasks" / "multilabel.md"
    for name, text in files(page.read_text()).items():
        weights = "BCEWithLogitsLoss(pos_weight=1 + Tensor([0, 2, 2, 0]))"
        text = text.replace("BCEWithLogitsLoss()", weights)
        (folder / name).write_text(text)
    page.unlink()
    short = "--trainer.accelerator cpu --trainer.limit_train_batches 2"
    return f"scripts/train.py --config configs/multilabel.yaml {short}"


@pytest.mark.slow
@pytest.mark.linux
def test_a_newer_library_takes_the_place_of_the_older_one(
    copy: Path, tmp_path: Path
) -> None:
    """In a project with another name and task, and without CIFAR-10."""
    template = copy_to(tmp_path / "template")
    commit(template)
    call(copy, sys.executable, "scripts/rename.py", NEW)
    init = copy / "lightbase" / "__init__.py"
    new = init.read_text()
    init.write_text(new.replace(f'"{lightbase.__version__}"', '"0.2.9"'))
    gone = [copy / "lightbase/gone.py", copy / "lightbase/tests/test_gone.py"]
    for path in gone:
        path.write_text("")
    delete_cifar10(copy)
    train = add_multilabel(copy).split()
    commit(copy)
    call(copy, sys.executable, *train, "--trainer.max_epochs", "2")

    page = text_of("docs/upgrade.md")
    typed = [command for command in commands(page) if command.startswith("git ")]
    assert len(typed) == 4
    for command in typed:
        call(copy, *GIT, *shlex.split(command.replace("URL", str(template)))[1:])
    assert init.read_text() == new
    assert not any(path.exists() for path in gone)
    assert (copy / NEW / "multilabel_classifier.py").is_file()
    assert not call(copy, "git", "status", "--porcelain")
    resume = [*train, "--trainer.max_epochs", "4", "--ckpt_path", "last"]
    assert "epochs" in call(copy, sys.executable, *resume)
    # the package that is installed for these tests may have the old name
    (copy / "blocks").mkdir()
    block = f"import sys\nsys.modules[{PACKAGE!r}] = None\n"
    (copy / "blocks" / "block.py").write_text(block)
    pytest_options = ["-p", "block", "-o", "addopts=", "-m", "not slow", "-q"]
    tests = "tests lightbase/tests/template lightbase/tests/test_house.py"
    tests += " lightbase/tests/test_restart.py"
    printed = call(
        copy, sys.executable, "-m", "pytest", *pytest_options, *tests.split()
    )
    assert "skipped" in printed
