"""What the README tells to type works: its commands run here, shortened; its install lines run in `.ci/run`."""

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from conftest import REPO
from PIL import Image
from test_scripts import script

import project.data
import project.models

README = (REPO / "README.md").read_text()
SHORT = "--trainer.limit_train_batches 3 --trainer.log_every_n_steps 1 --trainer.max_epochs 1"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.S)


COMMANDS = [line for block in blocks("bash") for line in block.splitlines()]


def test_the_install_and_test_commands_are_those_of_ci() -> None:
    ci = (REPO / ".ci" / "run").read_text()
    install = 'uv pip install --compile-bytecode -c constraints.txt -e ".[dev]"'
    assert install in COMMANDS
    assert install in ci
    assert 'pip install -c constraints.txt -e ".[dev]" && pytest' in COMMANDS
    assert "\ntime pytest\n" in ci
    assert "pip install -c constraints.txt -e . && python scripts/train.py" in COMMANDS


@pytest.fixture
def user_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mnist_dir: Path, cifar10_dir: Path) -> Path:
    """A folder with the files that the README speaks of: own network and data, configs, images, a table."""
    for kind, package, code, config in zip(
        ("wide", "arrays"), (project.models, project.data), blocks("python"), blocks("yaml"), strict=True
    ):
        folder = tmp_path / package.__name__
        folder.mkdir()
        (folder / f"{kind}.py").write_text(code)
        monkeypatch.setattr(package, "__path__", [*package.__path__, str(folder)])
        (tmp_path / "configs").mkdir(exist_ok=True)
        (tmp_path / "configs" / f"{kind}.yaml").write_text(config)
    for path in (REPO / "configs").glob("*.yaml"):
        (tmp_path / "configs" / path.name).write_text(path.read_text())
    rng = np.random.default_rng(0)
    (tmp_path / "data" / "arrays").mkdir()
    for split, num in (("train", 200), ("test", 50)):
        images = rng.integers(0, 256, (num, 3, 24, 24), dtype=np.uint8)
        np.savez(tmp_path / "data" / "arrays" / f"{split}.npz", images=images, labels=rng.integers(0, 2, num))
    rows = "".join(f"{','.join(map(str, rng.normal(size=4)))},{'abc'[i % 3]}\n" for i in range(400))
    (tmp_path / "features.csv").write_text("w,x,y,z,kind\n" + rows)
    (tmp_path / "more_digits").mkdir()
    for name in ("digit.png", "more_digits/1.png"):
        Image.new("L", (40, 30), 128).save(tmp_path / name)
    assert mnist_dir == cifar10_dir == tmp_path / "data"
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(command: str, folder: Path) -> Any:
    """Run a README command in this process, shortened, with data and logs in `folder`."""
    program, *args = shlex.split(command, comments=True)
    assert program == "python"
    name = Path(args.pop(0)).stem
    if name == "train":
        # MNIST and CIFAR-10 lie in the template's own data folder unless said otherwise
        here = ["--trainer.default_root_dir", str(folder / "logs"), "--trainer.accelerator", "cpu"]
        if not {"--data.csv_path", "configs/arrays.yaml"} & set(args):
            here += ["--data.data_dir", str(folder / "data")]
        short = SHORT if "--ckpt_path" not in args else SHORT.replace("max_epochs 1", "max_epochs 2")
        if "--config" not in args:
            short += " --data.num_train 400 --data.num_test 50"
        args += [*here, *short.split()]
        if "--config" in args and "configs/mnist_mlp.yaml" not in args:
            args += ["--figures_every_n_epochs", "0"]  # a second each
    if name == "tune":
        args += ["--data.data_dir", str(folder / "data"), "--trainer.default_root_dir", str(folder / "logs")]
        args += ["--find", "batch_size"]  # images of noise have no learning rate
    if name == "benchmark":
        args += ["--parts", "launch", "--rounds", "1"]
    if name == "prepare_data":
        args += ["--data.data_dir", str(folder / "data")]
    return script(name).main(args)


