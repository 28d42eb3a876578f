"""What a terminal shows while a training runs, and what a file gets instead."""

import os
import re
from types import SimpleNamespace
from typing import Any

import pytest

from lightbase.extras.progress import TrainingProgressBar

NUMBER = r"\d\.\d{4}"
TIME = r"\[00:0\d<00:00, [\d.]+it/s, train/loss="


@pytest.mark.parametrize("columns", [160, 80])
def test_a_terminal_gets_a_bar_below_the_lines(train, capfd, monkeypatch, columns):
    size = os.terminal_size((columns, 24))
    monkeypatch.setattr(os, "get_terminal_size", lambda *_: size)
    train("--trainer.enable_progress_bar true --trainer.max_epochs 3")
    shown = re.split(r"[\r\n]", capfd.readouterr().out)
    bars = [line for line in shown if re.match(r"(Epoch|Testing).*%\|", line)]
    assert any(re.match(rf"Epoch 2 of 3: 100%.*\| 19/19 {TIME}", x) for x in bars)
    assert any("val/acc=0." in line for line in bars) == (columns == 160)
    assert max(map(len, bars)) == columns - 1
    lines = [re.match(r"Epoch (\d) of 3: train", line) for line in shown]
    assert [line[1] for line in lines if line] == ["1", "2", "3"]


def test_a_file_gets_a_line_an_epoch(train, capsys):
    """An epoch without a validation has no values of an earlier one."""
    train("--trainer.check_val_every_n_epoch 2 --trainer.max_epochs 3")
    out = capsys.readouterr().out
    lines = [line for line in out.splitlines() if line.startswith("Epoch")]
    assert ["val/" in line for line in lines] == [False, True, False]
    assert re.match(rf"Epoch 2 of 3: .*val/acc {NUMBER}, \d\.\d s$", lines[1])


def test_the_rate_of_a_resumed_epoch_counts_from_there_on():
    loop = SimpleNamespace(batch_idx=899)
    options = {"max_epochs": 2, "current_epoch": 1, "num_training_batches": 1000}
    trainer: Any = SimpleNamespace(fit_loop=loop, is_global_zero=True, **options)
    bar = TrainingProgressBar()
    bar.setup(trainer, None, "fit")  # type: ignore[arg-type]
    bar.on_train_start(trainer)
    shown = bar.train_progress_bar.format_dict
    assert (shown["n"], shown["initial"], shown["total"]) == (900, 900, 1000)
    bar.on_exception()
