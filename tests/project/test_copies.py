"""In copies of the repository: a newer version of the library, and a network and a data set that
are deleted. Both after `python scripts/rename.py`, where no package of the old name is."""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from pages import PACKAGE, REPO, commands

import lightbase

pytestmark = [pytest.mark.slow, pytest.mark.linux]
NEW = "digits"  # rename: keep
GIT = ["git", "-c", "user.name=x", "-c", "user.email=x@example.org"]


def call(folder: Path, *command: str) -> str:
    """Run a command in the copy; its output."""
    paths = [str(folder), str(folder / "blocks")]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def run_tests(folder: Path, *paths: str) -> None:
    # the package that is installed for these tests may have the old name
    (folder / "blocks").mkdir(exist_ok=True)
    (folder / "blocks" / "block.py").write_text(f"import sys\nsys.modules[{PACKAGE!r}] = None\n")
    pytest_options = ["-p", "block", "-o", "addopts=", "-m", "not slow", "-q"]
    call(folder, sys.executable, "-m", "pytest", *pytest_options, *paths)


def copy_to(folder: Path) -> Path:
    """Copy the files that git knows or would add."""
    names = subprocess.run(
        ["git", "ls-files", "-coz", "--exclude-standard"], cwd=REPO, capture_output=True, check=True
    )
    for name in names.stdout.decode().split("\0")[:-1]:
        if (REPO / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPO / name, folder / name)
    return folder


def commit(folder: Path) -> None:
    for command in ("init -q -b main", "add .", "commit -q -m work"):
        subprocess.run([*GIT, *command.split()], cwd=folder, check=True)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy whose package has the name NEW."""
    folder = copy_to(tmp_path / "user")
    call(folder, sys.executable, "scripts/rename.py", NEW)
    return folder


def test_a_newer_library_takes_the_place_of_the_older_one(copy: Path, tmp_path: Path) -> None:
    template = copy_to(tmp_path / "template")
    commit(template)
    init = copy / "lightbase" / "__init__.py"
    new = init.read_text()
    init.write_text(new.replace(f'"{lightbase.__version__}"', '"0.2.9"'))
    (copy / "lightbase" / "gone.py").write_text("")
    (copy / "tests" / "lightbase" / "test_gone.py").write_text("from lightbase import gone\n")
    mine = copy / NEW / "models" / "mine.py"
    mine.write_text("from torch.nn import Linear\n\n\nclass Mine(Linear):\n    pass\n")
    commit(copy)
    flags = f"--model {NEW}.classifier.Classifier --data lightbase.Features --name mine"
    flags += f" --model.net {NEW}.models.mine.Mine --model.net.in_features 10"
    flags += " --model.net.out_features 2 --trainer.accelerator cpu --trainer.max_epochs"
    train = [sys.executable, "scripts/train.py", *flags.split()]
    call(copy, *train, "2")

    page = (REPO / "docs" / "upgrade.md").read_text()
    ran = [command for command in commands(page) if command.startswith("git ")]
    assert len(ran) == 4
    for command in ran:
        words = shlex.split(command.replace("URL", str(template)))
        call(copy, *GIT, *words[1:])
    assert init.read_text() == new
    assert not (copy / "lightbase" / "gone.py").exists()
    assert not (copy / "tests" / "lightbase" / "test_gone.py").exists()
    assert mine.exists()
    assert not call(copy, "git", "status", "--porcelain")
    assert "epochs" in call(copy, *train, "4", "--ckpt_path", "last")
    run_tests(copy, "tests/project")


def test_a_data_set_and_a_network_are_deleted_with_their_files(copy: Path) -> None:
    modules = [
        path for path in ("data/cifar10.py", "models/cnn.py") if (REPO / PACKAGE / path).exists()
    ]
    if not modules:
        pytest.skip("they are deleted already")
    for module in modules:
        (copy / NEW / module).unlink()
        name = f"{NEW}.{module.removesuffix('.py').replace('/', '.')}."
        for config in (copy / "configs").glob("*.yaml"):
            if name in config.read_text():
                config.unlink()
    commit(copy)
    run_tests(copy, "tests/project")
    names = ("test_house.py", "test_config.py", "test_system.py", "test_restart.py")
    run_tests(copy, *(f"tests/lightbase/{name}" for name in names))
