"""sweep.py: searches, grids and cross-validations, which go on after a kill without losing or
repeating a trial."""

import csv
import errno
import json
import os
import re
import shlex
import signal
import sqlite3
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import optuna
import programs
import pytest
import torch
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import TrialState
from paths import HERE, TINY, argv, script
from torch import Tensor, nn

from lightbase.errors import UserError
from lightbase.run.train import main as train_main
from lightbase.tools import sweep_report, sweep_results, sweep_study, sweep_workers, sweeping
from lightbase.tools.sweep_search import dimension
from lightbase.tools.sweep_study import open_study

SWEEP = script("sweep")
LR = "model.lr=log:1e-3..1e-1"
Sweep = Callable[..., Any]


@pytest.mark.parametrize(
    ("search", "distribution", "texts"),
    [
        ("model.lr=log:1e-4..1e-1", FloatDistribution(1e-4, 1e-1, log=True), ["0.0001", "0.1"]),
        ("model.optimizer_args.momentum=0.5..1", FloatDistribution(0.5, 1.0), ["0.5", "1"]),
        ("data.batch_size=log:16..512", IntDistribution(16, 512, log=True), ["16", "512"]),
        ("--trainer.max_epochs=1..9", IntDistribution(1, 9), ["1", "9"]),
        ("model.lr=1e-3, 0.1,1", CategoricalDistribution([0.001, 0.1, 1]), ["1e-3", "0.1", "1"]),
        ("model.optimizer=SGD,Adam", CategoricalDistribution(["SGD", "Adam"]), ["SGD", "Adam"]),
        ("a=null,true,x y", CategoricalDistribution([None, True, "x y"]), ["null", "true", "x y"]),
        (
            "a=[1,2],[3,[4,5]]",
            CategoricalDistribution(["[1,2]", "[3,[4,5]]"]),
            ["[1,2]", "[3,[4,5]]"],
        ),
        (
            "a={b: 1, c: 2},'d,e'",
            CategoricalDistribution(["{b: 1, c: 2}", "'d,e'"]),
            ["{b: 1, c: 2}", "'d,e'"],
        ),
        ("trainer.limit_train_batches=1,1.0", CategoricalDistribution(["1", "1.0"]), ["1", "1.0"]),
        (
            "config=../a.yaml,../b.yaml",
            CategoricalDistribution(["../a.yaml", "../b.yaml"]),
            ["../a.yaml", "../b.yaml"],
        ),
    ],
)
def test_what_a_search_means(search: str, distribution: Any, texts: list[str]) -> None:
    found = dimension(search)
    assert (found.flag, found.distribution) == (
        search.partition("=")[0].removeprefix("--"),
        distribution,
    )
    assert found.texts == texts
    if found.is_list:
        assert [found.text(choice) for choice in distribution.choices] == texts


