"""What README.md and docs/ show: files to write and commands to type. Tests write and
type them."""

import importlib
import re
import shlex
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from paths import ACCELERATOR

from lightbase.core.folder import PROJECT

REPO = Path(__file__).parents[2]
PACKAGE = "project.classifier".partition(".")[0]  # scripts/rename.py changes it
GENERATED = ("configs/default.yaml", "configs/discs_mlp.yaml")


def script(name: str) -> ModuleType:
    """The module that scripts/NAME.py calls."""
    return importlib.import_module(
        "lightbase.core.run" if name == "train" else f"lightbase.commands.{name}"
    )


def commands(text: str) -> list[str]:
    """The commands of the bash blocks of a page. A backslash at a line's end continues
    it."""
    blocks = re.findall(r"```bash\n(.*?)```", text.replace(" \\\n ", " "), re.S)
    return [line for block in blocks for line in block.splitlines()]


def files(text: str) -> dict[str, str]:
    """The blocks of a page behind a line that ends with the path of a file and a
    colon."""
    return dict(
        re.findall(
            r"`([\w/]+\.(?:py|yaml))`[^`\n]*:\n\n```(?:python|yaml)\n(.*?)```",
            text,
            re.S,
        )
    )


def write_files(text: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write the files of a page below `folder`, beside copies of the configs. Its
    modules can be imported as if they were in the package."""
    for name in ("", ".models", ".data"):
        package = importlib.import_module(PACKAGE + name)
        path = folder / package.__name__.replace(".", "/")
        path.mkdir(parents=True, exist_ok=True)
        monkeypatch.setattr(package, "__path__", [str(path), *package.__path__])
    (folder / "configs").mkdir()
    for config in (REPO / "configs").glob("*.yaml"):
        (folder / "configs" / config.name).write_text(config.read_text())
    for name, content in files(text).items():
        (folder / name).write_text(
            content.replace("data/arrays", str(folder / "data" / "arrays"))
        )


def is_gone(command: str, folder: Path) -> bool:
    """Whether you have deleted a config, a module or a run that the command needs."""
    words = shlex.split(command, comments=True)
    paths = [word for word in words if word.startswith(("configs/", "logs/"))]
    if len(words) == 2 and words[1] == "scripts/train.py":
        paths.append(GENERATED[0])
    if "--ckpt_path" in words and "train" not in words[1]:
        paths.append(
            f"logs/{words[words.index('--ckpt_path') + 1].removeprefix('logs/')}"
        )
    if not all((folder / path).exists() for path in paths):
        return True
    texts = [
        command,
        *((folder / path).read_text() for path in paths if path.endswith(".yaml")),
    ]
    for name in re.findall(rf"\b{PACKAGE}\.[\w.]+(?=\.\w)", "\n".join(texts)):
        try:
            importlib.import_module(name)
        except ModuleNotFoundError:
            return True
    return False


def run(command: str, folder: Path) -> Any:
    """Run a command of a page in this process, shortened, with data and logs in
    `folder`."""
    program, path, *args = shlex.split(command, comments=True)
    assert program == "python"
    name = Path(path).stem
    logs, data = (
        ["--trainer.default_root_dir", str(folder / "logs")],
        ["--data.data_dir"],
    )
    data.append(str(folder / "data"))
    if name in ("train", "sweep"):
        args += logs
        args += ["--trainer.limit_train_batches", "3", "--figures_every_n_epochs", "0"]
        args += ["--step_timer", "false"]
    if name == "train":
        args += [
            "--trainer.accelerator",
            ACCELERATOR,
            "--trainer.log_every_n_steps",
            "1",
        ]
        args += ["--trainer.max_epochs", "2" if "--ckpt_path" in args else "1"]
        config = (
            args[args.index("--config") + 1] if "--config" in args else GENERATED[0]
        )
        if config in GENERATED and "--data" not in args:
            args += ["--data.num_train", "400", "--data.num_test", "50"]
        elif "--data.data_dir" not in args:
            text = (folder / config).read_text()
            args += data if re.search(r"data\.(mnist|cifar10)\.", text) else []
    if name == "sweep":
        args += ["--trainer.max_epochs", "1", "--data.num_samples", "600"]
        args = ["3" if arg == "20" else arg for arg in args]  # trials
    if name == "tune":
        args += [*data, *logs, "--find", "batch_size"]  # noise has no best rate
    if name == "runs":
        args += logs
    with pytest.MonkeyPatch.context() as patched:
        if "--ckpt_path" in args and name != "train":  # of a run below ROOT/logs
            patched.setattr(PROJECT, "root", folder)
        return script(name).main(args)
