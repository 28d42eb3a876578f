"""sweep.py: searches, grids and cross-validations, which continue after a kill without
losing or repeating a trial."""

import errno
import importlib
import json
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import programs
import pytest
from example.classifier import Classifier
from paths import HERE, TINY, fails, script

from lightbase.config.errors import UserError
from lightbase.config.files import read_json
from lightbase.run.record import RunRecorder
from lightbase.run.signals import SIGNALS

optuna = pytest.importorskip("optuna")
sweep_module = importlib.import_module("lightbase.compare.sweep")
LR = "model.lr=log:1e-3..1e-1"


WRONG = {
    "model.lr=0.1..0.01": "`low <= high` must hold",
    "modle.lr=0.1,0.2": "unknown argument --modle.lr; did you mean --model.lr?",
    "model.lr=0.1,fast": "model.lr: 'fast': Not of type PositiveFloat",
    LR: "--trials N: how many?",
    f"{LR} --search seed_everything=1,2": "seed_everything cannot be searched",
    f"{LR} --trials 4 --data.val_fraction 0": "trials by a validation",
}


@pytest.mark.parametrize("search", WRONG)
def test_what_is_wrong_is_refused_before_a_trial(search, tmp_path, capsys, sweep):
    error = fails(capsys, 2, lambda: sweep(*f"--search {search}".split()))
    assert WRONG[search] in error
    assert not list(tmp_path.iterdir())


@pytest.fixture
def sweep(tmp_path):
    """Runs sweep.py on tests/tiny.yaml in this process."""

    def run(*flags, name="tried"):
        where = ["--trainer.default_root_dir", str(tmp_path), "--name", name]
        return script("sweep").main(["--config", TINY, *where, *flags])

    return run


def results(study):
    return [(trial.params, trial.value) for trial in study.trials]


class Interrupted(BaseException):
    """Like a kill: nothing is saved or recorded."""


def interrupt(*_, **__):
    raise Interrupted


@pytest.mark.slow
def test_a_search_continues_after_a_kill_as_if_there_had_been_none(
    sweep, tmp_path, capsys, monkeypatch
):
    """The second trial is killed after its second epoch."""
    search = ("--search", LR, "--search", "data.batch_size=16,32", "--trials", "3")
    expected = results(sweep(*search, name="alone"))
    write = RunRecorder.on_validation_end

    def kill(self, trainer, module):
        write(self, trainer, module)
        if "trial_001" in str(self.run.folder) and trainer.current_epoch == 1:
            raise Interrupted

    with monkeypatch.context() as patched:
        patched.setattr(RunRecorder, "on_validation_end", kill)
        with pytest.raises(Interrupted):
            sweep(*search)
    folder = tmp_path / "tried"
    with (folder / "study.journal").open("a") as journal:
        journal.write('{"op_code":')  # as a full disk or a kill may leave it
    assert results(sweep(*search)) == expected
    environment = folder / "trial_001" / "version_0" / "environment.txt"
    assert environment.read_text().count("git commit: ") == 2  # starts

    assert results(sweep(*search[:-1], "4"))[:3] == expected
    error = fails(capsys, 2, lambda: sweep("--search", LR, "--trials", "4"))
    assert f"tried has {list(search[1:4:2])}\ngive the same" in error
    error = fails(capsys, 2, lambda: sweep(*search, "--trainer.max_epochs", "3"))
    assert "tried has 2\ngive the same" in error


def test_a_trial_continues_wherever_it_was_killed(sweep, tmp_path, monkeypatch):
    """Before its first checkpoint, and after its end and before the study knew."""
    grid = ("--search", "model.lr=0.1", "--trainer.max_epochs", "1")
    run = tmp_path / "tried" / "trial_000" / "version_0"
    values = []
    with monkeypatch.context() as patched:
        patched.setattr(optuna.Study, "tell", interrupt)
        for _ in range(2):
            with pytest.raises(Interrupted):
                sweep(*grid)
            values.append(read_json(run / "progress.json")["best"])
            shutil.rmtree(run / "checkpoints")
            (run / "metrics.json").rename(run / "moved")
    (run / "moved").rename(run / "metrics.json")
    assert values == [sweep(*grid).best_value] * 2
    assert not (run / "checkpoints").exists(), "trained again"


def test_the_best_flags_have_the_best_value(sweep, capsys, monkeypatch):
    monkeypatch.setattr(sweep_module, "train_run", write_run)
    for mode, best in (("max", "0.2"), ("min", "0.1")):
        monitor = ("--monitor", "val/loss", "--monitor_mode", mode)
        sweep("--search", "model.lr=0.1,0.2", *monitor, name=mode)
        *_, flags, command = capsys.readouterr().out.splitlines()
        assert flags.startswith("Best flags: ")
        assert flags.endswith(f"--model.lr={best}")
        number = f"trial_00{['0.1', '0.2'].index(best)}"
        assert f"evaluate.py --ckpt_path {mode}/{number} --trainer" in command


