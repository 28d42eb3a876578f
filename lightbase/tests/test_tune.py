"""The finders of batch size and learning rate: what they suggest, what they leave
behind, what they say."""

import pytest
import torch
from example.models.mlp import MLP
from paths import TINY, argv, fails, script

tune = script("tune")


@pytest.fixture
def find(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # Lightning collects for each size, which takes seconds late in a session
    monkeypatch.setattr("gc.collect", lambda *_: 0)

    def run(*args):
        place = ("--trainer.default_root_dir", tmp_path)
        return tune.main(argv("--config", TINY, *place, *args))

    return run


@pytest.mark.slow
def test_both_are_suggested_as_flags(find, tmp_path, capsys):
    flags = find("--num_steps 50 --max_batch_size 128")
    assert flags[:3] == ["--data.batch_size", "128", "--model.lr"]
    assert 1e-5 < float(flags[3]) < 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == f"Suggested flags: {' '.join(flags)}"
    left = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert left == [tmp_path / "tiny_tune" / "version_0" / "lr.png"]
    assert left[0].read_bytes().startswith(b"\x89PNG")


class MemoryOf100(MLP):
    """A network for whose batches over 100 samples there is no memory."""

    def forward(self, x):
        if len(x) > 100:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 TiB")
        return super().forward(x)


BATCH_SIZES = {
    "--model.net test_tune.MemoryOf100": "64",
    "--data.num_train 200 --data.val_fraction 0.36": "128",  # of 128 samples
}


@pytest.mark.slow
@pytest.mark.parametrize("flags", BATCH_SIZES)
def test_the_largest_batch_size_that_fits_is_suggested(find, flags):
    suggested = find("--find batch_size", flags)
    assert suggested == ["--data.batch_size", BATCH_SIZES[flags]]


@pytest.mark.slow
def test_mistakes_and_wrong_ranges_are_told_in_two_lines(find, capsys):
    with pytest.raises(SystemExit):
        find("--find lr --max_lr 1e300 --num_steps 100")
    # Lightning's bar stands before the error
    error = capsys.readouterr().err.partition("error: ")[2]
    assert error.splitlines()[1].startswith("give another --min_lr or --max_lr")
    several = "--find lr --trainer.strategy ddp --trainer.devices 2"
    assert "runs on one device" in fails(capsys, 2, lambda: find(several))
    assert "--min_lr" in fails(capsys, 2, lambda: find("--find lr --min_lr 0"))


def test_a_finder_within_a_run_is_refused(train, tmp_path, capsys):
    flag = "--trainer.callbacks lightning.pytorch.callbacks.BatchSizeFinder"
    error = fails(capsys, 2, lambda: train(flag))
    assert (
        "a BatchSizeFinder changes a setting of the run; search before the run" in error
    )
    assert not list(tmp_path.iterdir())
