"""scripts/rename.py in a copy of the repository: the package gets another name, in every mention
and nowhere else."""

import ast
import os
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import programs
import pytest
import yaml
from pages import REPO

PACKAGE = "project.classifier".partition(".")[0]
NEW = f"my_{PACKAGE}"

# PKG stands for the package's name
MENTIONS = r"""
import PKG
import PKG as package, os
import os, PKG, PKG.data
    from PKG import models
    from PKG.models.mlp import MLP  # of the project
python -c "import PKG" && python -m PKG.models.mlp && pytest --cov=PKG && mypy PKG scripts
class_path: PKG.models.mlp.MLP
net: {class_path: PKG.models.mlp.MLP, "name": "PKG"}
[PKG.models.mlp.MLP, 'PKG.data.mnist.MNIST']
monkeypatch.setattr("PKG.models.mlp.MLP", match=r"PKG\.models")
see PKG/models/mlp.py, ./PKG/data, PKG\models\mlp.py, `PKG/`, or (../PKG/models/*.py).
include = ["PKG*"]
module = ["PKG.*", "PKG[dev]"]
if parts[0] == "PKG":
walk(PKG.__path__, "PKG.")
The package `PKG`: yours.
"""
OTHERS = r"""
A PyTorch Lightning PKG template. Lines of the PKG. The PKG's contributors; "a small PKG", sub-PKG/x, un-PKG.yaml
import what the PKG needs, from PKG to PKG
    import PKG_of_others, PKGs
[PKG]
[PKG.optional-dependencies]
[PKG.scripts]
[PKG.entry-points.x]
dependencies = toml["PKG"]["dependencies"] + toml.get("PKG", {})
log = {"PKG": 1, 'PKG': 2}
PKG: demo
--logger.PKG demo --PKG.name demo PKG=demo
self.PKG.name, wandb.PKG.data, MyPKG.data, PKG_x.data, xPKG/data
/home/me/PKG/data, https://PKG.org/x, https://github.com/me/PKG/issues, ~/x/PKG/data, $PKG/x, the PKG\n
ORIGINAL = "PKG.models"  # rename: keep
"""  # noqa: E501
# a name that is a package in one file is a variable in another
MODULE = "import PKG.data\n\nprint(PKG, PKG.data, f(PKG=PKG), PKG.data.PKG)\n"
VARIABLE = 'for PKG in PKGs:\n    print(PKG.name, PKG.data)\n    log("PKG.data")\n'


def copy_to(folder: Path) -> Path:
    """The files that git knows or would add, and a user's own."""
    names = subprocess.run(
        ["git", "ls-files", "-coz", "--exclude-standard"], cwd=REPO, capture_output=True, check=True
    )
    for name in names.stdout.decode().split("\0")[:-1]:
        if (REPO / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPO / name, folder / name)
    for name, text in {
        "mentions.md": MENTIONS,
        "others.md": OTHERS,
        "module.py": MODULE,
        "variable.py": VARIABLE,
    }.items():
        (folder / "docs" / name).write_text(text.replace("PKG", PACKAGE), newline="\r\n")
    for name in ("logs", "data", ".venv", "docs/__pycache__"):
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "mentions.yaml").write_text(f"class_path: {PACKAGE}.models.mlp.MLP\n")
    return folder


def rename(folder: Path, name: str) -> str:
    command = [sys.executable, str(folder / "scripts" / "rename.py"), name]
    env = {**os.environ, "PYTHONPATH": str(folder)}
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout


def content(folder: Path) -> dict[str, tuple[bytes, int]]:
    """The bytes and the mode of each file, but compiled ones."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    return {
        path.relative_to(folder).as_posix(): (path.read_bytes(), path.stat().st_mode)
        for path in files
    }


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_to(tmp_path_factory.mktemp("copy"))


@pytest.fixture(scope="module")
def renamed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = copy_to(tmp_path_factory.mktemp("renamed"))
    said = rename(folder, NEW)
    assert said.startswith(f"{PACKAGE} is {NEW} now")
    assert f"pip uninstall -y {PACKAGE} && pip install -e ." in said
    return folder


def test_mentions_change_and_nothing_else(copy: Path, renamed: Path) -> None:
    def lines(name: str) -> list[str]:
        return (renamed / "docs" / name).read_bytes().decode().split("\r\n")

    assert lines("mentions.md") == MENTIONS.replace("PKG", NEW).split("\n")
    assert lines("others.md") == OTHERS.replace("PKG", PACKAGE).split("\n")
    module = (
        MODULE.replace("PKG", NEW)
        .replace(f"{NEW}=", f"{PACKAGE}=")
        .replace(f".{NEW})", f".{PACKAGE})")
    )
    assert lines("module.py") == module.split("\n")
    variable = VARIABLE.replace("PKG", PACKAGE).replace(f'"{PACKAGE}', f'"{NEW}')
    assert lines("variable.py") == variable.split("\n")

    before, after = content(copy), content(renamed)
    assert {re.sub(rf"^{PACKAGE}/", f"{NEW}/", name) for name in before} == set(after)
    for name, (text, mode) in before.items():
        new_text, new_mode = after[re.sub(rf"^{PACKAGE}/", f"{NEW}/", name)]
        assert mode == new_mode, name
        assert text.count(b"\n") == new_text.count(b"\n"), name
        if re.match(r"logs/|data/|\.venv/|.*/__pycache__/|.*\.png$|LICENSE$", name):
            assert text == new_text, name


def strings(value: Any) -> Iterator[str]:
    """The texts in a value of JSON's kinds, without the keys."""
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from strings(item)
    elif isinstance(value, str):
        yield value


