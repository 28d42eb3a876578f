"""What README.md and docs/ tell to type works. Commands whose config or module you have
deleted are left out; delete this file with the pages."""

import importlib
import json
import re
import runpy
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from pages import PACKAGE, REPO, commands, files, is_gone, run, script, write_files
from PIL import Image

PAGES = {
    path.name: path for path in [REPO / "README.md", *(REPO / "docs").glob("*.md")]
}
MNIST_MLP = "python scripts/train.py --config configs/mnist_mlp.yaml"
BEFORE = {
    "export.md": [
        MNIST_MLP,
        "python scripts/train.py --config configs/cifar10_cnn.yaml",
    ],
    "runs.md": [MNIST_MLP, MNIST_MLP, f"{MNIST_MLP} --name sweep/trial_1"],
}
"""Runs that the commands of a page take as given."""


def text_of(page: str) -> str:
    if page not in PAGES:
        pytest.skip(f"{page} is deleted")
    return PAGES[page].read_text()


@pytest.fixture
def user_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mnist_dir: Path, cifar10_dir: Path
) -> Iterator[Path]:
    """A working folder with the files that the pages speak of."""
    rng = np.random.default_rng(0)
    (tmp_path / "data" / "arrays").mkdir()
    for split, num in (("train", 200), ("test", 50)):
        images = rng.integers(0, 256, (num, 3, 24, 24), dtype=np.uint8)
        labels = rng.integers(0, 2, num)
        np.savez(
            tmp_path / "data" / "arrays" / f"{split}.npz", images=images, labels=labels
        )
        for i in range(num // 2):
            file = tmp_path / "photos" / split / "ab"[i % 2] / f"{i}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (40, 30), (i, 128, 128)).save(file)
    rows = "".join(
        f"{','.join(map(str, rng.normal(size=4)))},{'abc'[i % 3]}\n" for i in range(400)
    )
    (tmp_path / "features.csv").write_text("w,x,y,z,kind\n" + rows)
    (tmp_path / "more_digits").mkdir()
    for name in ("digit.png", "more_digits/1.png"):
        Image.new("L", (40, 30), 128).save(tmp_path / name)
    shutil.copytree(mnist_dir / "MNIST", mnist_dir / "FashionMNIST")
    resnet = importlib.import_module("torchvision.models").resnet18()
    torch.save(resnet.state_dict(), tmp_path / "resnet18.pth")
    monkeypatch.chdir(tmp_path)
    modules = {*sys.modules}
    yield tmp_path
    for name in {
        *sys.modules
    } - modules:  # a page may show another file of the same name
        if name.startswith(f"{PACKAGE}."):
            del sys.modules[name]


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [
        *(
            "README.md",
            "data.md",
            "export.md",
            "extending.md",
            "flags.md",
            "lightning.md",
        ),
        *("loggers.md", "runs.md", "tensorboard.md", "transfer.md"),
        # the processes of a sweep leave pipes open
        pytest.param(
            "sweep.md", marks=pytest.mark.filterwarnings("ignore::ResourceWarning")
        ),
    ],
)
def test_the_commands_of_a_page_run(page, user_folder, monkeypatch, capsys):
    text = text_of(page)
    write_files(text, user_folder, monkeypatch)
    gone = []
    for command in [*BEFORE.get(page, []), *commands(text)]:
        if not command.startswith("python scripts/"):
            continue
        if inner := re.search(r"\$\((.*)\)", command):
            capsys.readouterr()
            if not is_gone(BEFORE[page][0], user_folder):
                run(inner[1], user_folder)
            command = command.replace(
                inner[0], capsys.readouterr().out.strip() or "logs/gone"
            )
        if is_gone(command, user_folder):
            gone.append(command)
            continue
        result = run(command, user_folder)
        if command.startswith("python scripts/train.py"):
            assert np.isfinite([*result.values()]).all(), command
            assert result["steps"] <= 6
    if gone:
        pytest.skip(f"config, module or run of {len(gone)} commands is deleted: {gone}")


@pytest.mark.slow
def test_programs_read_exported_files_without_the_package(
    user_folder, monkeypatch, capsys
):
    page = text_of("export.md")
    write_files(page, user_folder, monkeypatch)
    for command in [*BEFORE["export.md"], *commands(page)]:
        if is_gone(command, user_folder):
            pytest.skip("a config of the page is deleted")
        run(command, user_folder)
    for i, size in enumerate([(50, 40), (20, 33)]):
        noise = np.random.default_rng(i).integers(0, 256, (*size, 3), dtype=np.uint8)
        Image.fromarray(noise).convert("RGB" if i else "L").save(f"{i}.png")

    def output_of(example: str, *args: str) -> list[str]:
        assert PACKAGE not in files(page)[example]
        monkeypatch.setattr("sys.argv", [example, *args])
        capsys.readouterr()
        runpy.run_path(example)
        return capsys.readouterr().out.splitlines()

    lines = [line.split() for line in output_of("with_onnx.py", "0.png", "1.png")]
    run(
        f"python scripts/predict.py {shlex.join(commands(page)[0].split()[2:4])} 0.png 1.png",
        user_folder,
    )
    table = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert [line[:2] for line in lines] == [row[:2] for row in table]
    values = [float(line[2]) for line in lines]
    assert values == pytest.approx([float(row[2]) for row in table], abs=2e-4)
    assert len(output_of("with_pt2.py")) == 5
    assert len(json.loads(output_of("with_pth.py")[0])) == 5


@pytest.mark.slow
def test_the_commands_for_several_devices_parse(user_folder, monkeypatch, capsys):
    text = text_of("devices.md")
    write_files(text, user_folder, monkeypatch)
    for command in commands(text):
        flags = command.partition("scripts/train.py ")[2]
        if flags and not is_gone(command, user_folder):
            with pytest.raises(SystemExit) as caught:
                script("train").main([*shlex.split(flags), "--print_config"])
            assert not caught.value.code, command


@pytest.mark.slow
@pytest.mark.parametrize("page", ["README.md", "flags.md"])
def test_every_flag_of_a_table_is_one(page, user_folder, monkeypatch, capsys):
    write_files("", user_folder, monkeypatch)
    if is_gone(MNIST_MLP, user_folder):
        pytest.skip("the config is deleted")
    rows = [
        line.split("|")[1]
        for line in text_of(page).splitlines()
        if line.startswith("| `--")
    ]
    for row in rows:
        # the flags of a row go together: an argument of a class needs the class
        flags = [flag for flag in re.findall(r"`(--[^`]+)`", row) if " " in flag]
        flags = [flag for flag in flags if not flag.startswith("--config")]
        line = (
            " ".join(flags)
            .replace(" N", " 1")
            .replace("NAME", "x")
            .replace("PATH", ".")
        )
        args = shlex.split(line)
        with pytest.raises(SystemExit) as caught:
            script("train").main([*MNIST_MLP.split()[2:], *args, "--print_config"])
        assert not caught.value.code, flags
