"""sweep.py: searches, grids and cross-validations, which continue after a kill without
losing or repeating a trial."""

import json
import os
import re
import runpy
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import programs
import pytest
from optuna.distributions import FloatDistribution, IntDistribution
from optuna.study import Study
from optuna.trial import FrozenTrial
from paths import HERE, TINY, fails, script

from lightbase.commands import sweep as sweep_module
from lightbase.commands.sweep import main
from lightbase.commands.train import main as train_main
from lightbase.core.record import RunRecorder
from lightbase.core.signals import SIGNALS
from lightbase.extras.sweep import read_search

LR = "model.lr=log:1e-3..1e-1"
Run = Callable[..., dict[str, FrozenTrial]]


@pytest.mark.parametrize(
    ("search", "values"),
    [
        ("model.lr=log:1e-4..1e-1", FloatDistribution(1e-4, 1e-1, log=True)),
        ("model.optimizer_args.momentum=0.5..1", FloatDistribution(0.5, 1.0)),
        ("data.batch_size=log:16..512", IntDistribution(16, 512, log=True)),
        ("trainer.max_epochs=-1..9", IntDistribution(-1, 9)),
        ("model.lr=1e-3, 0.1,1", ["1e-3", "0.1", "1"]),
        ("data.data_dir=../a,../b", ["../a", "../b"]),
        (
            "a={b: [1,2], c: 2},'d,e',[3,[4,5]]",
            ["{b: [1,2], c: 2}", "'d,e'", "[3,[4,5]]"],
        ),
    ],
)
def test_what_a_search_means(search: str, values: Any) -> None:
    flag, distribution = read_search(search)
    assert flag == search.partition("=")[0]
    if isinstance(values, list):
        assert list(distribution.choices) == values
    else:
        assert distribution == values


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
        "seed_everything cannot be searched",
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

    def run(*flags: str, name: str = "tried") -> dict[str, FrozenTrial]:
        where = ["--trainer.default_root_dir", str(tmp_path), "--name", name]
        return main(["--config", TINY, *where, *flags])

    return run


def states(trials: dict[str, FrozenTrial]) -> list[str]:
    return [trial.state.name for trial in trials.values()]


def results(trials: dict[str, FrozenTrial]) -> list[Any]:
    return [(trial.params, trial.value) for trial in trials.values()]


def metrics_of(folder: Path) -> dict[str, Any]:
    """What the test of a trial's run has measured. folder: The trial's."""
    metrics: dict[str, Any] = json.loads(
        (folder / "version_0" / "metrics.json").read_text()
    )
    return metrics


