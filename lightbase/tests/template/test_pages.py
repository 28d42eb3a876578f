"""What README.md and docs/ tell to type works. Commands whose config or module has been
deleted are left out."""

import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from pages import PACKAGE, REPO, commands, files, run, run_short, text_of, write_files
from paths import script
from PIL import Image

MNIST_MLP = "python scripts/train.py --config configs/mnist_mlp.yaml"
CIFAR10_CNN = "python scripts/train.py --config configs/cifar10_cnn.yaml"
BEFORE = {"docs/export.md": [MNIST_MLP, CIFAR10_CNN]}
"""Runs that the commands of a page take as given."""
PAGES = ["README.md", "docs/data.md", "docs/extending.md"]
PAGES += ["docs/flags.md", "docs/lightning.md", "docs/loggers.md", "docs/runs.md"]
PAGES += ["docs/large_data.md", "docs/tensorboard.md", "docs/transfer.md"]
# the processes of a sweep leave pipes open
OPEN_PIPES = pytest.mark.filterwarnings("ignore::ResourceWarning")


@pytest.fixture
def folder(user_folder: Path, mnist_dir: Path, cifar10_dir: Path) -> Path:
    """A working folder with the files that the pages speak of."""
    rng = np.random.default_rng(0)
    (user_folder / "data/arrays").mkdir()
    for split in ("train", "test"):
        images = rng.integers(0, 256, (200, 3, 24, 24), dtype=np.uint8)
        path = user_folder / "data/arrays" / f"{split}.npz"
        np.savez(path, images=images, labels=np.arange(200) % 2)
        for name in ("a", "b"):
            photos = user_folder / "photos" / split / name
            photos.mkdir(parents=True)
            for i in range(50):
                Image.new("RGB", (40, 30), (i, 128, 128)).save(photos / f"{i}.png")
    rows = [f"{i % 7},{i % 5},{i % 4},1.5,{'abc'[i % 3]}\n" for i in range(400)]
    (user_folder / "features.csv").write_text("w,x,y,z,kind\n" + "".join(rows))
    (user_folder / "more_digits").mkdir()
    for name in ("digit.png", "more_digits/1.png"):
        Image.new("L", (40, 30), 128).save(user_folder / name)
    shutil.copytree(mnist_dir / "MNIST", mnist_dir / "FashionMNIST")
    torch.save(torchvision.models.resnet18().state_dict(), user_folder / "resnet18.pth")
    return user_folder


@pytest.fixture
def loggers_end() -> Iterator[None]:
    """End what W&B and MLflow have begun."""
    before = dict(os.environ)
    yield
    if wandb := sys.modules.get("wandb"):
        wandb.teardown()
    os.environ.clear()
    os.environ.update(before)


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", [*PAGES, pytest.param("docs/sweep.md", marks=OPEN_PIPES)]
)
def test_the_commands_of_a_page_run(page, folder, monkeypatch, capsys, loggers_end):
    text = text_of(page)
    write_files(text, folder, monkeypatch)
    for command in [*BEFORE.get(page, []), *commands(text)]:
        if not command.startswith("python scripts/"):
            continue
        inner = re.search(r"\$\((.*)\)", command)
        if inner:
            capsys.readouterr()
            run(inner[1])
            command = command.replace(inner[0], capsys.readouterr().out.strip())
        result = run_short(command)
        if "--seeds 3" in command:
            assert {total["n"] for total in result.values()} == {3}
        elif command.startswith("python scripts/train.py"):
            assert np.isfinite([*result.values()]).all(), command
            assert result["steps"] <= 6


@pytest.mark.slow
def test_programs_read_exported_files_without_the_package(folder, monkeypatch, capsys):
    page = text_of("docs/export.md")
    write_files(page, folder, monkeypatch)
    for command in [*BEFORE["docs/export.md"], *commands(page)]:
        run_short(command)
    for i in (0, 1):
        Image.effect_noise((40 + i, 50), 128).save(f"{i}.png")
    shown = {}
    for example in ("with_onnx.py", "with_pt2.py", "with_pth.py"):
        assert PACKAGE not in files(page)[example]
        args = ["0.png", "1.png"] if example == "with_onnx.py" else []
        monkeypatch.setattr("sys.argv", [example, *args])
        capsys.readouterr()
        runpy.run_path(example)
        shown[example] = capsys.readouterr().out
    run("python scripts/predict.py --ckpt_path cifar10_cnn 0.png 1.png")
    _, _, rows = capsys.readouterr().out.partition("\nfile ")
    lines = shown["with_onnx.py"].splitlines()
    for row, line in zip(rows.splitlines()[1:], lines, strict=True):
        *predicted, probability = line.split()
        assert row.split()[:2] == predicted
        assert float(row.split()[2]) == pytest.approx(float(probability), abs=2e-4)
    assert len(shown["with_pt2.py"].splitlines()) == 5
    assert len(json.loads(shown["with_pth.py"])) == 5


def test_files_of_pages_pass_the_hook(tmp_path: Path) -> None:
    """The pre-commit hook, without mypy, lets a user commit them."""
    pytest.importorskip("ruff")
    shutil.copy(REPO / "pyproject.toml", tmp_path)
    # ruff tells the repository's packages from others by the folders that are there
    for package in ("lightbase", PACKAGE):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
    for page in [REPO / "README.md", *(REPO / "docs").rglob("*.md")]:
        for name, content in files(page.read_text("utf-8")).items():
            if name.endswith(".py"):
                path = tmp_path / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(content, "utf-8")
    assert len([*tmp_path.rglob("*.py")]) > 40
    for check in (["check", "--output-format", "concise"], ["format", "--check"]):
        words = [sys.executable, "-m", "ruff", *check, "--no-cache"]
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def check_flags(args: list[str]) -> None:
    """Let train.py parse these flags. It prints the config and ends with status 0."""
    with pytest.raises(SystemExit) as caught:
        script("train").main([*args, "--print_config"])
    assert not caught.value.code, args


@pytest.mark.slow
def test_the_commands_for_several_devices_parse(folder, monkeypatch):
    text = text_of("docs/devices.md")
    write_files(text, folder, monkeypatch)
    for command in commands(text):
        _, _, flags = command.partition("scripts/train.py ")
        if flags:
            check_flags(shlex.split(flags))


@pytest.mark.slow
@pytest.mark.parametrize("page", ["README.md", "docs/flags.md"])
def test_every_flag_of_a_table_is_one(page, folder, monkeypatch):
    write_files(MNIST_MLP, folder, monkeypatch)
    rows = re.findall(r"^\| `--[^|]*", text_of(page), re.M)
    assert rows
    for row in rows:
        # the flags of a row go together: an argument of a class needs the class
        flags = [flag for flag in re.findall(r"`(--[^`]+)`", row) if " " in flag]
        line = " ".join(flag for flag in flags if not flag.startswith("--config"))
        for placeholder, value in ((" N", " 1"), ("NAME", "x"), ("PATH", ".")):
            line = line.replace(placeholder, value)
        check_flags([*MNIST_MLP.split()[2:], *shlex.split(line)])
