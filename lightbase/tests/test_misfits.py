"""A metric that cannot take the outputs and the targets."""

import pytest


def test_a_metric_of_torchmetrics_that_does_not_fit_is_two_lines(
    train, tmp_path, capsys
):
    with pytest.raises(SystemExit) as caught:
        train("--model.metrics.unfit torchmetrics.classification.BinaryF1Score")
    assert caught.value.code == 1
    error = capsys.readouterr().err
    assert len(error.splitlines()) <= 2
    assert "the metrics unfit cannot take outputs (32, 4) and targets (32,): " in error
    assert not (tmp_path / "tiny").exists()