def test_without_optuna_there_are_two_lines(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    for module in ("commands", "extras"):
        monkeypatch.delitem(sys.modules, f"lightbase.{module}.sweep")
    path = str(HERE / "scripts" / "sweep.py")
    error = fails(capsys, 1, lambda: runpy.run_path(path))
    assert error.startswith("error: a sweep needs Optuna: ")
    assert error.endswith('\npip install -c constraints.txt -e ".[sweep]"')


def test_a_sweep_of_version_0_3_is_refused(sweep, tmp_path, capsys):
    (tmp_path / "tried" / "trial_000").mkdir(parents=True)
    error = fails(capsys, 2, lambda: sweep("--search", "model.lr=0.1"))
    assert "has trials, but no study.journal\ngive another --name" in error


class Interrupted(BaseException):
    """Like a kill: nothing is saved or recorded."""


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Runs a sweep that is killed after the second epoch of trial_001."""
    write = RunRecorder.on_validation_end

    def kill(self: Any, trainer: Any, module: Any) -> None:
        write(self, trainer, module)
        is_second = self.run and "trial_001" in str(self.run.folder)
        if is_second and trainer.current_epoch == 1:
            raise Interrupted

    def run(sweep: Run, *flags: str) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(RunRecorder, "on_validation_end", kill)
            with pytest.raises(Interrupted):
                sweep(*flags)

    return run


@pytest.mark.slow
def test_a_search_continues_after_a_kill_as_if_there_had_been_none(
    sweep, killed, tmp_path, capsys, monkeypatch
):
    search = ("--search", LR, "--search", "data.batch_size=16,32", "--trials", "3")
    expected = results(sweep(*search, name="alone"))
    killed(sweep, *search)
    folder = tmp_path / "tried"
    with (folder / "study.journal").open("a") as journal:
        journal.write('{"op_code":')  # as a full disk or a kill may leave it
    assert results(sweep(*search)) == expected
    environment = folder / "trial_001" / "version_0" / "environment.txt"
    assert environment.read_text().count("git commit: ") == 2  # starts
    assert not list(folder.glob("trial_*/version_1")), "the run continues in place"

    shutil.rmtree(folder / "trial_002")  # to be repeated
    capsys.readouterr()
    trials = sweep(*search[:-1], "4")
    assert results(trials)[:3] == expected
    assert len(trials) == 4
    best = max(trials, key=lambda name: trials[name].value or 0)
    flags = capsys.readouterr().out.splitlines()[-1]
    again = train_main(
        [*shlex.split(flags.removeprefix("Best flags: ")), "--name", "again"]
    )
    assert again["test/acc"] == metrics_of(folder / best)["test/acc"]
    monkeypatch.chdir(tmp_path)
    where = ["--trainer.default_root_dir", str(tmp_path)]
    script("runs").main(["tried", *where, "--plot", "curves.png"])
    assert capsys.readouterr().out.count("finished") == 4
    assert (tmp_path / "curves.png").exists()
    other = ["--search", LR, "--trials", "4"]
    error = fails(capsys, 2, lambda: sweep(*other))
    before = "['model.lr=log:1e-3..1e-1', 'data.batch_size=16,32']"
    assert f"tried has {before}\ngive the same" in error
    error = fails(capsys, 2, lambda: sweep(*search, "--trainer.max_epochs", "3"))
    assert "tried has 2\ngive the same" in error


@pytest.mark.parametrize("left", ["nothing", "a result"])
def test_a_trial_continues_wherever_it_was_killed(sweep, tmp_path, monkeypatch, left):
    """Before its first checkpoint, or after its end and before the study knew."""
    grid = ("--search", "model.lr=0.1", "--trainer.max_epochs", "1")
    expected = results(sweep(*grid, name="alone"))
    with monkeypatch.context() as patched:
        patched.setattr(Study, "tell", raise_interrupted)
        with pytest.raises(Interrupted):
            sweep(*grid)
    run = tmp_path / "tried" / "trial_000" / "version_0"
    if left == "nothing":
        (run / "metrics.json").unlink()
        shutil.rmtree(run / "checkpoints")
    assert results(sweep(*grid)) == expected
    assert [path.name for path in run.parent.glob("version_*")] == ["version_0"]


def raise_interrupted(*_: Any, **__: Any) -> None:
    raise Interrupted


def test_a_failed_trial_is_recorded_and_the_others_are_trained(
    sweep: Run, capsys: Any
) -> None:
    trials = sweep("--search", "model.lr=1e30,0.1", "--trainer.max_epochs", "1")
    assert states(trials) == ["FAIL", "COMPLETE"]
    best = f"{trials['trial_001'].value:.4f}"
    first, second, header, *rows, flags = capsys.readouterr().out.splitlines()[-6:]
    reason = "failed, UserError: the training loss is NaN"
    assert first.startswith("trial trial_000, model.lr 1e30, val/acc -, state failed")
    assert second == f"trial trial_001, model.lr 0.1, val/acc {best}, state complete"
    assert header.split() == ["trial", "model.lr", "val/acc", "state"]
    assert rows[0].split()[:3] == ["trial_000", "1e30", "-"]
    assert reason in rows[0]
    assert rows[1].split() == ["trial_001", "0.1", best, "complete"]
    assert flags.endswith(" --model.lr=0.1")


@pytest.mark.parametrize(("mode", "best"), [("max", "0.2"), ("min", "0.1")])
def test_the_best_flags_have_the_best_value(sweep, capsys, monkeypatch, mode, best):
    monkeypatch.setattr(sweep_module, "train_run", write_run)
    grid = ("--search", "model.lr=0.1,0.2", "--seed_everything", "2")
    sweep(*grid, "--monitor", "val/loss", "--monitor_mode", mode)
    assert capsys.readouterr().out.endswith(f"--model.lr={best}\n")


def test_repeats_have_means(sweep, capsys, monkeypatch):
    monkeypatch.setattr(sweep_module, "train_run", write_run)
    searches = ("--search", "seed_everything=1,2,3", "--search", "model.lr=0.1,0.2")
    sweep(*searches, "--monitor", "val/loss")
    header, *rows = capsys.readouterr().out.splitlines()[-5:]
    assert header.split() == ["model.lr", "metric", "n", "mean", "spread"]
    assert [row.split() for row in rows] == [
        ["0.1", "best", "val/loss", "3", "0.2", "0.1"],
        ["0.1", "test/acc", "3", "nan", "nan"],  # NaN in one of the tests
        ["0.2", "best", "val/loss", "3", "0.4", "0.2"],
        ["0.2", "test/acc", "3", "0.5", "0"],
    ]


def write_run(args: list[str]) -> None:
    """Write the files of a run whose best value is the product of model.lr and the
    seed."""
    flags = dict(arg.removeprefix("--").split("=") for arg in args if "=" in arg)
    run = Path(flags["trainer.default_root_dir"], flags["name"], "version_0")
    run.mkdir()
    (run / "environment.txt").touch()
    lr, seed = flags["model.lr"], int(flags.get("seed_everything", 1))
    progress = {"monitor": "val/loss", "mode": "min", "best": float(lr) * seed}
    (run / "progress.json").write_text(json.dumps(progress))
    test: dict[str, float | None] = {"test/acc": 0.5}
    if (lr, seed) == ("0.1", 2):
        test = {"test/acc": None}
    (run / "metrics.json").write_text(json.dumps(test))


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
    output, error = capsys.readouterr()
    assert "Stopped by SIGTERM; the same command continues" in error
    assert output.splitlines()[-1].endswith("state failed, AttributeError: a bug")
    assert not (tmp_path / "tried" / "trial_001").exists()
    assert "Traceback" in (tmp_path / "tried" / "trial_000" / "output.txt").read_text()


@pytest.mark.slow
def test_folds_are_a_grid_that_ends_with_mean_and_spread(
    sweep: Run, tmp_path: Path, capsys: Any
) -> None:
    folds = ("--data.num_folds", "3", "--search", "data.fold=0,1,2")
    flags = (*folds, "--trainer.max_epochs", "1", "--data.val_fraction", "0")
    trials = sweep(*flags, "--search", "model.lr=0.01,0.1")
    shown = capsys.readouterr().out
    order = [trial.params["data.fold"] for trial in trials.values()]
    assert order == ["0", "0", "1", "1", "2", "2"]
    names = list(trials)[1::2]
    tests = [metrics_of(tmp_path / "tried" / name)["test/acc"] for name in names]
    row = next(line for line in shown.splitlines() if re.match(r"0\.1 +test/acc", line))
    expected = [statistics.fmean(tests), statistics.stdev(tests)]
    assert row.split()[2:] == ["3", *(f"{value:.4g}" for value in expected)]
    assert "Best" not in shown, "nothing is selected on test data"


@pytest.mark.slow
def test_the_same_command_continues(train: Callable[..., Any], tmp_path: Path) -> None:
    """Two commands at once, one of which is killed or stopped, and then two that end
    the sweep."""
    values = ["0.001", "0.003", "0.01", "0.03", "0.1", "0.3"]
    flags = (
        f"--config {os.path.relpath(TINY, tmp_path)} --trainer.default_root_dir logs "
    )
    flags += f"--search model.lr={','.join(values)} --name grid --trainer.max_epochs 3"
    command = [sys.executable, str(HERE / "scripts" / "sweep.py"), *flags.split()]
    how: Any = {"cwd": tmp_path, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    for number in (signal.SIGKILL, signal.SIGTERM):
        processes = [programs.start(command, **how) for _ in range(2)]
        for process in processes:
            assert process.stdout
            while not process.stdout.readline().startswith("trial "):
                assert process.poll() is None
            process.send_signal(number)
        for process in processes:
            rest = process.communicate(timeout=60)[0]
            assert process.returncode == (-9 if number == signal.SIGKILL else 143)
    assert "Stopped by SIGTERM; the same command continues" in rest
    processes = [programs.start(command, **how) for _ in range(2)]
    for process in processes:
        output, _ = process.communicate(timeout=300)
        assert process.returncode == 0, output
        assert "Best flags" in output
    for i, value in enumerate(values):
        row = f"trial_{i:03d} +{re.escape(value)} .* complete"
        assert re.search(row, output), output
    for i in (0, 3):
        alone = train("--trainer.max_epochs", 3, "--model.lr", values[i])
        trial = metrics_of(tmp_path / "logs" / "grid" / f"trial_{i:03d}")
        assert alone["test/loss"] == trial["test/loss"]