def test_no_import_string_or_config_has_the_old_name(renamed: Path) -> None:
    """By Python's, YAML's and TOML's own parsers."""
    roots, found = [], []
    for path in [*renamed.rglob("*.py"), *renamed.rglob("*.yaml"), *renamed.rglob("*.toml")]:
        if (
            path.parent.name in ("docs", "logs", "data", ".venv", "__pycache__")
            and path.parent.parent.name != NEW
        ):
            continue
        text = path.read_text()
        if path.suffix == ".py":
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.Import):
                    roots += [alias.name.split(".")[0] for alias in node.names]
                elif isinstance(node, ast.ImportFrom):
                    roots.append(str(node.module).split(".")[0])
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    kept = text.splitlines()[node.lineno - 1].endswith("# rename: keep")
                    found += [] if kept else [node.value]
        else:
            found += strings(
                yaml.safe_load(text) if path.suffix == ".yaml" else tomllib.loads(text)
            )
    assert NEW in roots
    assert PACKAGE not in roots
    words = {word for text in found for word in re.split(r"[^\w./*]+", text)}
    assert f"{NEW}.classifier.Classifier" in words
    assert not [word for word in words if re.search(rf"(^|/){PACKAGE}([/*]|\.\w)", word)]


def test_the_project_table_stays(renamed: Path) -> None:
    pyproject = tomllib.loads((renamed / "pyproject.toml").read_text())
    assert pyproject["project"]["name"] == NEW
    assert pyproject["project"]["optional-dependencies"]
    assert pyproject["tool"]["setuptools"]["packages"]["find"]["include"] == [
        f"{NEW}*",
        "lightbase*",
    ]
    assert NEW in pyproject["tool"]["mypy"]["files"]


@pytest.mark.slow
def test_renaming_again(tmp_path: Path) -> None:
    """Twice gives what once does; here in git checkouts, with files that git does not know yet."""
    once, twice = copy_to(tmp_path / "once"), copy_to(tmp_path / "twice")
    for folder in (once, twice):
        subprocess.run(["git", "init", "--quiet", str(folder)], check=True)
        subprocess.run(["git", "-C", str(folder), "add", PACKAGE, "scripts"], check=True)
        shutil.rmtree(folder / ".git" / "hooks", ignore_errors=True)
    rename(once, f"{NEW}_again")
    rename(twice, NEW)
    rename(twice, f"{NEW}_again")
    without_git = [
        {name: file for name, file in content(folder).items() if not name.startswith(".git/")}
        for folder in (once, twice)
    ]
    assert without_git[0] == without_git[1]


@pytest.mark.parametrize(
    "name", ["2fast", "a-b", "_a", "class", "tests", "train", "json", "torch", "self", PACKAGE, ""]
)
def test_a_bad_name_changes_nothing(
    copy: Path, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = content(copy)
    monkeypatch.setattr(sys, "argv", ["rename.py", name])
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
    code = (
        f"import runpy, sys\nsys.modules[{PACKAGE!r}] = "
        "None\nrunpy.run_path('scripts/train.py', run_name='__main__')\n"
    )
    (tmp_path / "start.py").write_text(code)
    flags = (
        "--config configs/default.yaml --trainer.fast_dev_run true --data.num_train 200 "
        "--data.num_test 50"
    )
    command = [
        sys.executable,
        tmp_path / "start.py",
        *flags.split(),
        "--trainer.default_root_dir",
        tmp_path / "logs",
    ]
    env = {**os.environ, "PYTHONPATH": str(renamed)}
    with programs.start(
        command, cwd=renamed, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        _, error = process.communicate()
    assert process.returncode == 0, error
