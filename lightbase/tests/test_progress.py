"""What a terminal shows while a training runs, and what a file gets instead."""

import io
import re
from types import SimpleNamespace
from typing import Any

import pytest

from lightbase.commands.script import LastingOutput
from lightbase.core.errors import say, wrapped
from lightbase.core.signals import ERASE_LINE
from lightbase.extras.progress import TrainingProgressBar

NUMBER = r"\d\.\d{1,4}"  # four significant digits
TIME = r"\[00:0\d<00:00, [\d.]+it/s, train/loss="


@pytest.mark.parametrize("columns", [160, 80])
def test_a_terminal_gets_a_bar_below_the_lines(train, capfd, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    train("--trainer.enable_progress_bar true --trainer.max_epochs 3")
    shown = re.split(r"[\r\n]", capfd.readouterr().out)
    bars = [line for line in shown if re.match(r"(Epoch|Testing|Valid).*%\|", line)]
    assert any(re.match(rf"Epoch 2 of 3: 100%.*\| 19/19 {TIME}", x) for x in bars)
    assert any("val/acc=0." in line for line in bars) == (columns == 160)
    assert {len(line) for line in bars} == {columns - 3}  # and the ^C of a terminal
    # no metric is cut in two
    assert all(re.search(r"(it/s|=[\d.]+)\]$", line) for line in bars)
    lines = [re.match(r"Epoch (\d) of 3: train", line) for line in shown]
    assert [line[1] for line in lines if line] == ["1", "2", "3"]


def test_a_file_gets_a_line_an_epoch(train, capsys):
    """An epoch without a validation has no values of an earlier one."""
    train("--trainer.check_val_every_n_epoch 2 --trainer.max_epochs 3")
    out = capsys.readouterr().out
    lines = [line for line in out.splitlines() if line.startswith("Epoch")]
    assert ["val/" in line for line in lines] == [False, True, False]
    assert re.match(rf"Epoch 2 of 3: .*val/acc {NUMBER}, \d\.\d s$", lines[1])


class Terminal(io.StringIO):
    """Keeps what a terminal gets."""

    def isatty(self) -> bool:
        return True


def test_other_text_erases_the_bar_of_a_terminal(tmp_path, monkeypatch):
    monkeypatch.setattr(LastingOutput, "isatty", lambda _: True)
    with LastingOutput(str(tmp_path / "shown"), "w") as stdout:
        for text in (b"\rbar", b"printed\n", b"more\n", b"\rbar", b"\n", b"end\n"):
            stdout.write(text)
    shown = (tmp_path / "shown").read_bytes()
    assert shown == b"\rbar" + ERASE_LINE + b"printed\nmore\n\rbar\nend\n"


def test_lines_break_at_words_in_a_terminal_only(monkeypatch, capsys):
    command = "python scripts/train.py --ckpt_path " + "long/" * 20
    line = f"Stopped after epoch 3, val/acc 0.95; {'word ' * 3}--model.lr 0.1 goes on"
    monkeypatch.setenv("COLUMNS", "24")
    shown = wrapped(f"{line}\n{command}", Terminal()).splitlines()
    assert shown == [
        "Stopped after epoch 3,",
        "  val/acc 0.95; word",
        "  word word --model.lr",
        "  0.1 goes on",
        command,
    ]
    assert wrapped("short", Terminal()) == "short"
    say(line)
    assert capsys.readouterr().out == f"{line}\n"


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
