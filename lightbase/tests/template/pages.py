"""What README.md and docs/ show: files to write and commands to type. Tests write and
type them."""

import importlib
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from paths import ACCELERATOR, script

REPO = Path(__file__).parents[3]
PACKAGE = "project"
TITLE = "# A PyTorch Lightning project template\n"
DEFAULT = "configs/default.yaml"
GENERATED = (DEFAULT, "configs/discs_mlp.yaml")  # their data needs no files
SHORT_TRAINING = (
    "--trainer.limit_train_batches 3 --figures_every_n_epochs 0 --step_timer false"
)


def text_of(page: str) -> str:
    """Return the text of a file of the repository, or skip the test without it."""
    path = REPO / page
    if not path.is_file():
        pytest.skip(f"{page} is deleted")
    return path.read_text()


def is_template() -> bool:
    readme = REPO / "README.md"
    if not (REPO / PACKAGE).is_dir() or not readme.is_file():
        return False
    return readme.read_text().startswith(TITLE)


IS_TEMPLATE = is_template()


def commands(text: str) -> list[str]:
    """Return the commands of the bash blocks of a page. A backslash at a line's end
    continues it."""
    blocks = re.findall(r"```bash\n(.*?)```", text.replace(" \\\n ", " "), re.S)
    return "".join(blocks).splitlines()


def files(text: str) -> dict[str, str]:
    """Return {path: content} of the blocks of a page behind a line that ends with the
    path of a file and a colon."""
    file = r"`([\w/]+\.(?:py|yaml))`[^`\n]*:\n\n```(?:python|yaml)\n(.*?)```"
    return dict(re.findall(file, text, re.S))


def write_files(text: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write the files of a page below `folder`, beside copies of the configs. Its
    modules can be imported as if they were in the package."""
    for name in (PACKAGE, f"{PACKAGE}.models", f"{PACKAGE}.data"):
        package = importlib.import_module(name)
        path = folder / name.replace(".", "/")
        path.mkdir(parents=True, exist_ok=True)
        monkeypatch.setattr(package, "__path__", [str(path), *package.__path__])
    (folder / "configs").mkdir()
    for config in (REPO / "configs").glob("*.yaml"):
        (folder / "configs" / config.name).write_text(config.read_text())
    arrays = str(folder / "data" / "arrays")
    for name, content in files(text).items():
        (folder / name).write_text(content.replace("data/arrays", arrays))


def value_of(flag: str, args: list[str], default: str = "") -> str:
    """Return the word behind a flag."""
    if flag not in args:
        return default
    return args[args.index(flag) + 1]


def is_gone(command: str, folder: Path) -> bool:
    """Return whether a config, a module or a run that the command needs was deleted."""
    words = shlex.split(command, comments=True)
    paths = [word for word in words if word.startswith(("configs/", "logs/"))]
    if words[1:] == ["scripts/train.py"]:
        paths.append(DEFAULT)
    run_name = value_of("--ckpt_path", words)
    if run_name and "train" not in words[1]:
        paths.append(f"logs/{run_name.removeprefix('logs/')}")
    if not all((folder / path).exists() for path in paths):
        return True
    texts = [(folder / path).read_text() for path in paths if path.endswith(".yaml")]
    modules = rf"\b{PACKAGE}\.[\w.]+(?=\.\w)"
    for name in re.findall(modules, "\n".join([command, *texts])):
        try:
            importlib.import_module(name)
        except ModuleNotFoundError:
            return True
    return False


def train_flags(args: list[str], folder: Path) -> list[str]:
    """Return flags that shorten a training, and give it generated data."""
    flags = ["--trainer.accelerator", ACCELERATOR, "--trainer.log_every_n_steps", "1"]
    num_epochs = "1"
    if "--ckpt_path" in args:
        num_epochs = "2"
    flags += ["--trainer.max_epochs", num_epochs]
    config = value_of("--config", args, DEFAULT)
    if config in GENERATED and "--data" not in args:
        flags += ["--data.num_train", "400", "--data.num_test", "50"]
    elif "--data.data_dir" not in args:
        text = (folder / config).read_text()
        if re.search(r"data\.(mnist|cifar10)\.", text):
            flags += ["--data.data_dir", str(folder / "data")]
    return flags


def run(command: str, folder: Path) -> Any:
    """Run a command of a page in this process, shortened, with data and logs in
    `folder`."""
    program, path, *args = shlex.split(command, comments=True)
    assert program == "python"
    name = Path(path).stem
    logs = ["--trainer.default_root_dir", str(folder / "logs")]
    if name == "train":
        args += [*logs, *SHORT_TRAINING.split(), *train_flags(args, folder)]
    elif name == "sweep":
        args = ["2" if arg == "20" else arg for arg in args]  # trials
        args += [*logs, *SHORT_TRAINING.split()]
        args += ["--trainer.max_epochs", "1", "--data.num_samples", "600"]
    elif name == "tune":
        args += ["--data.data_dir", str(folder / "data"), *logs]
        args += ["--find", "batch_size"]  # noise has no best rate
    elif name == "runs":
        args += logs
    return script(name).main(args)
