"""A loss or a metric that cannot take the outputs and the targets."""

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor, nn
from torchmetrics import MeanMetric

Train = Callable[..., dict[str, Any]]


class BrokenLoss(nn.Module):
    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.mse_loss(outputs, targets.unknown)


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


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize(
    ("criterion", "kind"),
    [("torch.nn.MSELoss", RuntimeError), ("test_misfits.BrokenLoss", AttributeError)],
)
def test_a_loss_that_does_not_fit_ends_in_a_traceback_with_its_call(train, criterion, kind):
    with pytest.raises(kind) as caught:
        train("--model.criterion", criterion)
    assert any("self.criterion(" in str(entry.statement) for entry in caught.traceback)
