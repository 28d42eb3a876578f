"""Trains a network to tell classes apart. Yours: change what you like."""

from typing import Any

from jsonargparse.typing import PositiveInt
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy

from lightbase import BaseModule, Batch, Metrics, at_least_float32, collection


class Classifier(BaseModule):
    """Trains `net`: inputs (N, ...) to logits (N, classes), for labels int64 (N,).

    Args:
        net: The network.
        criterion: The loss of logits and labels, a mean over the batch; cross-entropy
            unless given.
        metrics: Beside the accuracy, `acc`, by name: {f1: {class_path:
            torchmetrics.classification.MulticlassF1Score}}. {acc: null} leaves the
            accuracy out.
        num_classes: Filled in from the data, here and wherever a network, loss or
            metric takes it.
        per_class: Add the accuracy of each class, as curves val_class_acc/NAME.
        top_k: Add the share of samples whose class is among the k likeliest, as
            val/top5 with 5.
        system: Optimizer, schedule and so on, see `lightbase.BaseModule`.
    """

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

        def accuracy(**options: Any) -> Metric:
            # validate_args would wait for the GPU
            return MulticlassAccuracy(num_classes, validate_args=False, **options)

        metrics = collection(metrics, defaults={"acc": accuracy(average="micro")})
        if per_class:
            metrics = collection(metrics, {"class_acc": accuracy(average=None)})
        if top_k:
            top = accuracy(average="micro", top_k=top_k)
            metrics = collection(metrics, {f"top{top_k}": top})
        super().__init__(net, criterion or nn.CrossEntropyLoss(), metrics, **system)
        self.num_classes = num_classes

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x, y = batch
        logits = at_least_float32(self(x))
        loss = self.criterion(logits, y)
        # train/loss and the metrics; without logits and y only the loss
        self.track("train", loss, logits, y)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x, y = batch
        logits = at_least_float32(self(x))
        self.track("val", self.criterion(logits, y), logits, y)
        return logits  # for the pictures

    def test_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x, y = batch
        logits = at_least_float32(self(x))
        self.track("test", self.criterion(logits, y), logits, y)
        return logits

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the probability of each class, (N, classes)."""
        return at_least_float32(self(batch[0])).softmax(1)
