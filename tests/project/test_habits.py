"""What surrounds the code agrees with it: versions, the checks of a commit and of CI."""

import io
import json
import pickle
import re
import shlex
import subprocess
import sys
import tomllib
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import pytest
import torch
import yaml
from example.data.synthetic import SyntheticImages
from lightning import Trainer
from pages import REPO, script
from PIL import Image

from lightbase.data.images import ImageFolder
from lightbase.data.module import BaseDataModule

OWN = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
CI = (REPO / ".ci" / "run").read_text()


def test_one_version_everywhere() -> None:
    assert yaml.safe_load((REPO / "CITATION.cff").read_text())["version"] == OWN["version"]
    headings = re.findall(r"^## (.*)$", (REPO / "CHANGELOG.md").read_text(), re.M)
    released = [heading for heading in headings if heading != "Unreleased"]
    assert re.fullmatch(re.escape(OWN["version"]) + r" \(\d{4}-\d\d-\d\d\)", released[0])


@pytest.mark.parametrize("name", ["train", "export"])
def test_version_needs_none_of_the_imports(name: str) -> None:
    command = [sys.executable, "-X", "importtime", f"scripts/{name}.py", "--version"]
    shown = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=True)
    assert re.fullmatch(
        rf"{OWN['name']} {OWN['version']}, lightbase [\d.]+, torch [\d.+a-z]+, "
        r"lightning [\d.]+, Python [\d.]+\n",
        shown.stdout,
    )
    assert " torch" not in shown.stderr


def test_version_beside_other_flags(capsys: pytest.CaptureFixture[str]) -> None:
    for name, flags in (
        ("train", ["--config", "configs/default.yaml"]),
        ("evaluate", ["--data.batch_size", "7"]),
    ):
        with pytest.raises(SystemExit) as caught:
            script(name).main([*flags, "--version"])
        assert not caught.value.code
        assert capsys.readouterr().out.startswith(f"{OWN['name']} {OWN['version']}, lightbase ")


def test_the_workflow_calls_ci_and_pytest() -> None:
    jobs = yaml.safe_load((REPO / ".github" / "workflows" / "tests.yml").read_text())["jobs"]
    runs = {
        name: [step["run"] for step in job["steps"] if "run" in step] for name, job in jobs.items()
    }
    assert runs["linux"] == ["bash .ci/run"]
    install, test = runs["macos-and-windows"]
    assert install == 'pip install -c constraints.txt -e ".[dev]"'
    assert install.removeprefix("pip install") in CI
    assert test == "pytest"
    lowest = OWN["requires-python"].removeprefix(">=")
    assert lowest in jobs["linux"]["strategy"]["matrix"]["python"]
    assert f"python:{lowest}-slim" in (REPO / "Dockerfile").read_text()


def test_a_commit_is_checked_as_in_ci() -> None:
    (repo,) = yaml.safe_load((REPO / ".pre-commit-config.yaml").read_text())["repos"]
    entries = [hook["entry"] for hook in repo["hooks"] if hook["id"] != "large"]
    assert re.search(r"^ruff.*\nmypy$", CI, re.M | re.S)[0].splitlines() == entries


@pytest.mark.linux
def test_large_files_are_refused(tmp_path: Path) -> None:
    (repo,) = yaml.safe_load((REPO / ".pre-commit-config.yaml").read_text())["repos"]
    (entry,) = [hook["entry"] for hook in repo["hooks"] if hook["id"] == "large"]
    (tmp_path / "a small one").write_bytes(bytes(400_000))
    (tmp_path / "a large one").write_bytes(bytes(600_000))
    check = [*shlex.split(entry), str(tmp_path / "a small one")]
    assert subprocess.run(check).returncode == 0
    refused = subprocess.run(
        [*check, str(tmp_path / "a large one")], capture_output=True, text=True
    )
    assert (refused.returncode, refused.stdout) == (1, f"{tmp_path}/a large one\n")


@pytest.mark.parametrize("kind", ["images", "folder"])
def test_what_a_worker_gets_can_be_handed_to_a_new_process(tmp_path: Path, kind: str) -> None:
    """As on macOS and Windows, where nothing is forked."""
    data: BaseDataModule = SyntheticImages(num_train=100, num_test=20, num_workers=1)
    if kind == "folder":
        for name in ("a", "b"):
            (tmp_path / "train" / name).mkdir(parents=True)
            for i in range(10):
                Image.new("RGB", (8, 8)).save(tmp_path / "train" / name / f"{i}.png")
        data = ImageFolder(data_dir=str(tmp_path), num_workers=1, batch_size=4)
    data.trainer = Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    data.prepare_data()
    data.setup("fit")
    loader = data.train_dataloader()
    buffer = io.BytesIO()
    ForkingPickler(buffer).dump((loader.dataset, loader.collate_fn, loader.worker_init_fn))
    again = pickle.loads(buffer.getvalue())[0]
    indices = [3, 5]
    assert torch.equal(again.__getitems__(indices)[0], loader.dataset.__getitems__(indices)[0])


def test_what_the_containers_name_is_there() -> None:
    dockerfile = (REPO / "Dockerfile").read_text()
    for line in re.findall(r"^COPY ([^.].*) \S+$", dockerfile, re.M):
        assert all((REPO / name).is_file() for name in line.split())
    text = (REPO / ".devcontainer" / "devcontainer.json").read_text()
    container = json.loads(re.sub(r"^\s*//.*", "", text, flags=re.M))
    assert (REPO / ".devcontainer" / container["build"]["dockerfile"]).is_file()
    assert f" {container['remoteUser']}\n" in dockerfile