@pytest.mark.parametrize(
    "repeats", ["seed_everything=0,1,2", "data.fold=0,1,2 --data.num_folds 3"]
)
def test_a_setting_is_ranked_by_the_mean_of_its_repeats(
    sweep, capsys, monkeypatch, repeats
):
    """The setting 0.1 has the best mean, but a failure; 0.3 has the best single trial.
    The table is the same when the sweep continues."""
    monkeypatch.setattr(sweep_module, "train_run", write_run)
    searches = f"--search {repeats} --search model.lr=0.1,0.2,0.3"
    outputs = []
    for _ in range(2):
        sweep(*searches.split(), "--monitor", "val/loss")
        outputs.append(capsys.readouterr().out.splitlines()[-8:])
    assert outputs[0] == outputs[1]
    header, *rows, flags, _, _, last = outputs[0]
    columns = ["model.lr", "n", "val/loss", "±", "95 % from", "to", "state"]
    values = [
        ["0.1", "2", "0.25", "0.07071", "0", "0.8853", "1 of 3 failed"],
        ["0.2", "3", "0.4", "0.2", "0", "0.8968", "complete"],
        ["0.3", "3", "0.5333", "0.4041", "0", "1.537", "complete"],
    ]
    if "fold" in repeats:  # the interval would be too narrow
        for row in (columns, *values):
            del row[4:6]
    assert re.split("  +", header) == columns
    assert [re.split("  +", row) for row in rows] == values
    assert flags.endswith("--model.lr=0.2")
    assert "--ckpt_path tried/trial_007 " in last


def write_run(args):
    """Write the files of a run whose best value is the product of model.lr and the
    number of the seed or fold, counted from 1. One trial of 0.1 fails, and the best
    trial of 0.3 is better than those of 0.2."""
    flags = dict(arg.split("=") for arg in args if "=" in arg)
    run = Path(flags["--trainer.default_root_dir"], flags["--name"], "version_0")
    lr = float(flags["--model.lr"])
    number = 1 + int(flags.get("--data.fold", flags.get("--seed_everything", 41)))
    if (lr, number) == (0.1, 1):
        raise UserError("failed")
    run.mkdir()
    best = {(0.3, 1): 0.1}.get((lr, number), lr * number)
    progress = {"monitor": "val/loss", "mode": "min", "best": best}
    (run / "progress.json").write_text(json.dumps(progress))
    (run / "metrics.json").write_text("{}")


CALLS = []


class Counted(Classifier):
    """Notes for each batch of a test which trial tests it."""

    def test_step(self, *args, **options):
        CALLS.append("test")
        return super().test_step(*args, **options)


@pytest.mark.parametrize(
    ("search", "is_tested"),
    [
        ("model.lr=0.1,0.2", False),
        ("data.fold=0,1 --data.num_folds 2", True),
    ],
)
def test_trials_that_are_compared_are_not_tested(sweep, tmp_path, search, is_tested):
    CALLS.clear()
    short = ["--trainer.max_epochs", "1", "--trainer.limit_train_batches", "2"]
    short += ["--model", "test_sweep.Counted", "--search", *search.split()]
    sweep(*short)
    assert bool(CALLS) == is_tested
    for file in tmp_path.rglob("metrics.json"):
        assert ("test/acc" in read_json(file)) == is_tested


def full_disk(*_):
    raise UserError("last.ckpt cannot be written") from OSError(errno.EFBIG, "full")


def signal_and_fail(*_):
    with SIGNALS.handled():
        SIGNALS.waits = True  # as in a training
        signal.raise_signal(signal.SIGTERM)
        raise AttributeError("a bug")


def test_a_full_disk_and_a_signal_end_the_sweep(sweep, tmp_path, monkeypatch):
    """A full disk is no result: the trial is trained again. A training that fails after
    a signal has failed."""
    grid = ("--search", "model.lr=0.1,0.2")
    for train, status in ((full_disk, 1), (signal_and_fail, 143)):
        monkeypatch.setattr(sweep_module, "train_run", train)
        with pytest.raises(SystemExit) as caught:
            sweep(*grid)
        assert caught.value.code == status
    assert "a bug" in (tmp_path / "tried" / "trial_000" / "output.txt").read_text()
    monkeypatch.setattr(sweep_module, "train_run", write_run)
    states = [trial.state.name for trial in sweep(*grid).trials]
    assert states == ["FAIL", "COMPLETE"]


@pytest.mark.slow
def test_the_same_command_continues(train, tmp_path, monkeypatch):
    """Two commands at once, one of which is killed or stopped, and then two that end
    the sweep."""
    flags = f"--config {TINY} --trainer.default_root_dir logs"
    flags += " --search model.lr=0.001,0.01,0.03,0.1 --name grid"
    command = [sys.executable, str(HERE / "scripts" / "sweep.py"), *flags.split()]
    how = {"cwd": tmp_path, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    processes = [programs.start(command, **how) for _ in range(2)]
    for process, number in zip(
        processes, (signal.SIGKILL, signal.SIGTERM), strict=True
    ):
        while not process.stdout.readline().startswith("trial "):
            assert process.poll() is None
        process.send_signal(number)
    outputs = [
        process.communicate(timeout=programs.LIMIT_S)[0] for process in processes
    ]
    assert [process.returncode for process in processes] == [-9, 143]
    assert "Stopped by SIGTERM; the same command continues" in outputs[1]
    processes = [programs.start(command, **how) for _ in range(2)]
    for process in processes:
        output, _ = process.communicate(timeout=programs.LIMIT_S)
        assert process.returncode == 0, output
        assert "Best flags" in output
    assert len(re.findall(r"trial_00\d +[\d.]+ .* complete", output)) == 4
    alone = train("--model.lr 0.1")
    command = output.splitlines()[-1].partition("evaluate.py ")[2].split()
    monkeypatch.chdir(tmp_path)
    command[1] = "grid/trial_003"  # the best one is no matter here
    assert script("evaluate").main(command).items() <= alone.items()
