"""Each page of docs/tasks: its files, written as they stand, train to the result that
the page names; evaluate.py gives the same numbers; an interrupted training of a few
steps in each epoch goes on to the same weights."""

import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from lightning import Callback
from pages import REPO, commands, run, write_files
from paths import argv
from written import equal, weights

FEW_STEPS = argv(
    "--trainer.limit_train_batches 8 --trainer.limit_val_batches 2",
    "--trainer.max_epochs 2 --test false --figures_every_n_epochs 0",
    "--device_monitor false --step_timer false",
)
PAGES = sorted((REPO / "docs" / "tasks").glob("[!R]*.md"))


class Interrupt(Callback):
    """Ctrl-C in the second epoch, once."""

    is_done = False

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.current_epoch == 1 and not Interrupt.is_done:
            Interrupt.is_done = True
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_trains_evaluates_and_resumes_as_it_stands(
    page, user_folder, monkeypatch
):
    text = page.read_text()
    write_files(text, user_folder, monkeypatch)
    monkeypatch.syspath_prepend(Path(__file__).parent)  # a config names Interrupt
    trainings = []  # command, metrics, folder of the run
    for command in commands(text):
        if command.startswith("pip "):
            continue
        if not command.startswith("python scripts/"):
            subprocess.run(command, shell=True, check=True)
            continue
        result = run(command)
        if "scripts/train.py" in command:
            files = (user_folder / "logs").rglob("version_*/metrics.json")
            newest = max(files, key=os.path.getmtime)
            trainings.append((command, result, newest.parent))
    # such as: reaches `test/acc` 0.871 ± 0.004 (3 seeds)
    form = r"reaches `(\w+/\w+)` ([\d.]+) ± ([\d.]+) "
    name, *numbers = re.search(form, text).groups()  # type: ignore[union-attr]
    mean, deviation = map(float, numbers)
    # a deviation of three seeds may be too small by half
    near = pytest.approx(mean, abs=4 * deviation + 0.02 * mean)
    assert trainings[-1][1][name] == near, "not what the page says"

    for _, metrics, folder in trainings:
        best = folder / "checkpoints" / "best.ckpt"
        again = run(f"python scripts/evaluate.py --ckpt_path {best}")
        assert again == {key: metrics[key] for key in again}
    monkeypatch.setattr(Interrupt, "is_done", False)
    command = trainings[-1][0]
    run(command, "--name", "straight", *FEW_STEPS)
    interrupt = f"--trainer.callbacks+={__name__}.Interrupt"
    with pytest.raises(SystemExit):
        run(command, "--name", "stopped", *FEW_STEPS, interrupt)
    run("python scripts/train.py --name stopped --ckpt_path last")
    logs = user_folder / "logs"
    straight = weights(logs / "straight/version_0")
    assert equal(straight, weights(logs / "stopped/version_0"))
