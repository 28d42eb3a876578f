"""runs.py: the table, and what it reads."""

import csv
import errno
import json
import math
from pathlib import Path
from typing import Any

import pytest
from lightning import Callback
from matplotlib.figure import Figure
from paths import fails, script
from torch.utils.tensorboard import SummaryWriter

from lightbase.config.errors import UserError

runs = script("runs")


def write_run(
    root: Path, path: str, lr: float = 0.1, metric: str = "val/acc", **results: float
) -> Path:
    """A run's folder as train.py leaves it. results: `best`, and `test` unless it was
    stopped."""
    folder = root / path
    folder.mkdir(parents=True)
    config = {"name": path, "model": {"class_path": "M", "init_args": {"lr": lr}}}
    (folder / "config.yaml").write_text(json.dumps(config))
    progress: dict[str, Any] = {"epochs": 3, "train_seconds": 90.0}
    if "best" in results:
        mode = {"val/loss": "min"}.get(metric, "max")
        progress |= {"monitor": metric, "mode": mode, "best": results["best"]}
    (folder / "progress.json").write_text(json.dumps(progress))
    if "test" in results:
        metrics = {"test/acc": results["test"], "epochs": 4, "train_seconds": 120.0}
        (folder / "metrics.json").write_text(json.dumps(metrics))
    return folder


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "logs"
    write_run(root, "mlp/version_0", lr=0.1, best=0.8, test=0.7)
    write_run(root, "mlp/version_2", lr=0.01, best=0.9, test=0.6)
    write_run(root, "mlp/version_10", lr=0.1)
    write_run(root, "sweep/trial_3/version_0", lr=1.0, best=0.2, test=0.1)
    return root


def call(root: Path, *args: str) -> None:
    runs.main([*args, "--trainer.default_root_dir", str(root)])


def table(capsys: Any, root: Path, *args: str) -> list[dict[str, str]]:
    """What --csv writes."""
    file = root.parent / "runs.csv"
    call(root, *args, "--csv", str(file))
    capsys.readouterr()
    with file.open() as lines:
        return list(csv.DictReader(lines))


def refused(capsys: Any, root: Path, *args: str) -> str:
    return fails(capsys, 2, lambda: call(root, *args))


def test_the_table_has_a_row_for_each_run_and_the_settings_in_which_they_differ(
    root, capsys
):
    rows = [" ".join(row.values()) for row in table(capsys, root, "--test")]
    assert rows == [
        "mlp 0 finished 4 2.0 0.8 0.7 0.1",
        "mlp 2 finished 4 2.0 0.9 0.6 0.01",
        "mlp 10 stopped 3 1.5   0.1",
        "sweep/trial_3 0 finished 4 2.0 0.2 0.1 1.0",
    ]
    call(root, "mlp/version_0", "mlp/version_10")
    header, _, last = capsys.readouterr().out.splitlines()
    names = "name version status epochs minutes best val/acc"
    assert header.split() == names.split(), "these two have the same settings"
    assert last.split() == ["mlp", "10", "stopped", "3", "1.5", "-"]


def test_a_name_is_a_run_a_folder_of_runs_or_a_pattern(root, capsys):
    for names, chosen in (
        (["mlp/version_2", "sweep"], ["mlp/2", "sweep/trial_3/0"]),
        (["**/version_0"], ["mlp/0", "sweep/trial_3/0"]),
    ):
        rows = table(capsys, root, *names)
        assert [f"{row['name']}/{row['version']}" for row in rows] == chosen


def test_mistakes(root, tmp_path, capsys):
    assert f"run * below {tmp_path}/none" in refused(capsys, tmp_path / "none")
    assert "no run mpl below" in refused(capsys, root, "mpl")
    assert "the columns are name, version" in refused(capsys, root, "--sort", "loss")


def test_damaged_files_are_reported_and_break_nothing(root, capsys):
    damaged = {
        "mlp/version_0/config.yaml": "\0",
        # libyaml would end the process by a segmentation fault
        "mlp/version_1/config.yaml": "[" * 100_000,
        "mlp/version_2/metrics.json": '{"test/acc": 0.',
        "mlp/version_10/progress.json": '["epochs", 1]',
        "mlp/version_13/metrics.json": '{"train_seconds": []}',
        "mlp/version_14/progress.json": '{"best": "x", "monitor": "a", "mode": "max"}',
        "mlp/version_15/metrics.json": '{"test/acc": {}}',
    }
    for number in (1, 13, 14, 15):
        write_run(root, f"mlp/version_{number}")
    for path, content in damaged.items():
        (root / path).write_text(content)
    (root / "mlp/version_12").mkdir()
    (root / "mlp/version_12/progress.json").write_text("{}")  # nothing is known
    (root / "lightning_logs/version_0").mkdir(parents=True)  # of another program
    call(root, "mlp", "--test")
    output, error = capsys.readouterr()
    assert error.count(" has a damaged file: ") == len(damaged)
    rows = [line.split()[1:3] for line in output.splitlines()[1:]]
    numbers = (0, 1, 2, 10, 12, 13, 14, 15)
    assert sorted(rows) == sorted([str(number), "stopped"] for number in numbers)


