"""sweep.py: searches, grids and cross-validations, which go on after a kill without losing or repeating a trial."""

import csv
import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sweeping
from conftest import TINY, script
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from sweep_search import dimension

from project.engine.run import main as train_main

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
        ("a=[1,2],[3,[4,5]]", CategoricalDistribution(["[1,2]", "[3,[4,5]]"]), ["[1,2]", "[3,[4,5]]"]),
        ("a={b: 1, c: 2},'d,e'", CategoricalDistribution(["{b: 1, c: 2}", "'d,e'"]), ["{b: 1, c: 2}", "'d,e'"]),
        ("config=../a.yaml,../b.yaml", CategoricalDistribution(["../a.yaml", "../b.yaml"]), ["../a.yaml", "../b.yaml"]),
    ],
)
def test_what_a_search_means(search: str, distribution: Any, texts: list[str]) -> None:
    found = dimension(search)
    assert (found.flag, found.distribution) == (search.partition("=")[0].removeprefix("--"), distribution)
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
    (["--search", "model.lr=0.1,fast"], "model.lr: Not of type PositiveFloat"),
    (["--search", "model.net.size=[192,4],[192,8,4]"], "did you mean"),
    (["--search", "data.fold=0,1"], "data.fold 0: of how many folds?"),
    (["--search", "data.fold=0,1,2", "--data.num_folds", "2"], "data.fold 2 is none"),
    (["--search", "name=a,b"], "name cannot be searched"),
    (["--search", "model.lr=0.1,0.2", "--model.lr", "0.3"], "the flag stands twice"),
    (["--search", "model.lr=0.1,0.2", "--search", "model.lr=0.3"], "the flag stands twice"),
    (["--search", LR], "--trials N: how many?"),
    (["--search", LR, "--trials", "0"], "--trials 0: 1 is the least"),
    (["--search", LR, "--search", "seed_everything=1,2", "--trials", "4"], "as a grid"),
    (["--search", LR, "--trials", "4", "--ckpt_path", "last"], "--ckpt_path is no flag for a sweep"),
    (["--search", LR, "--trials", "4", "--data.val_fraction", "0"], "compares trials by a validation"),
    (["--search", LR, "--trials", "4", "--trainer.strategy", "ddp", "--trainer.devices", "2"], "on one device"),
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
    assert "Resume" in capsys.readouterr().out or (tmp_path / "tried/trial_001/version_0/config_1.yaml").is_file()

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
        (["--search", LR, "--search", "data.batch_size=16,64", "--trials", "4"], "this sweep was begun with"),
        ([*search, "--trainer.max_epochs", "3"], "--trainer.max_epochs 3: this sweep was begun with 2"),
    ):
        with pytest.raises(SystemExit):
            sweep(*other)
        assert message in capsys.readouterr().err
