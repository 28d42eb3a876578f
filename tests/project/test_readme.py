"""What README.md and docs/ tell to type works: the commands run here, shortened; the install lines
run in `.ci/run`."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from pages import REPO, commands, run, script, write_files
from PIL import Image

README = (REPO / "README.md").read_text()
PAGES = {path.name: path.read_text() for path in (REPO / "docs").glob("*.md")}
COMMANDS = commands(README)


def test_the_install_and_test_commands_are_those_of_ci() -> None:
    ci = (REPO / ".ci" / "run").read_text()
    install = 'uv pip install --compile-bytecode -c constraints.txt -e ".[dev]"'
    assert install in COMMANDS
    assert install in ci
    assert 'pip install -c constraints.txt -e ".[dev]" && pytest' in COMMANDS
    assert "\ntime pytest\n" in ci
    assert "pip install -c constraints.txt -e . && python scripts/train.py" in COMMANDS


@pytest.fixture
def user_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mnist_dir: Path, cifar10_dir: Path
) -> Path:
    """A folder with the files that the README speaks of."""
    write_files(README, tmp_path, monkeypatch)
    rng = np.random.default_rng(0)
    (tmp_path / "data" / "arrays").mkdir()
    for split, num in (("train", 200), ("test", 50)):
        images = rng.integers(0, 256, (num, 3, 24, 24), dtype=np.uint8)
        np.savez(
            tmp_path / "data" / "arrays" / f"{split}.npz",
            images=images,
            labels=rng.integers(0, 2, num),
        )
    (tmp_path / "more_digits").mkdir()
    for name in ("digit.png", "more_digits/1.png"):
        Image.new("L", (40, 30), 128).save(tmp_path / name)
    assert mnist_dir == cifar10_dir == tmp_path / "data"
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_every_command_of_the_readme_runs(
    user_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ran, shown = set(), ""
    for command in COMMANDS:
        command = command.removeprefix("pip install -c constraints.txt -e . && ")
        if command.startswith("python scripts/"):
            run(command, user_folder)
            ran.add(Path(command.split()[1]).stem)
            shown += capsys.readouterr().out
    assert ran == {"train", "tune", "evaluate", "predict", "export"}
    names = {
        "default",
        "mnist_mlp",
        "mnist_mlp_tune",
        "cifar10_cnn",
        "resnet",
        "smooth",
        "f1",
        "arrays",
    }
    assert {path.name for path in (user_folder / "logs").iterdir()} == names
    assert (user_folder / "mnist.pth").exists()
    assert "more_digits/1.png" in shown


@pytest.mark.parametrize("page", ["devices.md", "flags.md", "performance.md"])
def test_the_commands_of_a_page_parse(
    page: str, user_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those that train on several devices, or for long, run in tests of their own."""
    for command in commands(PAGES[page]):
        if not command.startswith("python scripts/train.py"):
            continue
        with pytest.raises(SystemExit) as caught:
            script("train").main([*shlex.split(command)[2:], "--print_config"])
        assert not caught.value.code
        printed = yaml.safe_load(capsys.readouterr().out)
        assert (
            printed["trainer"]["strategy"]
            == (re.findall("--trainer.strategy (.+?) ", command) or ["auto"])[0]
        )


def test_the_tensorboard_command_finds_the_runs(user_folder: Path) -> None:
    assert "tensorboard --logdir logs" in COMMANDS
    run("python scripts/train.py --config configs/mnist_mlp.yaml", user_folder)
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", "logs", "--inspect"]
    found = subprocess.run(command, cwd=user_folder, capture_output=True, text=True, check=True)
    for tag in ("train/loss", "train/acc", "val/loss", "val/acc", "test/loss", "test/acc", "lr"):
        assert tag in found.stdout


@pytest.mark.parametrize(
    "text",
    [README, pytest.param(PAGES["flags.md"], marks=pytest.mark.slow)],
    ids=["README", "flags"],
)
def test_every_flag_of_a_table_is_one(
    text: str, user_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `--")]
    for row in rows:
        # a row's flags go together: an argument of a class needs the class
        flags = [
            flag
            for flag in re.findall(r"`(--[^`]+)`", row)
            if " " in flag and not flag.startswith("--config")
        ]
        flags = [
            flag.replace(" N", " 1").replace("NAME", "x").replace("PATH", ".") for flag in flags
        ]
        if not flags:
            continue
        args = shlex.split(" ".join(flags))
        with pytest.raises(SystemExit) as caught:
            script("train").main(["--config", "configs/mnist_mlp.yaml", *args, "--print_config"])
        assert not caught.value.code, flags
        printed = yaml.safe_load(capsys.readouterr().out)
        for flag, value in map(shlex.split, flags):
            found = printed
            for name in flag.removeprefix("--").split("."):
                found = found.get("init_args", found) if name not in found else found
                found = found[name]
            found = found.get("class_path", found) if isinstance(found, dict) else found
            said = str(Path("FILE").absolute()) if value == "FILE" else str(yaml.safe_load(value))
            assert str(found).replace(" ", "") == said.replace(" ", ""), flag


def test_the_layout_names_the_scripts_and_the_pages() -> None:
    layout = README.split("## Layout")[1]
    scripts = [path for path in (REPO / "scripts").iterdir() if path.suffix in (".py", ".sh")]
    shipped = [
        path.stem for path in scripts if path.suffix == ".sh" or '"__main__"' in path.read_text()
    ]
    for name in (*shipped, *(Path(page).stem for page in PAGES)):
        assert re.search(rf"\b{name}\b", layout), name


@pytest.mark.parametrize("text", [README, *PAGES.values()], ids=["README", *PAGES])
def test_links_and_pictures_are_there(text: str) -> None:
    folder = REPO if text is README else REPO / "docs"
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (folder / target).is_file(), target
        assert (folder / target).stat().st_size < 200_000
