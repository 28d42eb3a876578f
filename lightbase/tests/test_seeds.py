"""One experiment with several seeds: `train.py --seeds`."""

import json

import pytest
import yaml
from paths import fails, script
from written import checkpoint

from lightbase.commands.seeds import read_seeds

runs = script("runs")
SHORT = "--trainer.limit_train_batches 3 --trainer.max_epochs 1"


def test_the_runs_of_seeds_are_trained_once_and_summarized(train, tmp_path, capsys):
    spreads = train(SHORT, "--seeds", "3,5")
    out = capsys.readouterr().out
    assert "(2 seeds), 95 % confidence interval of the mean" in out
    content = json.loads((tmp_path / "tiny" / "seeds.json").read_text())
    assert content["metrics"] == spreads
    assert content["failures"] == {}
    values = content["values"]["test/acc"]
    assert spreads["test/acc"]["mean"] == pytest.approx(sum(values.values()) / 2)
    # each run is the run of its seed
    alone = train(SHORT, "--seed_everything", "5", "--name", "alone")
    assert values["5"] == alone["test/acc"]
    root = ["--trainer.default_root_dir", str(tmp_path)]
    runs.main([*root, "tiny", "--group"])
    _, row = capsys.readouterr().out.splitlines()[-2:]
    assert row.split()[:3] == ["tiny", "2", "0"]
    # the same command trains nothing again, and adds a seed
    folder = tmp_path / "tiny" / "seed_3" / "version_0"
    before = (folder / "metrics.json").stat().st_mtime_ns
    assert train(SHORT, "--seeds", "3,5,6")["test/acc"]["n"] == 3
    assert (folder / "metrics.json").stat().st_mtime_ns == before
    assert "max_epochs 2: " in fails(
        capsys, 2, lambda: train(SHORT, "--trainer.max_epochs 2 --seeds 3,5")
    )


def test_a_run_that_was_stopped_goes_on_with_its_seed(train, tmp_path, capsys):
    train(SHORT, "--seeds", "1,2")
    folder = tmp_path / "tiny" / "seed_2" / "version_0"
    whole = checkpoint(folder, "last")["state_dict"]
    (folder / "metrics.json").unlink()  # as if it was killed before its test
    (folder / "checkpoints" / "last.ckpt").unlink()  # and before its first checkpoint
    train(SHORT, "--seeds", "1,2")
    again = checkpoint(folder, "last")["state_dict"]
    assert all(again[name].equal(whole[name]) for name in whole)


def test_a_seed_that_fails_is_told_and_the_others_are_trained(train, tmp_path, capsys):
    wild = ("--model.lr", "1e30", "--trainer.log_every_n_steps", "1")
    error = fails(capsys, 1, lambda: train(SHORT, *wild, "--seeds", "1,2"))
    assert error.startswith("error: 2 of 2 seeds failed: 1, 2")
    content = json.loads((tmp_path / "tiny" / "seeds.json").read_text())
    assert "NaN" in content["failures"]["1"]


@pytest.mark.parametrize("text", ["", "1", "0", "x", "1,1", "-1,2", "1,"])
def test_what_names_no_seeds_is_refused(train, capsys, text):
    error = fails(capsys, 2, lambda: train(f"--seeds={text}"))
    assert "names no seeds" in error
    assert read_seeds("3") == [1, 2, 3]
    error = fails(capsys, 2, lambda: train("--seeds 2 --trainer.fast_dev_run"))
    assert "not beside --trainer.fast_dev_run" in error


def test_two_settings_are_compared(train, tmp_path, capsys):
    train(SHORT, "--seeds", "1,2")
    train(SHORT, "--model.lr 0.5 --name wild --seeds", "1,2")
    capsys.readouterr()
    root = ["--trainer.default_root_dir", str(tmp_path), "--compare"]
    runs.main([*root, "tiny", "wild"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("best val/acc of tiny: ")
    assert lines[2].endswith("(paired by seed)")
    assert "takes two names" in fails(capsys, 2, lambda: runs.main([*root, "tiny"]))
    train(SHORT, "--model.lr 0.5 --name tiny/other --seed_everything 3")
    error = fails(capsys, 2, lambda: runs.main([*root, "tiny", "wild"]))
    assert "finished runs of one setting" in error


def test_each_seed_may_have_its_own_split(train, tmp_path, capsys):
    own = ("--data.split_seed", "seed", "--seeds", "2,3", "--trainer.max_steps", "1")
    train(*own)
    train(*own)  # continues
    configs = [
        yaml.safe_load(
            (tmp_path / f"tiny/seed_{seed}/version_0/config.yaml").read_text()
        )
        for seed in (2, 3)
    ]
    seeds = [config["data"]["init_args"]["split_seed"] for config in configs]
    assert seeds == [2, 3]
    capsys.readouterr()
    root = ["--trainer.default_root_dir", str(tmp_path)]
    runs.main([*root, "tiny", "--group"])
    _, row = capsys.readouterr().out.splitlines()
    assert row.split()[:3] == ["tiny", "2", "0"]
    other = ("--data.split_seed", "7", *own[2:])
    error = fails(capsys, 2, lambda: train(*other))
    assert "data.split_seed 7: " in error
