"""What README.md and docs/ show: files to write and commands to type, which the tests write and
type."""

import importlib
import re
import shlex
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import lightbase.watch
import project as user_package
import project.data
import project.models

REPO = Path(__file__).parents[2]


def script(name: str) -> ModuleType:
    """What a file of scripts/ calls."""
    return importlib.import_module(
        "lightbase.run.train" if name == "train" else f"lightbase.tools.{name}"
    )


SHORT = (
    "--trainer.limit_train_batches 3 --trainer.log_every_n_steps 1 "
    "--figures_every_n_epochs 0 --step_timer false"
)
GENERATED = ("configs/default.yaml", "configs/discs_mlp.yaml")


def commands(text: str) -> list[str]:
    """Lines of the bash blocks."""
    return [
        line
        for block in re.findall(r"```bash\n(.*?)```", text, re.S)
        for line in block.splitlines()
    ]


def files(text: str) -> dict[str, str]:
    """Blocks behind a line that ends with the path of a file and a colon."""
    return dict(
        re.findall(r"`([\w/]+\.(?:py|yaml))`[^`\n]*:\n\n```(?:python|yaml)\n(.*?)```", text, re.S)
    )


def write_files(text: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Write a page's files below `folder`, beside copies of the shipped configs, to be imported as
    ours."""
    for package in (user_package, project.models, project.data, lightbase.watch):
        own = folder / package.__name__.replace(".", "/")
        own.mkdir(parents=True, exist_ok=True)
        monkeypatch.setattr(package, "__path__", [str(own), *package.__path__])
    (folder / "configs").mkdir()
    for path in (REPO / "configs").glob("*.yaml"):
        (folder / "configs" / path.name).write_text(path.read_text())
    for name, content in files(text).items():
        (folder / name).write_text(content.replace("data/arrays", str(folder / "data" / "arrays")))
    return list(files(text))


def run(command: str, folder: Path) -> Any:
    """Run a command in this process, shortened, with data and logs in `folder`."""
    program, *args = shlex.split(command, comments=True)
    assert program == "python"
    name = Path(args.pop(0)).stem
    if name == "train":
        args += [
            "--trainer.default_root_dir",
            str(folder / "logs"),
            "--trainer.accelerator",
            "cpu",
            *SHORT.split(),
        ]
        args += ["--trainer.max_epochs", "2" if "--ckpt_path" in args else "1"]
        config = args[args.index("--config") + 1] if "--config" in args else GENERATED[0]
        if config in GENERATED and "--data" not in args:
            args += ["--data.num_train", "400", "--data.num_test", "50"]
        elif "--data.data_dir" not in args and re.search(
            r"data\.(mnist|cifar10)\.", (folder / config).read_text()
        ):
            args += [
                "--data.data_dir",
                str(folder / "data"),
            ]  # they lie in the template's own data folder
    if name in ("tune", "prepare_data"):
        args += ["--data.data_dir", str(folder / "data")]
    if name == "tune":
        args += [
            "--trainer.default_root_dir",
            str(folder / "logs"),
            "--find",
            "batch_size",
        ]  # noise has no best rate
    if name == "runs":
        args += ["--trainer.default_root_dir", str(folder / "logs")]
    return script(name).main(args)
