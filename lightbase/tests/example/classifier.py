"""Trains a network to tell classes apart."""

from typing import Any

from jsonargparse.typing import PositiveInt
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy

from lightbase import BaseModule, Batch, Metrics, at_least_float32, collection


class Classifier(BaseModule):
    """Trains `net`: inputs (N, ...) to logits (N, classes), for labels int64 (N,)."""

    task = "multiclass"

    def __init__(
        self,
        net: nn.Module,
        criterion: nn.Module | None = None,
        metrics: Metrics | Metric | None = None,
        num_classes: int | None = None,
        per_class: bool = False,
        top_k: PositiveInt | None = None,
        **system: Any,
    ) -> None:
        if num_classes == 1:
            raise ValueError(
                "num_classes 1: there is nothing to tell apart; give more classes"
            )
        if top_k and num_classes and top_k > num_classes:
            raise ValueError(
                f"top_k {top_k}: there are {num_classes} classes; give fewer"
            )

        def accuracy(average: Any, top_k: int = 1) -> Metric:
            return MulticlassAccuracy(num_classes, top_k, average, validate_args=False)

        metrics = metrics or {"acc": accuracy("micro")}
        if per_class:
            metrics = collection(metrics, {"class_acc": accuracy(None)})
        if top_k:
            metrics = collection(metrics, {f"top{top_k}": accuracy("micro", top_k)})
        super().__init__(net, criterion or nn.CrossEntropyLoss(), metrics, **system)
        self.num_classes = num_classes

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss, _ = self._step("train", self(batch[0]), batch[1])
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> Tensor:
        _, logits = self._step("val", self(batch[0]), batch[1])
        return logits

    def test_step(self, batch: Batch, batch_idx: int) -> Tensor:
        _, logits = self._step("test", self(batch[0]), batch[1])
        return logits

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return at_least_float32(self(batch[0])).softmax(1)

    def _step(self, stage: Any, logits: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        logits = at_least_float32(logits)
        loss = self.criterion(logits, y)
        self.track(stage, loss, logits, y)
        return loss, logits
