"""sweep.py: searches, grids and cross-validations, which continue after a kill without
losing or repeating a trial."""

import os
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import programs
import pytest
from filelock import FileLock
from optuna.distributions import FloatDistribution, IntDistribution
from paths import HERE, TINY, script

from lightbase.commands import sweep as sweep_module
from lightbase.commands.sweep import Sweep, Trial, describe_progress, main, read_search
from lightbase.core.record import RunRecorder
from lightbase.core.run import main as train_main
from lightbase.core.signals import SIGNALS

LR = "model.lr=log:1e-3..1e-1"
Run = Callable[..., list[Trial]]


@pytest.mark.parametrize(
    ("search", "values"),
    [
        ("model.lr=log:1e-4..1e-1", FloatDistribution(1e-4, 1e-1, log=True)),
        ("model.optimizer_args.momentum=0.5..1", FloatDistribution(0.5, 1.0)),
        ("data.batch_size=log:16..512", IntDistribution(16, 512, log=True)),
        ("--trainer.max_epochs=-1..9", IntDistribution(-1, 9)),
        ("model.lr=1e-3, 0.1,1", ["1e-3", "0.1", "1"]),
        (
            "a={b: [1,2], c: 2},'d,e',[3,[4,5]]",
            ["{b: [1,2], c: 2}", "'d,e'", "[3,[4,5]]"],
        ),
    ],
)
def test_what_a_search_means(search: str, values: Any) -> None:
    dimension = read_search(search)
    assert dimension.flag == search.partition("=")[0].removeprefix("--")
    assert values == (dimension.range or dimension.texts)


def test_a_value_is_typed_with_all_its_digits() -> None:
    assert read_search("model.lr=1e-3,0.1").argument("1e-3") == "--model.lr=1e-3"
    assert (
        read_search(LR).argument(0.0012345678901234567)
        == "--model.lr=0.0012345678901234567"
    )


WRONG = [
    (["--search", "model.lr"], "give FLAG=a,b,c"),
    (["--search", "model.lr=0.1..0.01"], "`low <= high` must hold"),
    (["--search", "model.lr=0.1,,0.2"], "give FLAG=a,b,c"),
    (
        ["--search", "modle.lr=0.1,0.2"],
        "unknown argument --modle.lr; did you mean --model.lr?",
    ),
    (["--search", "model.lr=0.1,fast"], "model.lr: 'fast': Not of type PositiveFloat"),
    (["--search", "data.fold=0,1,2", "--data.num_folds", "2"], "no such fold"),
    (["--search", "name=a,b"], "name cannot be searched"),
    (["--search", "trainer.strategy=auto,ddp"], "on one device"),
    (["--search", LR], "--trials N: how many?"),
    (
        ["--search", LR, "--search", "seed_everything=1,2", "--trials", "4"],
        "search lists only",
    ),
    (
        ["--search", LR, "--trials", "4", "--data.val_fraction", "0"],
        "trials by a validation",
    ),
]


@pytest.mark.parametrize(("flags", "message"), WRONG)
def test_what_is_wrong_is_refused_before_a_trial(flags, message, tmp_path, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--config", TINY, "--trainer.default_root_dir", str(tmp_path), *flags])
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) <= 2
    assert not list(tmp_path.iterdir())


@pytest.fixture
def sweep(tmp_path: Path) -> Run:
    """Runs sweep.py on tests/tiny.yaml in this process."""

    def run(*flags: str, name: str = "tried") -> list[Trial]:
        where = ["--trainer.default_root_dir", str(tmp_path), "--name", name]
        return main(["--config", TINY, *where, *flags])

    return run