WRONG = [
    (["--search", "model.lr"], "give FLAG=a,b,c"),
    (["--search", "model.lr=log:1e-4,1e-1"], "log: wants two numbers"),
    (["--search", "model.lr=0.1..0.01"], "the first end must be smaller"),
    (["--search", "model.lr=log:0..0.1"], "and over 0"),
    (["--search", "model.lr=0.1,,0.2"], "a value is missing"),
    (["--search", "model.lr=0.1,1e-1"], "stands twice"),
    (["--search", "modle.lr=0.1,0.2"], "unknown argument --modle.lr; did you mean --model.lr?"),
    (["--search", "model.lrr=0.1,0.2"], "unknown key model.lrr; did you mean model.lr?"),
    (["--search", "model.lr=0.1,fast"], "model.lr: Not of type PositiveFloat"),
    (["--search", "model.net.size=[192,4],[192,8,4]"], "did you mean"),
    (["--search", "data.fold=0,1"], "data.fold 0: of how many folds?"),
    (["--search", "data.fold=0,1,2", "--data.num_folds", "2"], "data.fold 2 is none"),
    (["--search", "name=a,b"], "name cannot be searched"),
    (["--search", "model.lr=0.1,0.2", "--model.lr", "0.3"], "the flag stands twice"),
    (["--search", "model.lr=0.1,0.2", "--search", "model.lr=0.3"], "the flag stands twice"),
    (
        ["--search", "model.lr=0.1,0.2", "--search", "model.init_args.lr=0.3"],
        "the flag stands twice",
    ),
    (["--search", "model.init_args.lr=0.1,0.2", "--model.lr", "0.3"], "the flag stands twice"),
    (["--search", "monitor=val/acc,val/loss"], "monitor cannot be searched"),
    (["--search", "trainer.strategy=auto,ddp"], "on one device"),
    (["--search", "trainer.enable_checkpointing=true,false"], "a sweep goes by checkpoints"),
    (["--search", LR], "--trials N: how many?"),
    (["--search", LR, "--trials", "0"], "--trials 0: 1 is the least"),
    (["--search", LR, "--search", "seed_everything=1,2", "--trials", "4"], "as a grid"),
    (
        ["--search", LR, "--trials", "4", "--ckpt_path", "last"],
        "--ckpt_path is no flag for a sweep",
    ),
    (
        ["--search", LR, "--trials", "4", "--data.val_fraction", "0"],
        "compares trials by a validation",
    ),
    (
        ["--search", LR, "--trials", "4", "--trainer.strategy", "ddp", "--trainer.devices", "2"],
        "on one device",
    ),
    (["--search", LR, "--trials", "4", "--seed_everything", "true"], "another seed for each trial"),
    (["--trials", "4"], "--search"),
]


