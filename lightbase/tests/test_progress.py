"""What a terminal shows while a training runs, and what a file gets instead."""

import os
import re
import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch.callbacks import Timer
from small import Points

from lightbase.extras import progress

NUMBER = r"\d\.\d{4}"
PACE = r"[\d,]+ images/s, 00:0\d left"
METRICS = rf"train/loss {NUMBER}, train/acc {NUMBER}, val/acc {NUMBER}"


@pytest.mark.parametrize(
    ("columns", "text"), [(160, f"{PACE}, {METRICS}"), (80, f"{PACE}, train/loss")]
)
def test_a_terminal_gets_a_bar_below_the_lines(
    train, capfd, monkeypatch, columns, text
):
    size = os.terminal_size((columns, 24))
    monkeypatch.setattr(os, "get_terminal_size", lambda *_: size)
    train("--trainer.enable_progress_bar true --trainer.max_epochs 3")
    shown = re.split(r"[\r\n]", capfd.readouterr().out)
    bars = [line for line in shown if re.match(r"(Epoch|Testing).*%\|", line)]
    assert any(re.match(rf"Epoch 2 of 3: 100%.*\| 19/19, {text}", x) for x in bars)
    assert max(map(len, bars)) == columns - 1
    lines = [re.match(r"Epoch (\d) of 3: train", line) for line in shown]
    assert [line[1] for line in lines if line] == ["1", "2", "3"]


def test_a_file_gets_a_line_an_epoch(train, capsys):
    """An epoch without a validation has no values of an earlier one."""
    train("--trainer.check_val_every_n_epoch 2 --trainer.max_epochs 3")
    out = capsys.readouterr().out
    lines = [line for line in out.splitlines() if line.startswith("Epoch")]
    assert ["val/" in line for line in lines] == [False, True, False]
    assert re.match(rf"Epoch 2 of 3: .*val/acc {NUMBER}, {PACE}$", lines[1])
    assert re.match(r"Epoch 3 of 3: .*[\d,]+ images/s$", lines[2])


@pytest.mark.parametrize(
    ("limits", "left"),
    [
        ({"max_epochs": 2}, ["00:30 left"]),
        ({"max_epochs": 2, "max_steps": 4}, ["00:10 left"]),
        (
            {"max_epochs": 1000, "callbacks": [Timer(timedelta(seconds=90))]},
            ["01:30 left"],
        ),
        ({"max_epochs": -1}, []),
    ],
    ids=["epochs", "steps", "time", "no end"],
)
def test_the_pace_counts_batches_and_the_nearest_limit(monkeypatch, limits, left):
    """A GradientAccumulationScheduler and several optimizers make steps of several
    batches, or several steps of a batch."""
    loop = SimpleNamespace(total_batch_idx=-1)
    counters = {"global_step": 0, "world_size": 2, "num_training_batches": 20}
    options = {"max_steps": -1, "callbacks": [], "datamodule": Points(batch_size=5)}
    trainer: Any = SimpleNamespace(fit_loop=loop, **counters | options | limits)
    monkeypatch.setattr(time, "monotonic", lambda: 0.0)
    pace = progress.Pace(trainer)
    assert pace.texts(trainer) == []
    monkeypatch.setattr(time, "monotonic", lambda: 10.0)
    loop.total_batch_idx, trainer.global_step = 9, 2
    assert pace.texts(trainer) == ["10 samples/s", *left]
