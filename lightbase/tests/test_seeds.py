"""One experiment with several seeds: `train.py --seeds`."""

import json

import pytest
import yaml
from paths import fails, script
from written import equal, weights

runs = script("runs")
SHORT = "--trainer.limit_train_batches 3 --trainer.max_epochs 1"


def test_the_runs_of_seeds_are_trained_once_and_summarized(train, tmp_path, capsys):
    spreads = train(SHORT, "--seeds", "3,5")
    out = capsys.readouterr().out
    assert "(2 seeds), 95 % confidence interval of the mean" in out
    content = json.loads((tmp_path / "tiny" / "seeds.json").read_text())
    assert content["metrics"] == spreads
    values = content["values"]["test/acc"]
    assert spreads["test/acc"]["mean"] == pytest.approx(sum(values.values()) / 2)
    # each run is the run of its seed
    alone = train(SHORT, "--seed_everything", "5", "--name", "alone")
    assert values["5"] == alone["test/acc"]
    # the same command trains nothing again, and adds a seed
    file = tmp_path / "tiny" / "seed_3" / "version_0" / "metrics.json"
    before = file.stat().st_mtime_ns
    assert train(SHORT, "--seeds", "3,5,6")["test/acc"]["n"] == 3
    assert file.stat().st_mtime_ns == before
    more = "--trainer.max_epochs 2 --seeds 3,5"
    assert "max_epochs 2: " in fails(capsys, 2, lambda: train(SHORT, more))


def test_a_run_that_was_stopped_goes_on_with_its_seed(train, tmp_path):
    train(SHORT, "--seeds", "1,2")
    folder = tmp_path / "tiny" / "seed_2" / "version_0"
    whole = weights(folder)
    (folder / "metrics.json").unlink()  # as if it was killed before its test
    (folder / "checkpoints" / "last.ckpt").unlink()  # and before its first checkpoint
    train(SHORT, "--seeds", "1,2")
    assert equal(weights(folder), whole)


@pytest.mark.slow
def test_seeds_share_a_split_in_order_of_time(train, tmp_path, capsys):
    train(SHORT, "--data.val_split ordered --data.gap 20 --seeds", "1,2")
    out = capsys.readouterr().out
    assert "All seeds have the same validation set" in out
    assert out.count("295 training, 35 validation, 75 test, 20 left-out samples") == 2


@pytest.mark.parametrize("text", ["1", "x", "1,1", "-1,2"])
def test_what_names_no_seeds_is_refused(train, capsys, text):
    assert "names no seeds" in fails(capsys, 2, lambda: train(f"--seeds={text}"))


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
    for _ in range(2):  # the second time it continues
        train(*own)
    for seed in (2, 3):
        config = tmp_path / f"tiny/seed_{seed}/version_0/config.yaml"
        content = yaml.safe_load(config.read_text())
        assert content["data"]["init_args"]["split_seed"] == seed
    capsys.readouterr()
    runs.main(["--trainer.default_root_dir", str(tmp_path), "tiny", "--group"])
    _, row = capsys.readouterr().out.splitlines()
    assert row.split()[:3] == ["tiny", "2", "0"]
    error = fails(capsys, 2, lambda: train("--data.split_seed", "7", *own[2:]))
    assert "data.split_seed 7: " in error


def test_seeds_that_fail_are_told(train, tmp_path, capsys):
    wild = ("--model.lr", "1e30", "--trainer.log_every_n_steps", "1")
    error = fails(capsys, 1, lambda: train(SHORT, *wild, "--seeds", "1,2"))
    assert error.startswith("error: 2 of 2 seeds failed: 1, 2")
    content = json.loads((tmp_path / "tiny" / "seeds.json").read_text())
    assert "NaN" in content["failures"]["1"]