@pytest.mark.parametrize(("flags", "message"), WRONG)
def test_what_is_wrong_is_refused_before_a_trial(
    flags: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        SWEEP.main(["--config", TINY, "--trainer.default_root_dir", str(tmp_path), *flags])
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) <= 2
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "content",
    [
        "no database",
        *(
            pytest.param(c, marks=pytest.mark.slow)
            for c in ("", "another study", "two studies", "file for folder")
        ),
    ],
)
def test_a_study_that_is_not_its_own_is_refused(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "tried"
    if content == "file for folder":
        folder.touch()
    else:
        folder.mkdir()
        (folder / "study.db").write_text(content * 99 if content == "no database" else "")
        for i in range({"another study": 1, "two studies": 2}.get(content, 0)):
            optuna.create_study(study_name=str(i), storage=f"sqlite:///{folder / 'study.db'}")
    where = ["--config", TINY, "--trainer.default_root_dir", str(tmp_path), "--name", "tried"]
    with pytest.raises(SystemExit) as caught:
        SWEEP.main([*where, "--search", "model.lr=0.1,0.2"])
    assert caught.value.code == 1
    error = capsys.readouterr().err
    assert "tried" in error
    assert len(error.splitlines()) <= 2


@pytest.fixture
def sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sweep:
    """Runs sweep.py on tests/tiny.yaml, its one worker in this process."""

    def train_all(folder: Path, task: dict[str, Any], *_: Any) -> None:
        sweeping.Worker({**json.loads(json.dumps(task)), "index": 0}).run()

    def run(*flags: str, name: str = "tried") -> Any:
        where = ["--trainer.default_root_dir", str(tmp_path), "--name", name]
        return SWEEP.main(["--config", TINY, *where, *flags])

    monkeypatch.setattr(SWEEP, "train_all", train_all)
    return run


def table(text: str) -> list[list[str]]:
    return [re.split(r"  +", row) for row in text[text.index("trial  ") :].splitlines()]


class Interrupted(BaseException):
    """As a kill: nothing is saved or told."""


@pytest.mark.slow
def test_a_search_goes_on_after_a_kill_as_if_there_had_been_none(
    sweep: Sweep, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    search = ("--search", LR, "--search", "data.batch_size=16,32", "--trials", "3")
    expected = [(trial.params, trial.value) for trial in sweep(*search, name="whole").trials]
    said = capsys.readouterr().out
    assert [row[:2] for row in table(said)[1:4]] == [[f"trial_00{i}", "finished"] for i in range(3)]
    told, report = [], sweeping.Report.on_validation_end

    def killed(self: Any, trainer: Any, module: Any) -> None:
        report(self, trainer, module)
        if not trainer.sanity_checking and self.trial.number == 1 and trainer.current_epoch == 1:
            told.append(trainer.current_epoch)
            raise Interrupted

    with monkeypatch.context() as patched:
        patched.setattr(sweeping.Report, "on_validation_end", killed)
        with pytest.raises(Interrupted):
            sweep(*search)
    assert told == [1]
    study = sweep(*search)
    assert [(trial.params, trial.value) for trial in study.trials] == expected
    assert [list(trial.intermediate_values) for trial in study.trials] == [[1, 2]] * 3
    assert not list((tmp_path / "tried").glob("trial_*/version_1")), "the run goes on in its folder"
    assert (
        "Resume" in capsys.readouterr().out
        or (tmp_path / "tried/trial_001/version_0/config_1.yaml").is_file()
    )

    found = sweep(*search[:-1], "4")
    assert [(trial.params, trial.value) for trial in found.trials[:3]] == expected
    assert len(found.trials) == 4
    best = found.best_trial
    last = capsys.readouterr().out.splitlines()[-2:]
    flags = shlex.split(last[0].removeprefix("Best flags: "))
    assert flags[0] == "python"
    assert Path(flags[1]).name == "train.py"
    again = train_main([*flags[2:], "--name", "again"])
    assert {key: again[key] for key in ("test/acc", "test/loss")} == {
        key: best.user_attrs[key] for key in ("test/acc", "test/loss")
    }
    assert last[1].endswith(f"trial_{best.number:03d}/version_0/checkpoints/best.ckpt")
    for name in ("history.png", "importance.png"):
        assert (tmp_path / "tried" / name).stat().st_size > 1000
    with (tmp_path / "tried" / "trials.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["val/acc"]) for row in rows] == [trial.value for trial in found.trials]
    for other, message in (
        (
            ["--search", LR, "--search", "data.batch_size=16,64", "--trials", "4"],
            "this sweep was begun with",
        ),
        (
            [*search, "--trainer.max_epochs", "3"],
            "--trainer.max_epochs 3: this sweep was begun with 2",
        ),
    ):
        with pytest.raises(SystemExit):
            sweep(*other)
        assert message in capsys.readouterr().err


class Faulty(nn.Module):
    """A network that fails in training, in a way that is asked for."""

    def __init__(self, how: str = "sound") -> None:
        super().__init__()
        self.how, self.head = how, nn.Linear(192, 4)

    def forward(self, x: Tensor) -> Any:
        if self.training and self.how == "bug":
            raise AttributeError(f"a bug in {self.how}")
        return self.head(x.flatten(1)) * (
            float("nan") if self.training and self.how == "nan" else 1
        )


NET = ("--model.net", "test_sweep.Faulty")


@pytest.mark.slow
def test_a_failed_trial_is_recorded_and_the_others_go_on(sweep: Sweep, capsys: Any) -> None:
    study = sweep(*NET, "--search", "model.net.how=nan,sound,bug", "--trainer.max_epochs", "1")
    assert [trial.state.name for trial in study.trials] == ["FAIL", "COMPLETE", "FAIL"]
    assert "the training loss is NaN or infinite at step" in study.trials[0].user_attrs["reason"]
    assert study.trials[2].user_attrs["reason"] == "AttributeError: a bug in bug"
    said, error = capsys.readouterr()  # with processes of their own in trial_002/output.txt
    assert "Traceback" in error
    assert table(said)[1][:3] == ["trial_000", "failed", "nan"]


def test_a_sweep_whose_first_trials_fail_alike_ends(tmp_path: Path) -> None:
    folder = tmp_path / "tried"
    study = make_study(folder, 3)
    for trial in study.get_trials():
        asked = optuna.Trial(study, trial._trial_id)
        asked.set_user_attr("reason", "the same")
        asked.set_user_attr("is_mistake", True)
        study.tell(asked, state=TrialState.FAIL)
        if trial.number < 2:
            sweep_workers.check_failures(study.get_trials(), folder)
    with pytest.raises(UserError, match="the first 3 trials failed alike: the same\nmend it"):
        sweep_workers.check_failures(study.get_trials(), folder)


def make_study(folder: Path, num_trials: int) -> Any:
    """One with so many trials that are running."""
    folder.mkdir(parents=True, exist_ok=True)
    optuna.create_study(study_name="x", storage=f"sqlite:///{folder / 'study.db'}")
    study = open_study(folder / "study.db")
    for _ in range(num_trials):
        study.ask()
    return study


def test_a_trial_whose_process_dies_goes_on_once(tmp_path: Path) -> None:
    study, died = make_study(tmp_path, 2), Counter[int]()
    for expected in (TrialState.RUNNING, TrialState.FAIL):
        (tmp_path / ".worker_0").write_text("1")
        sweep_workers.note_death(study, tmp_path, 0, -9, died)
        assert study.get_trials()[1].state == expected
    assert (
        "died twice by SIGKILL, as one that takes more memory"
        in study.get_trials()[1].user_attrs["reason"]
    )
    for _ in range(2):
        sweep_workers.note_death(study, tmp_path, 0, 1, died)
    with pytest.raises(
        UserError, match="a worker ended with status 1 before its trial, three times"
    ):
        sweep_workers.note_death(study, tmp_path, 0, 1, died)


def test_a_full_disk_ends_the_sweep_and_fails_no_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = make_study(tmp_path / "tried", 1)
    task = {
        "root": str(tmp_path),
        "name": "tried",
        "seed": 1,
        "flags": [],
        "search": ["model.lr=0.1,0.2"],
    }
    worker = sweeping.Worker(
        {**task, "index": 0, "num_trials": 1, "monitor": None, "prune": False, "num_warmup": 0}
    )

    def full(*_: Any) -> None:
        try:
            raise OSError(errno.ENOSPC, "No space left on device")
        except OSError as error:
            raise UserError("last.ckpt cannot be written") from error

    monkeypatch.setattr(sweeping, "train_reporting", full)
    with pytest.raises(UserError) as caught:
        worker.run()
    assert sweep_study.cannot_write(caught.value)
    assert study.get_trials()[0].state == TrialState.RUNNING
    process = SimpleNamespace(
        poll=lambda: sweep_study.CANNOT_WRITE, terminate=lambda: None, kill=lambda: None
    )
    monkeypatch.setattr(sweep_workers, "start_worker", lambda *_: process)
    with pytest.raises(
        UserError,
        match="cannot be written, as on a full disk; 0 of 1 trials are finished\nmake room",
    ):
        sweep_workers.train_all(tmp_path / "tried", {"num_trials": 1, "monitor": None}, 1, [])


def test_a_study_that_cannot_be_written_is_said_in_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_study(tmp_path, 0)
    connect = sqlite3.connect

    def without_room(*args: Any, **kwargs: Any) -> sqlite3.Connection:
        connection = connect(*args, **kwargs)
        connection.execute("PRAGMA max_page_count = 1")  # no more than the file has
        return connection

    monkeypatch.setattr(sqlite3, "connect", without_room)
    study = open_study(tmp_path / "study.db")
    what = (
        "study.db cannot be read or written: database or disk is full\nmend that, then "
        "give the same command"
    )
    with pytest.raises(UserError, match=what), sweep_study.study_errors(tmp_path):
        study.set_user_attr("long", [f"{i}" for i in range(10_000)])


def test_a_trial_that_another_worker_has_just_finished_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = make_study(tmp_path / "tried", 1)
    task = {
        "root": str(tmp_path),
        "name": "tried",
        "seed": 1,
        "flags": [],
        "search": ["model.lr=0.1,0.2"],
    }
    worker = sweeping.Worker(
        {**task, "index": 0, "num_trials": 1, "monitor": None, "prune": False, "num_warmup": 0}
    )
    lock = worker.lock

    def finished_meanwhile(number: int) -> Any:
        study.tell(number, 1.0)
        return lock(number)

    monkeypatch.setattr(worker, "lock", finished_meanwhile)
    assert worker.next_trial() is None


@pytest.mark.parametrize("name", ["what?", "a{b}", "a#b%41", "ä ö/ü"])
def test_a_sweep_may_have_any_name(name: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir(parents=True)
    optuna.create_study(
        study_name="x", storage=sweep_study.storage_of(tmp_path / name / "study.db")
    )
    assert open_study(tmp_path / name / "study.db").study_name == "x"
    assert [path.name for path in (tmp_path / name).iterdir()] == ["study.db"]


def test_a_metric_that_a_fold_lacks_is_left_out_of_its_mean(capsys: Any) -> None:
    study = optuna.create_study()
    for fold, metrics in enumerate([{"test/acc": 0.5}, {"test/acc": 0.7, "test/f1": 0.1}]):
        asked = study.ask({"data.fold": CategoricalDistribution([0, 1])})
        for key, value in (metrics | {"test/num_samples": 5}).items():
            asked.set_user_attr(key, value)
        study.tell(asked, fold)
    sweep_results.show_repeats(study.trials, [], ["data.fold"], None)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[2][:3] == ["test/acc", "2", "0.6"]
    assert rows[3] == ["test/f1", "1", "0.1"]


def test_a_trial_below_the_median_is_stopped(tmp_path: Path) -> None:
    study = make_study(tmp_path, 0)
    study.pruner = optuna.pruners.MedianPruner(sweep_study.STARTUP, 2)
    for value in range(5):
        trial = study.ask()
        for step in (1, 2, 3):
            trial.report(value, step)
        study.tell(trial, value)
    trainer: Any = SimpleNamespace(
        state=SimpleNamespace(fn="fit"), sanity_checking=False, global_step=0
    )
    trainer.should_stop, trainer.callback_metrics = False, {"val/loss": torch.tensor(9.0)}
    trainer.val_check_batch = trainer.num_training_batches = 10
    asked = study.ask()
    for epoch in range(2):
        trainer.current_epoch = epoch
        report = sweeping.Report(asked, "val/loss")
        report.on_validation_end(trainer, None)  # type: ignore[arg-type]
        report.on_validation_end(trainer, None)  # type: ignore[arg-type]  # as after a resume
        assert trainer.should_stop is (epoch == 1), "not in the first epochs"
    assert asked.user_attrs == {"pruned": 2}
    assert study.get_trials()[-1].intermediate_values == {1: 9, 2: 9}
    for trainer.global_step in (0, 10):
        sweeping.Report(asked, "val/loss").on_train_start(trainer, None)  # type: ignore[arg-type]
        assert trainer.should_stop == (trainer.global_step > 0), (
            "killed after that, and before or after a checkpoint"
        )


@pytest.mark.parametrize(
    ("every", "expected"), [(10, [1, 2]), (5, [1, 2, 3, 4]), (4, [1, 2, 3, 4])]
)
def test_validations_are_counted(every: int, expected: list[int]) -> None:
    found = []
    for epoch in range(2):
        for batch in range(10):
            if (batch + 1) % every == 0:
                loop = SimpleNamespace(batch_idx=batch)
                trainer: Any = SimpleNamespace(
                    val_check_batch=every,
                    num_training_batches=10,
                    current_epoch=epoch,
                    fit_loop=loop,
                )
                found.append(sweep_report.validation_number(trainer))
    assert found == expected


@pytest.mark.slow
def test_folds_are_a_grid_that_ends_with_mean_and_standard_error(sweep: Sweep, capsys: Any) -> None:
    flags = ("--data.num_folds", "3", "--search", "data.fold=0,1,2", "--trainer.max_epochs", "1")
    study = sweep(*flags, "--data.val_fraction", "0", "--search", "model.lr=0.01,0.1")
    said = capsys.readouterr().out
    trials = study.trials
    assert [trial.params["data.fold"] for trial in trials] == [0, 0, 1, 1, 2, 2]
    assert "Samples tested (0.01): 350 in 3 folds" in said
    found = [trial.user_attrs["test/acc"] for trial in trials if trial.params["model.lr"] == 0.1]
    spread = statistics.stdev(found)
    row = next(line for line in said.splitlines() if re.match(r"0\.1 +test/acc", line))
    expected = [statistics.fmean(found), spread, spread / 3**0.5]
    assert row.split()[2:] == ["3", *(f"{value:.4g}" for value in expected)]
    assert "Best" not in said, "nothing is selected on test data"


@pytest.mark.slow
def test_the_best_of_several_flags_is_that_of_the_best_mean(sweep: Sweep, capsys: Any) -> None:
    study = sweep("--search", "seed_everything=1,2", "--search", "model.lr=1e-6,0.03")
    said = capsys.readouterr().out
    assert len(study.trials) == 4
    assert re.search(r"Best flags: .*train.py.* --model.lr 0.03$", said, re.M)
    assert "Over seed_everything:" in said


@pytest.mark.slow
def test_the_same_command_goes_on(tmp_path: Path) -> None:
    """Killed and stopped with two processes at once, ended with one. From another working
    folder."""
    flags = ["--config", os.path.relpath(TINY, tmp_path), "--trainer.default_root_dir", "logs"]
    flags += argv(
        "--search model.lr=0.001,0.003,0.01,0.03,0.1,0.3 --name grid --trainer.max_epochs 3"
    )
    command = [sys.executable, str(HERE / "scripts" / "sweep.py"), *flags]
    how: Any = {"cwd": tmp_path, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    for number in (signal.SIGKILL, signal.SIGTERM):
        process = programs.start([*command, "--num_workers", "2"], start_new_session=True, **how)
        assert process.stdout
        while not process.stdout.readline().startswith("trial_"):
            assert process.poll() is None
        if number == signal.SIGKILL:
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        rest = process.communicate(timeout=60)[0]
        assert process.returncode == (-9 if number == signal.SIGKILL else 143)
    assert re.search(
        "Stopped by SIGTERM; [2-5] of 6 trials are finished, the same command goes on", rest
    )
    with programs.start(command, **how) as process:
        done, _ = process.communicate(timeout=300)
    assert process.returncode == 0, done
    assert re.search("Going on: [2-5] of 6 trials are finished", done)
    assert [row[1] for row in table(done)[1:7]] == ["finished"] * 6
    study = open_study(tmp_path / "logs" / "grid" / "study.db")
    assert [trial.params["model.lr"] for trial in study.trials] == [
        0.001,
        0.003,
        0.01,
        0.03,
        0.1,
        0.3,
    ]
    assert [len(trial.intermediate_values) for trial in study.trials] == [3] * 6
    best = study.best_trial
    alone = train_main(
        [
            *TINY_FLAGS,
            "--model.lr",
            str(best.params["model.lr"]),
            "--trainer.default_root_dir",
            str(tmp_path),
        ]
    )
    assert alone["test/loss"] == pytest.approx(best.user_attrs["test/loss"], abs=1e-7)


TINY_FLAGS = ("--config", TINY, "--trainer.max_epochs", "3")
