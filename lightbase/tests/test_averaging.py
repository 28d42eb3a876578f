"""Averaged weights: what is validated is what is saved, tested and loaded again."""

import pytest
from lightning.pytorch.callbacks import WeightAveraging
from paths import script
from written import checkpoint_file, refused

LIGHTNING = "--trainer.callbacks lightning.pytorch.callbacks"
LR = "--model.lr 0.003"


class AtEpochEnds(WeightAveraging):
    def should_update(
        self, step_idx: int | None = None, epoch_idx: int | None = None
    ) -> bool:
        return epoch_idx is not None


def test_averaged_weights_are_validated_saved_tested_and_loaded_again(train, tmp_path):
    plain = train(LR, "--name plain")
    found = train(LR, f"{LIGHTNING}.WeightAveraging")
    assert found["test/loss"] != plain["test/loss"]
    best = checkpoint_file(tmp_path / "tiny" / "version_0")
    again = script("evaluate").main(["--ckpt_path", str(best)])
    assert again["test/loss"] == pytest.approx(found["test/loss"], rel=1e-6)


@pytest.mark.slow
def test_a_resumed_average_is_that_of_an_uninterrupted_run(train):
    averaging = f"{LIGHTNING}.EMAWeightAveraging --trainer.callbacks.decay 0.9"
    whole = train(LR, averaging, "--trainer.max_epochs 3")
    train(LR, averaging, "--trainer.max_epochs 1 --name parts")
    flags = "--trainer.max_epochs 3 --name parts --ckpt_path last"
    parts = train(LR, averaging, flags)
    assert parts["test/loss"] == whole["test/loss"]


@pytest.mark.parametrize(
    ("callback", "status", "flags"),
    [
        (
            "StochasticWeightAveraging",
            2,
            f"{LIGHTNING}.StochasticWeightAveraging --trainer.callbacks.swa_lrs 0.01",
        ),
        ("AtEpochEnds", 1, "--trainer.callbacks test_averaging.AtEpochEnds"),
    ],
)
def test_weights_that_no_validation_has_seen_are_refused(
    train, tmp_path, capsys, callback, status, flags
):
    error = refused(capsys, tmp_path, lambda: train(flags), status)
    assert callback in error
    assert "validat" in error
