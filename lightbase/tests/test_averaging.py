"""Averaged weights: a resume goes on with the mean. What averages too late is refused.
test_validated.py has what is validated, saved, tested and loaded again."""

import pytest
from lightning.pytorch.callbacks import WeightAveraging
from written import equal, refused, weights

CALLBACKS = "--trainer.callbacks lightning.pytorch.callbacks"


class LateAverage(WeightAveraging):
    """Averages from the last step of the second epoch on."""

    def should_update(self, step_idx=None, epoch_idx=None):
        return step_idx is not None and step_idx > 36


@pytest.mark.parametrize(
    "callback",
    [
        f"{CALLBACKS}.EMAWeightAveraging --trainer.callbacks.update_starting_at_step 99",
        "--trainer.callbacks test_averaging.LateAverage",
    ],
)
def test_until_the_first_update_the_average_is_what_trains(
    train, trained, tmp_path, callback
):
    plain, expected = trained("--trainer.max_epochs 1")
    metrics = train(callback, "--trainer.max_epochs 1")
    folder = tmp_path / "tiny" / "version_0"
    for name in ("best", "last"):
        assert equal(weights(folder, name), weights(plain, name))
    assert metrics | {"train_seconds": 0} == expected | {"train_seconds": 0}


@pytest.mark.parametrize(
    "flags",
    [
        "--trainer.callbacks test_averaging.LateAverage",
        pytest.param(
            f"{CALLBACKS}.EMAWeightAveraging --trainer.callbacks.decay 0.9",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_an_average_goes_on_after_a_resume(train, trained, tmp_path, flags):
    whole, _ = trained(flags, "--trainer.max_epochs 3")
    assert not equal(weights(whole), weights(trained("--trainer.max_epochs 3")[0]))
    train(flags, "--trainer.max_epochs 1")
    train("--ckpt_path last --trainer.max_epochs 2")
    train("--ckpt_path last --trainer.max_epochs 3")
    for name in ("best", "last"):
        folder = tmp_path / "tiny" / "version_0"
        assert equal(weights(folder, name), weights(whole, name))


def test_averages_that_no_validation_has_seen_are_refused(train, tmp_path, capsys):
    flags = f"{CALLBACKS}.StochasticWeightAveraging --trainer.callbacks.swa_lrs 0.01"
    error = refused(capsys, tmp_path, lambda: train(flags), 2)
    assert "StochasticWeightAveraging averages weights after the last valid" in error
