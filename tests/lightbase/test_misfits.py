"""A metric that cannot take the outputs and the targets."""

import pytest
from paths import Train
from torch import Tensor
from torchmetrics import MeanMetric


class BrokenMetric(MeanMetric):
    higher_is_better = True

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        super().update(targets.unknown)


def test_a_metric_of_torchmetrics_that_does_not_fit_is_two_lines(train, tmp_path, capsys):
    with pytest.raises(SystemExit) as caught:
        train("--model.metrics.unfit torchmetrics.classification.BinaryF1Score")
    assert caught.value.code == 1
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 2
    assert "the metrics unfit cannot take outputs (32, 4) and targets (32,): " in error
    assert not (tmp_path / "tiny").exists()


def test_a_metric_of_ones_own_keeps_its_traceback_and_gets_a_note(train: Train) -> None:
    with pytest.raises(AttributeError, match="unknown") as caught:
        train("--model.metrics.broken", "test_misfits.BrokenMetric")
    assert caught.traceback[-1].name == "update"
    assert caught.value.__notes__ == [
        "the metrics broken cannot take outputs (32, 4) and targets (32,)"
    ]
