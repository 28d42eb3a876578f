"""scripts/rename.py in a copy of the repository: each mention changes, and nothing else."""

import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from pages import REPO

PACKAGE = "project.classifier".partition(".")[0]
NEW = f"my_{PACKAGE}"

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
A PyTorch Lightning PKG template. Lines of the PKG. The PKG's contributors; "a small PKG", sub-PKG/x, un-PKG.yaml
import what the PKG needs, from PKG to PKG
    import PKG_of_others, PKGs
[PKG]
[PKG.optional-dependencies]
[PKG.scripts]
dependencies = toml["PKG"]["dependencies"]
log = {"PKG": 1, 'PKG': 2}
PKG: demo
--logger.PKG demo --PKG.name demo PKG=demo
self.PKG.name, wandb.PKG.data, MyPKG.data, PKG_x.data, xPKG/data, "PKGs"
/home/me/PKG/data, https://PKG.org/x, https://github.com/me/PKG/issues, ~/x/PKG/data, $PKG/x, tests/PKG
"""  # noqa: E501
UNCHANGED = ("lightbase/", "tests/lightbase/", "logs/", "data/", ".venv/", "CHANGELOG.md")
VARIABLE = 'for PKG in PKGs:\n    print(PKG.name, PKG["data"])\n'


def copy_to(folder: Path) -> Path:
    """The files that git tracks or would add, and a user's own."""
    git = ["git", "ls-files", "-coz", "--exclude-standard"]
    output = subprocess.run(git, cwd=REPO, stdout=subprocess.PIPE, check=True).stdout
    for name in output.decode().split("\0")[:-1]:
        if (REPO / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPO / name, folder / name)
    texts = {"mentions.md": MENTIONS, "others.md": OTHERS, "variable.py": VARIABLE}
    for name, text in texts.items():
        (folder / "docs" / name).write_text(text.replace("PKG", PACKAGE), newline="\r\n")
    for name in ("logs", "data", ".venv"):
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "mentions.yaml").write_text(f"class_path: {PACKAGE}.models.mlp.MLP\n")
    return folder


def content(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_to(tmp_path_factory.mktemp("copy"))


@pytest.fixture(scope="module")
def renamed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = copy_to(tmp_path_factory.mktemp("renamed"))
    command = [sys.executable, str(folder / "scripts" / "rename.py"), NEW]
    env = os.environ | {"PYTHONPATH": str(folder)}
    output = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout
    assert output.startswith(f"{PACKAGE} is {NEW} now: the folder, and ")
    return folder


def test_mentions_change_and_nothing_else(copy: Path, renamed: Path) -> None:
    texts = {"mentions.md": (MENTIONS, NEW), "others.md": (OTHERS, PACKAGE)}
    for name, (text, package) in {**texts, "variable.py": (VARIABLE, PACKAGE)}.items():
        lines = (renamed / "docs" / name).read_bytes().decode().split("\r\n")
        assert lines == text.replace("PKG", package).split("\n")

    before, after = content(copy), content(renamed)
    new_names = {re.sub(rf"^{PACKAGE}/", f"{NEW}/", name): name for name in before}
    assert new_names.keys() == after.keys()
    changed = {name for name, old_name in new_names.items() if after[name] != before[old_name]}
    assert not [name for name in changed if name.startswith(UNCHANGED)]


def test_no_path_and_no_module_of_the_old_name_is_left(renamed: Path) -> None:
    module = rf"(?<![\w./-]){PACKAGE}(\.(classifier|regressor|models|data)\b|/)"
    for name, text in content(renamed).items():
        if not name.startswith((*UNCHANGED, "docs/others.md")):
            assert not re.search(rf"{module}|import {PACKAGE}\b".encode(), text), name


@pytest.mark.parametrize(
    "name", ["2fast", "a-b", "_a", "class", "tests", "train", "json", "torch", PACKAGE, ""]
)
def test_a_bad_name_changes_nothing(copy, name, monkeypatch, capsys):
    before = content(copy)
    monkeypatch.setattr(sys, "argv", ["rename.py", name])
    monkeypatch.syspath_prepend(str(copy / "scripts"))
    with pytest.raises(SystemExit) as caught:
        runpy.run_path(str(copy / "scripts" / "rename.py"), run_name="__main__")
    assert caught.value.code == 2
    out, err = capsys.readouterr()
    assert not out
    assert re.fullmatch(rf"error: '{name}' .*\n", err)
    assert content(copy) == before


@pytest.mark.slow
def test_training_under_the_new_name(renamed: Path, tmp_path: Path) -> None:
    """With the old name not importable."""
    start = tmp_path / "start.py"
    start.write_text(
        f"import runpy, sys\nsys.modules[{PACKAGE!r}] = None\n"
        "runpy.run_path('scripts/train.py', run_name='__main__')\n"
    )
    flags = "--trainer.fast_dev_run true --data.num_train 200 --data.num_test 50"
    command = [sys.executable, str(start), *flags.split(), "--trainer.accelerator", "cpu"]
    env = os.environ | {"PYTHONPATH": str(renamed)}
    subprocess.run(command, cwd=renamed, env=env, check=True)
