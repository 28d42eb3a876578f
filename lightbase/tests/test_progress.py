"""What a terminal shows while a training runs, and what a file gets instead."""

import os
import re
import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch.callbacks import Timer
from paths import Train
from small import Points

from lightbase.extras import progress

BAR = ("--trainer.enable_progress_bar", "true")


def epoch_lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The lines that begin with an epoch; a bar is written over itself."""
    lines = re.split(r"[\r\n]", capsys.readouterr().out)
    return [line for line in lines if line.startswith("Epoch")]


NUMBER = r"\d\.\d{4}"
SHORT = rf"0:0\d left, train/loss {NUMBER}, before: val/acc {NUMBER}"
WIDE = rf"[\d,]+ images/s, 0:0\d left, train/loss {NUMBER}, train/acc {NUMBER}, before: val/acc"


@pytest.mark.parametrize(("columns", "text"), [(160, WIDE), (80, SHORT)])
def test_a_terminal_gets_a_bar_below_the_lines(
    train, capfd, monkeypatch, columns, text
):
    monkeypatch.setattr(
        os, "get_terminal_size", lambda *_: os.terminal_size((columns, 24))
    )
    train(*BAR, "--trainer.max_epochs", 3)
    shown = re.split(r"[\r\n]", capfd.readouterr().out)
    assert [line[6] for line in shown if re.match(r"Epoch \d of 3: ", line)] == [
        "1",
        "2",
        "3",
    ]
    bars = [line for line in shown if re.match(r"Epoch \d/3: |Testing", line)]
    assert [line for line in bars if re.match(rf"Epoch 2/3: 100%.*\| {text}", line)]
    assert max(map(len, bars)) == columns - 1


def test_a_file_gets_a_line_an_epoch(train: Train, capsys) -> None:
    train()
    first, second = epoch_lines(capsys)
    assert re.match(
        rf"Epoch 1 of 2: .*val/acc {NUMBER}, [\d,]+ images/s, 0:0\d left$", first
    )
    assert re.match(r"Epoch 2 of 2: .*[\d,]+ images/s$", second)


def test_the_line_of_an_epoch_without_a_validation_has_no_old_one(train, capsys):
    train("--trainer.check_val_every_n_epoch", 2, "--trainer.max_epochs", 5)
    lines = epoch_lines(capsys)
    assert ["val/" in line for line in lines] == [False, True, False, True, False]


@pytest.mark.parametrize(
    ("limits", "left"),
    [
        ({"max_epochs": 2}, "0:30"),
        ({"max_epochs": 2, "max_steps": 4}, "0:10"),
        ({"max_epochs": 1000, "callbacks": [Timer(timedelta(seconds=90))]}, "1:30"),
        ({"max_epochs": 300}, "1:39:50"),
        ({"max_epochs": -1}, ""),
    ],
    ids=["epochs", "steps", "time", "long", "no end"],
)
def test_the_pace_counts_batches_and_the_nearest_limit(monkeypatch, limits, left):
    """A GradientAccumulationScheduler and several optimizers make steps of several
    batches, or several steps of a batch."""
    loop = SimpleNamespace(total_batch_idx=-1)
    counters = {
        "fit_loop": loop,
        "global_step": 0,
        "world_size": 2,
        "num_training_batches": 20,
    }
    options = {"max_steps": -1, "callbacks": [], "datamodule": Points(batch_size=5)}
    trainer: Any = SimpleNamespace(**counters | options | limits)
    monkeypatch.setattr(time, "monotonic", lambda: 0.0)
    pace = progress.Pace(trainer)
    assert pace.texts(trainer) == []
    monkeypatch.setattr(time, "monotonic", lambda: 10.0)
    loop.total_batch_idx, trainer.global_step = 9, 2
    assert pace.texts(trainer) == ["10 samples/s", *([f"{left} left"] if left else [])]
