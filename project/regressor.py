"""Trains a network to predict numbers. Yours: change what you like."""

from typing import Any

from torch import Tensor, nn
from torchmetrics import MeanAbsoluteError, Metric

from lightbase import (
    BaseModule,
    Batch,
    Metrics,
    UserError,
    at_least_float32,
    collection,
)


class Regressor(BaseModule):
    """Trains `net`: inputs (N, ...) to numbers (N, D), for targets float32 (N, D), or
    (N,) if D is 1.

    Args:
        net: The network.
        criterion: The loss, a mean over the batch; mean squared error unless given.
        metrics: By name, beside the mean absolute error, `mae`. {mae: null} leaves it
            out.
        system: Optimizer, schedule and so on, see `lightbase.BaseModule`.
    """

    task = "regression"

    def __init__(
        self,
        net: nn.Module,
        criterion: nn.Module | None = None,
        metrics: Metrics | Metric | None = None,
        **system: Any,
    ) -> None:
        metrics = collection(metrics, defaults={"mae": MeanAbsoluteError()})
        super().__init__(net, criterion or nn.MSELoss(), metrics, **system)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss, predicted = self.loss_and_prediction(batch)
        self.track("train", loss, predicted, batch[1])
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss, predicted = self.loss_and_prediction(batch)
        self.track("val", loss, predicted, batch[1])
        return predicted  # for the pictures

    def test_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss, predicted = self.loss_and_prediction(batch)
        self.track("test", loss, predicted, batch[1])
        return predicted

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the numbers, (N, D)."""
        return at_least_float32(self(batch[0]))

    def loss_and_prediction(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the loss, and the numbers in the shape of the targets. Raise UserError
        if the network gives another shape; (N, 1) and (N,) count as equal."""
        x, y = batch
        predicted = at_least_float32(self(x))
        # (N, 1) against (N,) would be compared as (N, N)
        if predicted.numel() == len(predicted) == len(y) == y.numel():
            predicted = predicted.view_as(y)
        if predicted.shape != y.shape:
            raise UserError(
                f"model.net gives {[*predicted.shape]} for targets {[*y.shape]}",
                "let the network give a number for each target",
            )
        return self.criterion(predicted, y), predicted
