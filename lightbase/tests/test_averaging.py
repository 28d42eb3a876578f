"""Averaged weights: what is validated is what is saved, tested and loaded again."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch.callbacks import WeightAveraging
from paths import Train, script


class AtEpochEnds(WeightAveraging):
    def should_update(
        self, step_idx: int | None = None, epoch_idx: int | None = None
    ) -> bool:
        return epoch_idx is not None


def with_callback(folder: Path, class_path: str, **init_args: Any) -> list[str]:
    callback = {"class_path": class_path, "init_args": init_args}
    file = folder / "averaging.yaml"
    file.write_text(yaml.safe_dump({"trainer": {"callbacks": [callback]}}))
    return ["--config", str(file), "--model.lr", "0.003"]


def test_averaged_weights_are_validated_saved_tested_and_loaded_again(train, tmp_path):
    averaging = with_callback(tmp_path, "lightning.pytorch.callbacks.WeightAveraging")
    plain, found = train("--model.lr 0.003 --name plain"), train(*averaging)
    assert found["test/loss"] != plain["test/loss"]
    best = tmp_path / "tiny" / "version_0" / "checkpoints" / "best.ckpt"
    again = script("evaluate").main(["--ckpt_path", str(best)])
    assert again["test/loss"] == pytest.approx(found["test/loss"], rel=1e-6)


@pytest.mark.slow
def test_a_resumed_average_is_that_of_an_uninterrupted_run(
    train: Train, tmp_path: Path
) -> None:
    averaging = with_callback(
        tmp_path, "lightning.pytorch.callbacks.EMAWeightAveraging", decay=0.9
    )
    whole = train(*averaging, "--trainer.max_epochs 3")
    train(*averaging, "--trainer.max_epochs 1 --name parts")
    parts = train(*averaging, "--trainer.max_epochs 3 --name parts --ckpt_path last")
    assert parts["test/loss"] == whole["test/loss"]


@pytest.mark.parametrize(
    ("callback", "init_args"),
    [
        ("lightning.pytorch.callbacks.StochasticWeightAveraging", {"swa_lrs": 0.01}),
        ("test_averaging.AtEpochEnds", {}),
    ],
)
def test_weights_that_no_validation_has_seen_are_refused(
    train, tmp_path, capsys, callback, init_args
):
    with pytest.raises(SystemExit):
        train(*with_callback(tmp_path, callback, **init_args))
    error = capsys.readouterr().err
    assert callback.rpartition(".")[2] in error
    assert "validat" in error
    assert not (tmp_path / "tiny").exists()
