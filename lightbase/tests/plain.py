"""A module and a data module of Lightning alone: other people's code, that several test
files train."""

from typing import Any

import torch
from lightning import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class PlainModule(LightningModule):
    """A linear regression, logged by `self.log`."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.loss = nn.MSELoss()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(self.layer(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(self.layer(batch[0]), batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


class PlainData(LightningDataModule):
    """Vectors of 4 numbers and their sums, in stock DataLoaders."""

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(sums(150, seed=0), batch_size=8, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(sums(20, seed=1), batch_size=8)


def sums(num: int, seed: int) -> TensorDataset:
    x = torch.randn(num, 4, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, x.sum(1, keepdim=True))
