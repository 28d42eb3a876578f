"""What README.md and docs/ show: files to write and commands to type. Tests write and
type them."""

import importlib
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
from paths import ACCELERATOR, script

import lightbase

REPO = Path(__file__).parents[3]
PACKAGE = "project"
TITLE = "# A PyTorch Lightning project template\n"
SHORT = (
    "--trainer.limit_train_batches 3 --trainer.limit_val_batches 2 "
    "--trainer.limit_test_batches 2 --trainer.max_epochs 1 "
    f"--trainer.accelerator {ACCELERATOR}"
)
SHORTER = {
    "train": SHORT,
    "sweep": f"{SHORT} --data.num_samples 600 --trainer.default_root_dir logs",
    "tune": "--find batch_size",  # noise has no best rate
}
"""Flags that shorten what a script does. They turn nothing off: the pictures and the
step timer, for example, work as for a user who types the command."""
FEWER = {"--trials 20": "--trials 2", "folds 5": "folds 3", "=0,1,2,3,4": "=0,1,2"}


def text_of(page: str) -> str:
    """Return the text of a file of the repository, or skip the test without it."""
    path = REPO / page
    if not path.is_file():
        pytest.skip(f"{page} is deleted")
    return path.read_text()


def is_template() -> bool:
    """Return whether this is the template itself: the package has its name, README has
    its title, and the version in pyproject.toml is the library's. A project keeps its
    pages and its version when it takes a newer library."""
    starts = {
        "README.md": TITLE,
        "pyproject.toml": f'name = "{PACKAGE}"\nversion = "{lightbase.__version__}"',
    }
    for name, start in starts.items():
        file = REPO / name
        if not file.is_file() or start not in file.read_text():
            return False
    return (REPO / PACKAGE).is_dir()


IS_TEMPLATE = is_template()


def commands(text: str) -> list[str]:
    """Return the commands of the bash blocks of a page. A backslash at a line's end
    continues it."""
    blocks = re.findall(r"```bash\n(.*?)```", text.replace(" \\\n ", " "), re.S)
    return "".join(blocks).splitlines()


def files(text: str) -> dict[str, str]:
    """Return {path: content} of the blocks of a page behind a paragraph whose last line
    ends with the path of a file and a colon, or that has one more line behind `PATH.`"""
    path = r"`([\w/]+\.(?:py|yaml))`(?:[^`\n]*:|\. [^\n]*\n[^\n]+)"
    return dict(re.findall(path + r"\n\n```(?:python|yaml)\n(.*?)```", text, re.S))


def write_files(text: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write the files of a page below `folder`, beside copies of the configs. Its
    modules can be imported as if they were in the package. Skip the test if a config
    that the page names is deleted."""
    for name in (PACKAGE, f"{PACKAGE}.models", f"{PACKAGE}.data"):
        package = importlib.import_module(name)
        path = folder / name.replace(".", "/")
        path.mkdir(parents=True, exist_ok=True)
        monkeypatch.setattr(package, "__path__", [str(path), *package.__path__])
    shutil.copytree(REPO / "configs", folder / "configs")
    for name, content in files(text).items():
        (folder / name).write_text(content)
    for config in re.findall(r"--config (configs/\w+\.yaml)", text):
        if not (folder / config).is_file():
            pytest.skip(f"{config} is deleted")


def run(command: str, *more: str) -> Any:
    """Run a command of a page in this process, with more flags. Skip the test if it
    needs a package that is missing."""
    for name, package in (("timm.", "timm"), (".onnx", "onnxscript")):
        if name in command:
            pytest.importorskip(package)
    _, path, *args = shlex.split(command, comments=True)
    return script(Path(path).stem).main([*args, *more])


def run_short(command: str) -> Any:
    """Run a command of a page in this process, with flags that shorten it."""
    name = Path(shlex.split(command)[1]).stem
    flags = SHORTER.get(name, "").split()
    if "--trainer.max_epochs" in flags and "--ckpt_path" in command:
        flags += ["--trainer.max_epochs", "2"]
    for many, few in FEWER.items():
        command = command.replace(many, few)
    return run(command, *flags)
