"""Data that streams: each sample once an epoch, and a resume goes on with the next."""

import json
import signal
from collections import defaultdict

import pytest
import streams
from paths import HERE
from ranks import LIMIT_S, start_train
from written import checkpoint, equal, weights

STREAM = str(HERE / "stream.yaml")


@pytest.fixture
def notes(tmp_path):
    """Return a function that returns what a run has noted, {epoch: batches}. A batch
    that is trained again after a kill counts once."""

    def read(name, stage="train", rank=0):
        epochs = defaultdict(dict)
        path = tmp_path / f"{name}.{stage}.{rank}"
        for line in path.read_text().splitlines():
            epoch, index, numbers = json.loads(line)
            epochs[epoch][index] = numbers
        return {epoch: [*batches.values()] for epoch, batches in epochs.items()}

    return read


def run(train, monkeypatch, tmp_path, name, *flags):
    monkeypatch.setenv("NOTES", str(tmp_path / name))
    return train("--name", name, *flags, config=STREAM)


def flat(batches):
    return [number for batch in batches for number in batch]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", streams.KINDS)
def test_a_resume_within_an_epoch_goes_on_with_the_next_sample(
    train, tmp_path, monkeypatch, notes, kind, num_workers
):
    flags = ("--data.kind", kind, "--data.num_workers", num_workers)
    flags += ("--data.drop_last", "false")
    run(train, monkeypatch, tmp_path, "whole", *flags)
    stop = '[{"class_path": "stops.Terminate", "init_args": {}}]'
    monkeypatch.setattr("stops.Terminate.at_batch", 20)
    with pytest.raises(SystemExit):
        run(train, monkeypatch, tmp_path, "cut", *flags, "--trainer.callbacks", stop)
    monkeypatch.setattr("stops.Terminate.at_batch", None)
    state = checkpoint(tmp_path / "cut" / "version_0")["loops"]["fit_loop"][
        "state_dict"
    ]
    assert state["combined_loader"][0]["ranks"][0]["num_batches"] == 21
    run(train, monkeypatch, tmp_path, "cut", "--ckpt_path", "last")

    whole, cut = notes("whole"), notes("cut")
    assert whole == cut
    for epoch in range(2):
        numbers = flat(whole[epoch])
        assert sorted(numbers) == list(range(1000))
        assert numbers != sorted(numbers)
        assert sorted(flat(notes("whole", "val")[epoch])) == list(range(101))
    assert whole[0] != whole[1]
    assert equal(
        weights(tmp_path / "whole" / "version_0"),
        weights(tmp_path / "cut" / "version_0"),
    )


@pytest.mark.slow
@pytest.mark.linux
@pytest.mark.parametrize("kind", streams.KINDS)
def test_a_run_on_two_ranks_that_is_killed_ends_as_one_that_is_not(
    tmp_path, monkeypatch, notes, kind
):
    flags = f"--config {STREAM} --trainer.devices 2 --trainer.strategy ddp"
    flags += f" --data.kind {kind} --data.num_workers 2 --test false"

    def start(name, status, *more):
        monkeypatch.setenv("NOTES", str(tmp_path / name))
        process = start_train(tmp_path, flags, "--name", name, *more)
        output, _ = process.communicate(timeout=LIMIT_S)
        assert process.returncode == status, output

    start("whole", 0)
    start("killed", -signal.SIGKILL, "--trainer.callbacks streams.SaveAndDie")
    start("killed", 0, "--ckpt_path last")
    assert len(notes("killed")[1]) > 12
    seen = defaultdict(list)
    for stage in ("train", "val"):
        for rank in range(2):
            whole = notes("whole", stage, rank)
            assert whole == notes("killed", stage, rank)
            for epoch in range(2):
                seen[stage, epoch] += flat(whole[epoch])
    for epoch in range(2):
        # each of the four workers leaves out a last batch that is smaller
        assert len(seen["train", epoch]) == len({*seen["train", epoch]}) == 4 * 240
        assert sorted(seen["val", epoch]) == list(range(101))
    assert len(notes("whole")[0]) == len(notes("whole", rank=1)[0])
    assert equal(
        weights(tmp_path / "whole" / "version_0"),
        weights(tmp_path / "killed" / "version_0"),
    )
