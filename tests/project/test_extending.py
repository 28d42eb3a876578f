"""The examples of docs/extending.md: a new file and a YAML or flags each, and what they change
takes effect."""

import csv
import importlib
import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from pages import REPO, commands, files, run, write_files
from PIL import Image

PAGE = (REPO / "docs" / "extending.md").read_text()
COMMANDS = {command.split(" --name ")[-1] if " --name " in command else command.split()[3]: command
            for command in commands(PAGE) if "scripts/train.py" in command}  # fmt: skip


@pytest.fixture
def user_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mnist_dir: Path) -> Iterator[Path]:
    """The page's files, and the data that they speak of."""
    write_files(PAGE, tmp_path, monkeypatch)
    rng = np.random.default_rng(0)
    (tmp_path / "data" / "arrays").mkdir()
    for split, num in (("train", 200), ("test", 50)):
        images = rng.integers(0, 256, (num, 3, 24, 24), dtype=np.uint8)
        np.savez(
            tmp_path / "data" / "arrays" / f"{split}.npz",
            images=images,
            labels=rng.integers(0, 2, num),
        )
        for i in range(num // 2):
            file = tmp_path / "photos" / split / "ab"[i % 2] / f"{i}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (40, 30), (i, 128, 128)).save(file)
    rows = "".join(f"{','.join(map(str, rng.normal(size=4)))},{'abc'[i % 3]}\n" for i in range(400))
    (tmp_path / "features.csv").write_text("w,x,y,z,kind\n" + rows)
    shutil.copytree(mnist_dir / "MNIST", mnist_dir / "FashionMNIST")
    monkeypatch.chdir(tmp_path)
    modules = [name.removesuffix(".py").replace("/", ".") for name in files(PAGE)]
    before = {name: module for name in modules if (module := sys.modules.pop(name, None))}
    yield tmp_path
    for (
        name,
        module,
    ) in (
        before.items()
    ):  # jsonargparse imports every class that there is, to find one by its bare name
        sys.modules.setdefault(name, module)


def saved(folder: Path, name: str) -> Any:
    return yaml.safe_load((folder / "logs" / name / "version_0" / "config.yaml").read_text())[
        "model"
    ]["init_args"]


@pytest.mark.parametrize("name", list(COMMANDS))
@pytest.mark.slow
def test_an_example_runs(user_folder: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    result = run(COMMANDS[name], user_folder)
    assert all(np.isfinite(value) for value in result.values())
    assert 1 <= result["steps"] <= 6
    assert "One step at a time" not in capsys.readouterr().out
    (folder,) = (user_folder / "logs").glob("*/version_0")
    assert json.loads((folder / "metrics.json").read_text()) == result


@pytest.mark.slow
def test_what_the_examples_say_is_what_trained(user_folder: Path) -> None:
    results = {
        name: run(COMMANDS[name], user_folder)
        for name in ("configs/focal_f1.yaml", "focal_class", "resnet")
    }
    assert saved(user_folder, "focal_f1")["metrics"]["f1"]["init_args"]["num_classes"] == 10
    assert saved(user_folder, "focal_class")["gamma"] == 1.5
    assert saved(user_folder, "resnet")["net"]["init_args"]["num_classes"] == 10
    for name in ("configs/focal_f1.yaml", "focal_class"):
        assert {"test/loss", "test/f1", "test/num_samples"} <= results[name].keys()
        assert "test/acc" not in results[name]
    best = user_folder / "logs" / "focal_f1" / "version_0" / "checkpoints" / "best.ckpt"
    again = run(f"python scripts/evaluate.py --ckpt_path {best}", user_folder)
    assert again == {
        key: value
        for key, value in results["configs/focal_f1.yaml"].items()
        if key.startswith("test/")
    }


def test_the_callback_writes_its_table(user_folder: Path) -> None:
    run(COMMANDS["table"], user_folder)
    with (user_folder / "table.csv").open() as file:
        (row,) = csv.DictReader(file)
    assert {"epoch", "train/loss", "val/acc"} <= row.keys()


@pytest.mark.parametrize("config", ["small_net", pytest.param("mnist_mlp", marks=pytest.mark.slow)])
def test_an_edit_in_place_takes_effect(
    user_folder: Path, config: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the configs that make several steps at once."""
    command = f"python scripts/train.py --config configs/{config}.yaml --name"
    before = run(f"{command} before", user_folder)
    edit = re.search(r"```python\n(        loss = .*?)```", PAGE, re.S)
    assert edit
    first = edit[1].splitlines(keepends=True)[0]
    own = Path(str(importlib.import_module("project.classifier").__file__)).read_text()
    assert own.count(first) == 1
    (user_folder / "project" / "classifier.py").write_text(own.replace(first, edit[1]))
    monkeypatch.delitem(sys.modules, "project.classifier")
    after = run(f"{command} after", user_folder)
    assert after["test/loss"] != before["test/loss"]
    assert after["steps"] == before["steps"]
