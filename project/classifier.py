"""Trains a network to tell classes apart. Yours: change what you like; base/system.py has what is not here."""

from typing import Any

from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy

from project.base.means import Metrics
from project.base.samples import Batch
from project.base.system import System


class Classifier(System):
    """Trains `net`: inputs (N, ...) to logits (N, classes), for labels int64 (N,).

    Args:
        net: The network.
        criterion: The loss of logits and labels, a mean over the batch; cross-entropy unless given.
        metrics: By name, {f1: {class_path: torchmetrics.classification.MulticlassF1Score}}; accuracy unless given.
        num_classes: Filled in from the data, here and wherever a network, loss or metric takes it.
        system: Optimiser, schedule and so on, see System.
    """

    def __init__(
        self,
        net: nn.Module,
        criterion: nn.Module | None = None,
        metrics: Metrics | Metric | None = None,
        num_classes: int | None = None,
        **system: Any,
    ) -> None:
        if num_classes == 1:
            raise ValueError("num_classes 1: there is nothing to tell apart; give data of two classes or more")
        accuracy = MulticlassAccuracy(num_classes, average="micro", validate_args=False)  # the checks wait for a GPU
        super().__init__(net, criterion or nn.CrossEntropyLoss(), metrics or {"acc": accuracy}, **system)
        self.num_classes = num_classes

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self.net(x).float()
        loss = self.criterion(logits, y)
        self.track("train", loss, logits, y)  # train/loss and the metrics; without logits and y the loss alone
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self.net(x).float()
        self.track("val", self.criterion(logits, y), logits, y)
        return logits  # for the pictures

    def test_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x).float()  # the network's, or their mean over test_views
        self.track("test", self.criterion(logits, y), logits, y)
        return logits

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The probability of each class, (N, classes)."""
        return self(batch[0]).float().softmax(1)