def check_strategy(command: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """dp wants GPUs; ddp would start this test again, as it starts its command: tests/test_distributed.py runs it."""
    if "--trainer.strategy dp" in command:
        with pytest.raises(SystemExit):
            run(command, folder)
        assert "GPU" in capsys.readouterr().err
    else:
        with pytest.raises(SystemExit) as caught:
            script("train").main([*shlex.split(command)[2:], "--print_config"])
        assert not caught.value.code
        assert yaml.safe_load(capsys.readouterr().out)["trainer"]["strategy"] == "ddp"


def test_every_command_of_the_readme_runs(user_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ran, shown = [], ""
    for command in COMMANDS:
        command = command.removeprefix("pip install -c constraints.txt -e . && ")
        if not command.startswith("python scripts/"):
            continue
        ran.append(command.split()[1])
        if "--trainer.strategy" in command:
            check_strategy(command, user_folder, capsys)
        else:
            run(command, user_folder)
        shown += capsys.readouterr().out
    assert {Path(name).stem for name in ran} == {path.stem for path in (REPO / "scripts").glob("*.py")}
    assert len(ran) >= 12
    logs = user_folder / "logs"
    assert {path.name for path in logs.iterdir()} == {
        *(
            "default",
            "mnist_mlp",
            "mnist_mlp_tune",
            "cifar10_cnn",
            "small_net",
            "large_batch",
            "augmented",
            "wide",
            "arrays",
        )
    }
    wide = yaml.safe_load((logs / "wide" / "version_0" / "config.yaml").read_text())
    assert wide["model"]["init_args"]["net"]["init_args"]["hidden_dim"] == 256
    assert (user_folder / "mnist.pth").exists()
    assert "more_digits/1.png" in shown


def test_the_tensorboard_command_finds_the_runs(user_folder: Path) -> None:
    assert "tensorboard --logdir logs" in COMMANDS
    run("python scripts/train.py --config configs/mnist_mlp.yaml", user_folder)
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", "logs", "--inspect"]
    found = subprocess.run(command, cwd=user_folder, capture_output=True, text=True, check=True)
    for tag in ("train/loss", "train/acc", "val/loss", "val/acc", "test/loss", "test/acc", "lr"):
        assert tag in found.stdout


def test_every_flag_of_the_table_is_one(user_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = re.findall(r"`(--[^`]+)`", README.split("## Flags")[1].split("For example:")[0])
    flags = [flag for flag in flags if " " in flag and not flag.startswith("--config")]
    assert len(flags) > 20
    for flag in flags:
        parts = flag.replace(" N", " 1").replace("NAME", "x").replace("PATH", ".").split()
        with pytest.raises(SystemExit) as caught:
            script("train").main(["--config", "configs/mnist_mlp.yaml", *parts, "--print_config"])
        assert not caught.value.code, flag
        found = yaml.safe_load(capsys.readouterr().out)
        key = parts[0].removeprefix("--").split(".")
        for name in key:
            found = found.get("init_args", found) if name not in found else found
            found = found[name]
        assert str(found).replace(" ", "") == str(yaml.safe_load(parts[1])).replace(" ", ""), flag


def test_the_layout_names_every_file() -> None:
    layout = README.split("## Layout")[1]
    tracked = subprocess.run(["git", "ls-files"], cwd=REPO, capture_output=True, text=True, check=True).stdout.split()
    for path in map(Path, tracked):
        if path.parts[0] in ("project", "scripts") and path.name != "__init__.py":
            assert re.search(rf"\b{path.stem if path.parts[0] == 'scripts' else path.name}\b", layout), path
    for name in re.findall(r"\b(\w+\.py)\b", layout):
        assert any(path.endswith(name) for path in tracked), name


def test_the_pictures_are_there_and_small() -> None:
    pictures = re.findall(r"!\[.*?\]\((.*?)\)", README)
    assert pictures
    for picture in pictures:
        assert (REPO / picture).stat().st_size < 200_000
