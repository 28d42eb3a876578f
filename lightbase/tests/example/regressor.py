"""Trains a network to predict numbers."""

from typing import Any

from torch import Tensor, nn
from torchmetrics import MeanAbsoluteError, Metric

from lightbase import BaseModule, Batch, Metrics, UserError, at_least_float32


class Regressor(BaseModule):
    """Trains `net`: inputs (N, ...) to numbers (N, D), for targets (N, D), or (N,) if D
    is 1."""

    task = "regression"

    def __init__(
        self,
        net: nn.Module,
        criterion: nn.Module | None = None,
        metrics: Metrics | Metric | None = None,
        **system: Any,
    ) -> None:
        metrics = metrics or {"mae": MeanAbsoluteError()}
        super().__init__(net, criterion or nn.MSELoss(), metrics, **system)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss, _ = self._step("train", self(batch[0]), batch[1])
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> Tensor:
        _, predicted = self._step("val", self(batch[0]), batch[1])
        return predicted

    def test_step(self, batch: Batch, batch_idx: int) -> Tensor:
        _, predicted = self._step("test", self(batch[0]), batch[1])
        return predicted

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return at_least_float32(self(batch[0]))

    def _step(self, stage: Any, predicted: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        if predicted.numel() != y.numel():
            shapes = f"{tuple(predicted.shape)} for targets {tuple(y.shape)}"
            raise UserError(f"model.net gives {shapes}: make them agree")
        predicted = at_least_float32(predicted).view_as(y)
        loss = self.criterion(predicted, y)
        self.track(stage, loss, predicted, y)
        return loss, predicted