def test_without_optuna_there_are_grids(sweep, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    monkeypatch.setitem(sys.modules, "optuna.distributions", None)
    with pytest.raises(SystemExit):
        sweep("--search", LR, "--trials", "2")
    assert 'Optuna: pip install -e ".[sweep]"' in capsys.readouterr().err
    (trial,) = sweep(
        "--search", "model.lr=0.1,0.2", "--trials", "1", "--trainer.max_epochs", "1"
    )
    assert (trial.state, trial.values) == ("finished", {"model.lr": "0.1"})


class Interrupted(BaseException):
    """Like a kill: nothing is saved or recorded."""


@pytest.mark.slow
def test_a_search_continues_after_a_kill_as_if_there_had_been_none(
    sweep, tmp_path, capsys, monkeypatch
):
    search = ("--search", LR, "--search", "data.batch_size=16,32", "--trials", "3")
    expected = [(trial.values, trial.best) for trial in sweep(*search, name="alone")]
    write = RunRecorder.on_validation_end

    def kill(self: Any, trainer: Any, module: Any) -> None:
        write(self, trainer, module)
        if (
            self.run
            and "trial_001" in str(self.run.folder)
            and trainer.current_epoch == 1
        ):
            raise Interrupted

    with monkeypatch.context() as patched:
        patched.setattr(RunRecorder, "on_validation_end", kill)
        with pytest.raises(Interrupted):
            sweep(*search)
    trials = sweep(*search)
    assert [(trial.values, trial.best) for trial in trials] == expected
    environment = tmp_path / "tried" / "trial_001" / "version_0" / "environment.txt"
    assert environment.read_text().count("git commit: ") == 2  # starts
    assert not list((tmp_path / "tried").glob("trial_*/version_1")), (
        "the run continues in place"
    )

    shutil.rmtree(tmp_path / "tried" / "trial_002")
    # killed before its first checkpoint
    first = tmp_path / "tried" / "trial_000"
    (first / "version_0" / "metrics.json").unlink()
    shutil.rmtree(first / "version_0" / "checkpoints")
    Trial(first, Trial.read(first).values).write()
    capsys.readouterr()
    trials = sweep(*search[:-1], "4")
    assert [(trial.values, trial.best) for trial in trials[:3]] == expected
    assert len(trials) == 4
    best = max(trials, key=lambda trial: trial.best or 0)
    flags, table = capsys.readouterr().out.splitlines()[-2:]
    again = train_main(
        [*shlex.split(flags.removeprefix("Best flags: ")), "--name", "again"]
    )
    assert again["test/acc"] == best.result("metrics.json")["test/acc"]
    monkeypatch.chdir(tmp_path)
    script("runs").main(shlex.split(table.removeprefix("Tests and curves: "))[2:])
    assert capsys.readouterr().out.count("finished") == 4
    assert (tmp_path / "curves.png").exists()
    for args, before in (
        (
            [*search[:2], "--trials", "4"],
            "['model.lr=log:1e-3..1e-1', 'data.batch_size=16,32']",
        ),
        ([*search, "--trainer.max_epochs", "3"], "2"),
    ):
        with pytest.raises(SystemExit):
            sweep(*args)
        assert f"tried has {before}\ngive the same" in capsys.readouterr().err


def test_a_failed_trial_is_recorded_and_the_others_are_trained(
    sweep: Run, capsys: Any
) -> None:
    nan, sound = sweep("--search", "model.lr=1e30,0.1", "--trainer.max_epochs", "1")
    assert [nan.state, sound.state] == ["failed", "finished"]
    assert "NaN or infinite after step" in nan.reason
    best, shown = f"{sound.best:.4f}", capsys.readouterr().out.splitlines()[-7:]
    assert re.match(
        r"Trial 1 of 2, 0:\d\d left; lr 1e30: failed, UserError: ", shown[0]
    )
    assert shown[1] == f"Trial 2 of 2, best val/acc {best}, 0:00 left; lr 0.1: {best}"
    assert shown[3].split()[:4] == ["failed", "trial_000", "-", "1e30"]
    assert shown[4].split() == ["best", "trial_001", best, "0.1", "finished"]


def test_the_time_left_counts_the_trials_of_all_processes(tmp_path: Path) -> None:
    sweep = Sweep([], [], 6, tmp_path, {"monitor": "val/loss", "monitor_mode": "min"})
    for i, state in enumerate(
        ("finished", "failed", "running", "running")
    ):  # the last was killed
        trial = Trial(tmp_path / f"trial_{i}", {"a": 0.12345678}, state)
        trial.folder.mkdir()
        trial.write()
    with FileLock(tmp_path / "trial_2" / ".lock"):
        line = describe_progress(sweep, trial, seconds=100.4)
    assert line == "Trial 2 of 6, best val/loss -, 3:21 left; a 0.1235: -"
    groups: Any = [
        [SimpleNamespace(best=x) for x in pair] for pair in ((0.1, 0.9), (0.4, 0.4))
    ]
    assert sweep.best(groups) is groups[1], "the best mean"


def test_a_signal_during_a_failed_trial_ends_the_sweep(
    sweep, tmp_path, capsys, monkeypatch
):
    def fail(*_: Any) -> None:
        SIGNALS.waits = True  # as in a training that fails
        signal.raise_signal(signal.SIGTERM)
        raise AttributeError("a bug")

    monkeypatch.setattr(sweep_module, "train", fail)
    with pytest.raises(SystemExit) as caught:
        sweep("--search", "model.lr=0.1,0.2")
    assert caught.value.code == 143
    assert "Stopped by SIGTERM; the same command continues" in capsys.readouterr().err
    (file,) = (tmp_path / "tried").glob("*/trial.json")
    assert Trial.read(file.parent).reason == "AttributeError: a bug"
    assert "Traceback" in (file.parent / "output.txt").read_text()


@pytest.mark.slow
def test_folds_are_a_grid_that_ends_with_mean_and_standard_error(
    sweep: Run, capsys: Any
) -> None:
    flags = (
        "--data.num_folds",
        "3",
        "--search",
        "data.fold=0,1,2",
        "--trainer.max_epochs",
        "1",
    )
    trials = sweep(*flags, "--data.val_fraction", "0", "--search", "model.lr=0.01,0.1")
    shown = capsys.readouterr().out
    assert [trial.values["data.fold"] for trial in trials] == [
        "0",
        "0",
        "1",
        "1",
        "2",
        "2",
    ]
    tests = [trial.result("metrics.json")["test/acc"] for trial in trials[1::2]]
    spread = statistics.stdev(tests)
    row = next(line for line in shown.splitlines() if re.match(r"0\.1 +test/acc", line))
    expected = [statistics.fmean(tests), spread, spread / 3**0.5]
    assert row.split()[2:] == ["3", *(f"{value:.4g}" for value in expected)]
    assert "Best" not in shown, "nothing is selected on test data"


@pytest.mark.slow
def test_the_same_command_continues(train: Callable[..., Any], tmp_path: Path) -> None:
    """With two workers, killed and stopped, then ended by two commands at once."""
    values = ["0.001", "0.003", "0.01", "0.03", "0.1", "0.3"]
    flags = (
        f"--config {os.path.relpath(TINY, tmp_path)} --trainer.default_root_dir logs "
    )
    flags += f"--search model.lr={','.join(values)} --name grid --trainer.max_epochs 3"
    command = [sys.executable, str(HERE / "scripts" / "sweep.py"), *flags.split()]
    how: Any = {"cwd": tmp_path, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    for number in (signal.SIGKILL, signal.SIGTERM):
        process = programs.start([*command, "--num_workers", "2"], **how)
        assert process.stdout
        while not process.stdout.readline().startswith("Trial "):
            assert process.poll() is None
        process.send_signal(number)
        rest = process.communicate(timeout=60)[0]
        assert process.returncode == (-9 if number == signal.SIGKILL else 143)
    assert "Stopped by SIGTERM; the same command continues" in rest
    processes = [programs.start(command, **how) for _ in range(2)]
    for process in processes:
        output, _ = process.communicate(timeout=300)
        assert process.returncode == 0, output
        assert "Best flags" in output
    trials = [
        Trial.read(tmp_path / "logs" / "grid" / f"trial_{i:03d}") for i in range(6)
    ]
    assert [trial.values["model.lr"] for trial in trials] == values
    assert [trial.state for trial in trials] == ["finished"] * 6
    for trial in trials[::3]:
        alone = train("--trainer.max_epochs", 3, "--model.lr", trial.values["model.lr"])
        loss = trial.result("metrics.json")["test/loss"]
        assert alone["test/loss"] == pytest.approx(loss, abs=1e-7)