def test_sorting_puts_the_best_first_and_what_has_no_value_last(root, capsys):
    def order(column: str) -> str:
        rows = table(capsys, root, "--sort", column)
        return " ".join(row["version"] + row["name"][0] for row in rows)

    assert order("test/acc") == "0m 2m 0s 10m"
    assert order("model.lr") == "2m 0m 10m 0s"
    write_run(root, "=cmd/version_3", metric="val/loss", best=0.3)
    write_run(root, "=cmd/version_4", metric="val/loss", best=0.123456789)
    assert order("best val/loss") == "4= 3= 0m 2m 10m 0s"


def test_who_chooses_by_the_test_is_warned(root, capsys):
    call(root, "--sort", "test/acc")
    output, error = capsys.readouterr()
    assert "test/acc" in output.splitlines()[0]
    assert error.startswith("Note: the best of several test numbers is too good")
    assert len(error.splitlines()) == 1
    call(root, "--sort", "best val/acc", "--test")
    assert not capsys.readouterr().err


def test_a_seed_that_two_starts_have_trained_counts_once(tmp_path, capsys):
    root = tmp_path / "logs"
    for path, seed, best in (
        ("a/seed_1/version_0", 1, 0.5),
        ("a/seed_1/version_1", 1, 0.7),
        ("a/seed_2/version_0", 2, 0.9),
        ("a/seed_2/version_1", 2, None),  # was stopped
    ):
        results = {"best": best, "test": best} if best else {}
        config = write_run(root, path, **results) / "config.yaml"
        content = json.loads(config.read_text()) | {"seed_everything": seed}
        config.write_text(json.dumps(content))
    write_run(root, "b/seed_1/version_0", lr=0.2, best=0.85, test=0.1)
    rows = table(capsys, root, "--group", "--sort", "best val/acc")
    assert [row["best val/acc"] for row in rows] == ["0.85", "0.8"]
    assert "test/acc" not in rows[0]


def test_a_lock_on_a_read_only_disk_is_no_error(root, capsys, monkeypatch):
    (root / "mlp/version_0/.lock").touch()

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("filelock.FileLock.acquire", refuse)
    call(root, "mlp")
    assert "mlp   0        finished" in capsys.readouterr().out


def test_the_best_is_chosen_by_validation(root, capsys):
    write_run(root, "first/version_0")  # without a value
    write_run(root, "loss/version_0", metric="val/loss", best=0.3)
    write_run(root, "loss/version_1", metric="val/loss", best=0.5)
    call(root, "first", "mlp", "--best")
    call(root, "loss", "--best")
    runs = ["mlp/version_2", "loss/version_0"]
    files = [f"{root}/{run}/checkpoints/best.ckpt" for run in runs]
    assert capsys.readouterr().out.split() == files
    assert "these have val/acc and val/loss" in refused(capsys, root, "--best")
    assert "these have no value of any" in refused(capsys, root, "first", "--best")


class Failing(Callback):
    def on_train_epoch_start(self, *_: Any) -> None:
        raise UserError("of the test")


def test_the_status_and_the_best_value_of_real_runs(train, tmp_path, capsys):
    """Finished, and then trained further until an error."""

    def row(*columns: str) -> list[str]:
        (values,) = table(capsys, tmp_path, "--test")
        return [values[column] for column in ("status", "epochs", *columns)]

    metrics = train()
    before = row("best val/acc", "test/acc")
    assert before[:2] == ["finished", "2"]
    assert before[3] == str(metrics["test/acc"])
    further = "--ckpt_path last --trainer.max_epochs 3"
    with pytest.raises(SystemExit):
        train(further, "--trainer.callbacks", "test_runs.Failing")
    assert row("best val/acc", "failed") == [
        *("failed", "2", before[2]),
        "UserError: of the test",
    ]


def test_the_plot_has_a_chart_for_each_curve(root, caplog, monkeypatch):
    for purge_step in (None, 0):  # the second start repeats both steps
        folder = str(root / "mlp/version_2")
        with SummaryWriter(folder, purge_step=purge_step) as writer:
            for tag in ("val_loss", "train/loss", "val_loss/cat", "lr", "val/acc"):
                writer.add_scalar(tag, 1, 0)
                writer.add_scalar(tag, math.nan, 1)
    figures: list[Any] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *_, **__: figures.append(self))
    monkeypatch.chdir(root)
    call(root, "mlp", "--plot", "x.svg")
    assert not caplog.records, "TensorBoard warns of points before a resume"
    charts = figures[0].axes
    names = [axes.get_ylabel() for axes in charts]
    assert names == ["train/loss", "val/acc", "val_loss"]  # none for a class
    assert str(charts[0].lines[1].get_ydata()) == "[ 1. nan]"
    (legend,) = figures[0].legends
    labels = [text.get_text() for text in legend.get_texts()]
    assert labels == ["mlp/version_0", "mlp/version_2", "mlp/version_10"]
