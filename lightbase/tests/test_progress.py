"""What a terminal shows while a training runs, and what a file gets instead."""

import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from lightbase.run.checkpoint import RunCheckpoint
from lightbase.run.record import RunRecorder
from lightbase.watch.progress import EpochLines

HEADER = ["epoch", "train/loss", "train/acc", "val/loss", "val/acc", "time"]
TIME = r"\[00:0\d<00:00, [\d.]+it/s, train/loss="


def test_a_terminal_gets_a_bar_below_the_lines(train, capfd, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    train("--trainer.enable_progress_bar true --trainer.max_epochs 3")
    shown = re.split(r"[\r\n]", capfd.readouterr().out)
    bars = [line for line in shown if re.match(r"(Epoch|Testing|Valid).*%\|", line)]
    assert any(re.match(rf"Epoch 2/3: 100%.*\| 19/19 {TIME}", x) for x in bars)
    lines = [line for line in shown if re.match(r"epoch|\d/3", line)]
    assert [line.split()[0] for line in lines] == ["epoch", "1/3", "2/3", "3/3"]
    assert lines[0].split() == HEADER


def table(text: str) -> list[list[str]]:
    """Return the words of each line of the table."""
    lines = [line for line in text.splitlines() if re.match(r"epoch|\d+/\d", line)]
    return [line.replace(" s", "").split() for line in lines]


def test_a_file_gets_a_row_an_epoch(train, capsys):
    """An epoch without a validation has no values of an earlier one, and a resumed run
    has the same columns. The names of val/ come when there are values."""
    flags = "--trainer.check_val_every_n_epoch 2 --trainer.max_epochs"
    train(flags, 3)
    header, first, second_header, second, third = table(capsys.readouterr().out)
    assert header == ["epoch", "train/loss", "train/acc", "time"]
    assert (len(first), first[0]) == (4, "1/3")
    assert second_header == HEADER
    assert all(re.fullmatch(r"\d\.\d{3}|0\.\d{4,5}", x) for x in second[1:5])
    assert (second[0], second[-1]) == ("2/3", "best")
    assert third[3:5] == ["-", "-"]
    train(flags, 4, "--ckpt_path last")
    header, fourth = table(capsys.readouterr().out)
    assert header == HEADER
    assert fourth[0] == "4/4"


def test_the_best_epoch_so_far_is_marked(capsys) -> None:
    best = RunCheckpoint(Path(), "best", "val/acc", "max")
    strategy = SimpleNamespace(reduce_boolean_decision=lambda x, all=True: x)
    trainer: Any = SimpleNamespace(
        checkpoint_callbacks=[best], max_epochs=-1, strategy=strategy
    )
    recorder = RunRecorder({}, "")
    trainer.callbacks = [recorder]
    lines = EpochLines()
    # equal values: the lower loss; NaN is no best
    values = [(0.5, 1), (0.7, 2), (0.7, 1), (0.7, 1), (math.nan, 0), (0.8, 3)]
    for epoch, (acc, loss) in enumerate(values):
        trainer.current_epoch = epoch
        row = {"val/loss": torch.tensor(loss), "val/acc": torch.tensor(acc)}
        trainer.callback_metrics = row
        recorder.history.append({"epoch": epoch + 1, "val/loss": loss, "val/acc": acc})
        lines.on_train_epoch_end(trainer, SimpleNamespace(print=print))
        if best.check_monitor_top_k(trainer, row["val/acc"]):
            best.best_k_models = {"best.ckpt": row["val/acc"]}
            best.kth_best_model_path = "best.ckpt"
            best.best_model_score = row["val/acc"]
    rows = capsys.readouterr().out.splitlines()[1:]
    marked = [row.endswith("best") for row in rows]
    assert marked == [True, True, True, False, False, True]
