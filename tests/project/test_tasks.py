"""Each page of docs/tasks: its files, written as they stand, train to the result that the page
names; evaluate.py gives the same numbers; an interrupted training goes on to the same weights."""

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import Callback
from pages import PACKAGE, REPO, commands, script, write_files

from lightbase import MayMissSteps

PAGES = sorted((REPO / "docs" / "tasks").glob("[!R]*.md"))
QUIET = ["--device_monitor", "false", "--step_timer", "false"]


class Interrupt(MayMissSteps, Callback):
    """Ctrl-C in the second epoch, once."""

    is_done = False

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.current_epoch == 1 and not Interrupt.is_done:
            Interrupt.is_done = True
            os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture
def user_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    modules = {*sys.modules}
    yield tmp_path
    for name in {*sys.modules} - modules:
        if name.startswith(f"{PACKAGE}."):
            del sys.modules[name]


def run(command: str, folder: Path, *more: str) -> Any:
    _, path, *args = shlex.split(command, comments=True)
    name = Path(path).stem
    if name in ("train", "sweep", "runs"):
        args += ["--trainer.default_root_dir", str(folder / "logs")]
    return script(name).main([*args, *more])


def weights(run_folder: Path) -> dict[str, torch.Tensor]:
    checkpoint = torch.load(run_folder / "checkpoints" / "last.ckpt", weights_only=True)
    return checkpoint["state_dict"]  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_trains_evaluates_and_resumes_as_it_stands(page, user_folder, monkeypatch):
    text = page.read_text()
    write_files(text, user_folder, monkeypatch)
    monkeypatch.syspath_prepend(Path(__file__).parent)  # a config names Interrupt
    trainings: list[tuple[str, dict[str, Any], Path]] = []  # command, metrics, folder of the run
    for command in commands(text):
        if command.startswith("pip "):
            continue
        if not command.startswith("python scripts/"):
            subprocess.run(command, shell=True, check=True)
            continue
        result = run(command, user_folder)
        if "scripts/train.py" in command:
            files = (user_folder / "logs").rglob("version_*/metrics.json")
            trainings.append((command, result, max(files, key=os.path.getmtime).parent))
    name, value = re.search(r"reaches `(\w+/\w+)` ([\d.]+)", text).groups()  # type: ignore[union-attr]
    assert trainings[-1][1][name] == pytest.approx(float(value), rel=0.1), "not what the page says"

    for i, (command, metrics, straight) in enumerate(trainings):
        best = straight / "checkpoints" / "best.ckpt"
        again = run(f"python scripts/evaluate.py --ckpt_path {best}", user_folder)
        assert again == {key: metrics[key] for key in again}
        monkeypatch.setattr(Interrupt, "is_done", False)
        interrupt = f"--trainer.callbacks+={__name__}.Interrupt"
        with pytest.raises(SystemExit):
            run(command, user_folder, "--name", f"stopped_{i}", interrupt)
        run(f"python scripts/train.py --name stopped_{i} --ckpt_path last", user_folder)
        one, two = (
            weights(folder) for folder in (straight, user_folder / f"logs/stopped_{i}/version_0")
        )
        assert all(torch.equal(one[key], two[key]) for key in one)
