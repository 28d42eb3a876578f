"""Data that streams: each sample once an epoch, and a resume goes on with the next."""

import json
import signal
from collections import defaultdict
from dataclasses import replace

import pytest
import streams
from paths import HERE, fails, script
from ranks import LIMIT_S, start_train
from streams import Stateful, Streams
from torch.utils.data import default_collate
from written import checkpoint, equal, weights

from lightbase.config.errors import UserError
from lightbase.data.stream import (
    StreamLoader,
    StreamSamples,
    check_stream,
    state_of,
)

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


@pytest.mark.parametrize(
    ("kind", "num_workers"),
    [
        ("plain", 0),
        ("stateful", 2),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [("plain", 2), ("stateful", 0), ("sharded", 0), ("sharded", 2)]
        ),
    ],
)
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


class Misfit(Streams):
    """Uses a stream as only samples with numbers can be used."""

    own_splits = ("train", "test")


class Weighted(Streams):
    def sample_weights(self, split):
        return [1.0] * 1000


class Unseeded(Streams):
    def load(self, split):
        return Drifting(1000)


class Drifting(Stateful):
    """Its second pass begins with another sample, as with a shuffle without a seed."""

    passes = 0

    def __iter__(self):
        Drifting.passes += 1
        self.next += Drifting.passes
        yield from super().__iter__()


class Behind(Streams):
    def load(self, split):
        return Forgetful(1000)


class Forgetful(Stateful):
    """Its state is that before the newest sample."""

    def state_dict(self):
        return {"next": max(0, self.next - 1)}


class Empty(Streams):
    def load(self, split):
        return streams.Plain(0)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--data test_streams.Misfit", "its samples have no numbers"),
        ("--data.num_folds 5 --data.fold 0", "its samples have no numbers"),
        ("--data.val_split stratified", "its samples have no numbers"),
        ("--data test_streams.Weighted", "its samples have no numbers"),
        ("--data test_streams.Unseeded", "a second pass begins with other samples"),
        ("--data test_streams.Behind", "the state leads to another one"),
        ("--data test_streams.Empty", "a stream has no samples"),
    ],
)
def test_what_a_stream_cannot_do_is_refused(train, tmp_path, capsys, flags, message):
    error = fails(capsys, 2, lambda: train(flags, config=STREAM))
    assert message in error
    assert not [*tmp_path.rglob("version_*")]


def test_a_resume_within_an_epoch_needs_as_many_workers(
    train, tmp_path, monkeypatch, capsys
):
    stop = '[{"class_path": "stops.Terminate", "init_args": {}}]'
    monkeypatch.setattr("stops.Terminate.at_batch", 20)
    with pytest.raises(SystemExit):
        train("--trainer.callbacks", stop, config=STREAM)
    capsys.readouterr()
    flags = "--ckpt_path last --data.num_workers 2"
    error = fails(capsys, 2, lambda: train(flags, config=STREAM))
    assert "read by processes: 1, workers of each: 1" in error


def test_evaluate_counts_each_sample_and_predict_refuses(train, tmp_path, capsys):
    metrics = train(config=STREAM)
    assert metrics["test/num_samples"] == 60
    best = tmp_path / "stream" / "version_0" / "checkpoints" / "best.ckpt"
    script("evaluate").main(["--ckpt_path", str(best)])
    assert "60" in capsys.readouterr().out
    error = fails(capsys, 2, lambda: script("predict").main(["--ckpt_path", str(best)]))
    assert "no such set with a length" in error


def test_a_limited_epoch_resumes_at_the_next_sample(
    train, tmp_path, monkeypatch, notes
):
    """With limit_train_batches, Lightning does not ask for a batch ahead."""
    flags = "--trainer.limit_train_batches 30"
    run(train, monkeypatch, tmp_path, "whole", flags)
    stop = '[{"class_path": "stops.Terminate", "init_args": {}}]'
    monkeypatch.setattr("stops.Terminate.at_batch", 20)
    with pytest.raises(SystemExit):
        run(train, monkeypatch, tmp_path, "cut", flags, "--trainer.callbacks", stop)
    monkeypatch.setattr("stops.Terminate.at_batch", None)
    run(train, monkeypatch, tmp_path, "cut", "--ckpt_path", "last")
    assert notes("whole") == notes("cut")


def test_streams_of_datasets(tmp_path):
    """Without a shuffle of samples, each comes once, and a pass goes on with the next
    one. With a buffer, it is refused."""
    datasets = pytest.importorskip("datasets")
    for number in range(4):
        lines = [json.dumps({"id": 50 * number + i}) for i in range(50)]
        (tmp_path / f"{number}.jsonl").write_text("\n".join(lines))
    files = sorted(map(str, tmp_path.glob("*.jsonl")))
    stream = datasets.load_dataset(
        "json", data_files=files, split="train", streaming=True, cache_dir=tmp_path
    )

    def loader_of(rank, position):
        samples = StreamSamples(
            stream, state_of(stream), default_collate, batch_size=8, block_size=20
        )
        samples = replace(samples, rank=rank, num_ranks=2)
        return StreamLoader(samples, lambda: position, even=False, num_workers=2)

    seen = []
    for rank in range(2):
        batches = [batch["id"].tolist() for batch in loader_of(rank, (0, 0))]
        loader = loader_of(rank, (0, 3))
        state = [loader.state_dict() for _, _ in zip(range(4), loader, strict=False)][3]
        again = loader_of(rank, (0, 3))
        again.load_state_dict({"ranks": state["ranks"] * 2})
        assert [batch["id"].tolist() for batch in again] == batches[3:]
        seen += flat(batches)
    assert sorted(seen) == list(range(200))
    stream = stream.shuffle(seed=0, buffer_size=10)
    samples = StreamSamples(stream, state_of(stream), default_collate)
    with pytest.raises(UserError, match="buffer"):
        check_stream(samples, "it")
