"""What a terminal shows while a training runs, and what a file gets instead."""

import re

HEADER = ["epoch", "train/loss", "train/acc", "val/loss", "val/acc", "time"]


def table(text):
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
