"""What a terminal shows while a training runs, and what a file gets instead."""

import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightbase.run.checkpoint import RunCheckpoint
from lightbase.run.record import RunRecorder
from lightbase.watch.progress import EpochLines, TrainingProgressBar, fitting_columns

HEADER = ["epoch", "train/loss", "train/acc", "val/loss", "val/acc", "time"]
TIME = r"\[00:0\d<00:00, [\d.]+it/s, train/loss="


@pytest.mark.parametrize("columns", [160, 80])
def test_a_terminal_gets_a_bar_below_the_lines(train, capfd, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    train("--trainer.enable_progress_bar true --trainer.max_epochs 3")
    shown = re.split(r"[\r\n]", capfd.readouterr().out)
    bars = [line for line in shown if re.match(r"(Epoch|Testing|Valid).*%\|", line)]
    assert any(re.match(rf"Epoch 2/3: 100%.*\| 19/19 {TIME}", x) for x in bars)
    assert any("val/acc=0." in line for line in bars) == (columns == 160)
    assert {len(line) for line in bars} == {columns - 3}  # and the ^C of a terminal
    # no metric is cut in two
    assert all(re.search(r"(it/s|=[\d.]+)\]$", line) for line in bars)
    lines = [line for line in shown if re.match(r"epoch|\d/3", line)]
    assert [line.split()[0] for line in lines] == ["epoch", "1/3", "2/3", "3/3"]
    assert lines[0].split() == HEADER
    assert max(map(len, lines)) <= 80


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


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_columns_that_do_not_fit_are_left_out(monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    names = [
        f"{split}/{x}" for split in ("val", "train") for x in ("acc", "loss", "f1")
    ]
    names.append("val/multiclass_f1_macro_average_of_all")
    best = RunCheckpoint(Path(), "best", "val/f1", "max")
    shown = fitting_columns(names, best)
    losses = ["train/loss", "val/loss", "val/f1"]
    assert [name for name in shown if name in losses] == losses
    lines = EpochLines()
    lines.columns = shown
    width = len(lines.line("99/1000", {}, "9999.9 s") + "  best")
    assert width <= columns
    assert (names[-1] in shown) == (columns == 200)


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
