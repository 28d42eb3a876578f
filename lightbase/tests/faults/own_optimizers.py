"""LightningModules whose `configure_optimizers` is a user's: subclasses of Classifier,
and plain ones."""

import os
import signal
from typing import Any

import torch
from example.classifier import Classifier
from lightning import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, lr_scheduler


class Plateau(Classifier):
    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.parameters(), lr=0.05, momentum=0.9)
        # after the first epoch none is good enough
        scheduler = lr_scheduler.ReduceLROnPlateau(
            optimizer, patience=0, threshold=1000, threshold_mode="abs"
        )
        config = {"scheduler": scheduler, "monitor": "val/loss"}
        return {"optimizer": optimizer, "lr_scheduler": config}


class Estimated(Classifier):
    def configure_optimizers(self) -> Any:
        optimizer = AdamW(self.parameters(), lr=0.02)
        num_steps = int(self.trainer.estimated_stepping_batches)
        scheduler = lr_scheduler.OneCycleLR(optimizer, 0.05, num_steps)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Plain(LightningModule):
    """A plain LightningModule with dropout. Its schedule watches what the module logs
    last of all in an epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Dropout(0.3), nn.Linear(192, 4))

    def _step(self, batch: tuple[Tensor, Tensor], stage: str) -> Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log(f"{stage}/loss", loss)
        return loss

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        self.log("lr", self.trainer.optimizers[0].param_groups[0]["lr"])
        return self._step(batch, "train")

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self._step(batch, "val")

    def on_train_epoch_end(self) -> None:
        self.log("waiting", 1.0 + self.current_epoch)

    def configure_optimizers(self) -> Any:
        optimizer = Adam(self.parameters(), lr=0.02)
        scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        config = {"scheduler": scheduler, "monitor": "waiting"}
        return {"optimizer": optimizer, "lr_scheduler": config}


class Adversarial(Plain):
    """Two networks, two optimizers, each with its schedule, all stepped by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Linear(8, 192)
        self.critic = nn.Linear(192, 1)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("lr", self.trainer.optimizers[0].param_groups[0]["lr"])
        fake = self.generator(torch.randn(len(batch[0]), 8))
        losses = (fake.square().mean(), self.critic(fake.detach()).square().mean())
        optimizers: Any = self.optimizers()
        schedulers: Any = self.lr_schedulers()
        for optimizer, scheduler, loss in zip(
            optimizers, schedulers, losses, strict=True
        ):
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            scheduler.step()
        self.log("train/loss", losses[0].detach())

    def configure_optimizers(self) -> Any:
        optimizers = [
            Adam(self.generator.parameters(), lr=0.01),
            SGD(self.critic.parameters(), lr=0.01, momentum=0.9),
        ]
        return optimizers, [lr_scheduler.ExponentialLR(x, 0.95) for x in optimizers]


class Stop(Callback):
    """Ends the process by a signal, after a batch: `STOP_AT="1 3 SIGTERM"` in the
    environment names epoch and batch."""

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, *_: Any
    ) -> None:
        epoch, batch, name = os.environ.get("STOP_AT", "-1 0 SIGTERM").split()
        newest = [trainer.current_epoch, trainer.fit_loop.batch_idx]
        if newest == [int(epoch), int(batch)]:
            signal.raise_signal(signal.Signals[name])
