"""A loss or a metric that does not fit ends a run in two lines; a bug in one of the user's own keeps its traceback."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

Train = Callable[..., dict[str, Any]]


class Broken(nn.Module):
    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.mse_loss(outputs, targets.unknown)


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize(
    "flags",
    [
        ("--model.criterion", "torch.nn.MSELoss"),
        pytest.param(("--model.criterion", "torch.nn.GaussianNLLLoss"), marks=pytest.mark.slow),
        pytest.param(("--model.metrics.mse", "torchmetrics.MeanSquaredError"), marks=pytest.mark.slow),
        ("--model.metrics.f1", "torchmetrics.classification.BinaryF1Score"),
    ],
)
def test_a_loss_or_metric_that_does_not_fit_is_two_lines(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        train(*flags)
    assert caught.value.code == 1
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 2
    assert flags[1].rpartition(".")[2] in error
    assert not (tmp_path / "tiny").exists()


def test_a_bug_in_a_loss_of_ones_own_keeps_its_traceback(train: Train) -> None:
    with pytest.raises(AttributeError):
        train("--model.criterion", "test_misfits.Broken")
