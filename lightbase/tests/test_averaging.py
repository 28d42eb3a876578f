"""Averaged weights: a resume goes on with the mean. What averages too late is refused.
test_validated.py has what is validated, saved, tested and loaded again."""

import pytest
from written import refused

CALLBACKS = "--trainer.callbacks lightning.pytorch.callbacks"


@pytest.mark.slow
def test_a_resumed_average_is_that_of_an_uninterrupted_run(train):
    averaging = f"--model.lr 0.003 {CALLBACKS}.EMAWeightAveraging"
    averaging += " --trainer.callbacks.decay 0.9"
    straight = train(averaging, "--trainer.max_epochs 3")
    train(averaging, "--trainer.max_epochs 1 --name parts")
    flags = "--trainer.max_epochs 3 --name parts --ckpt_path last"
    assert train(averaging, flags)["test/loss"] == straight["test/loss"]
    plain = train("--model.lr 0.003 --trainer.max_epochs 3")
    assert plain["test/loss"] != straight["test/loss"]


def test_averages_that_no_validation_has_seen_are_refused(train, tmp_path, capsys):
    flags = f"{CALLBACKS}.StochasticWeightAveraging --trainer.callbacks.swa_lrs 0.01"
    error = refused(capsys, tmp_path, lambda: train(flags), 2)
    assert "StochasticWeightAveraging averages weights after the last valid" in error
