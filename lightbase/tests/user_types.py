# mypy: warn-unused-ignores
"""The types that mypy sees in a user's project. Nothing runs this file: .ci/run lets
mypy check it. Each line below `wrong` is an error, which mypy has to find."""

from pathlib import Path

import numpy as np
from torch import Tensor, nn

from lightbase import BaseDataModule, BaseModule, Batch, load, predict, train


class Module(BaseModule):
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self.criterion(self(batch[0]), batch[1])


class Data(BaseDataModule):
    def load(self, split: str) -> tuple[np.ndarray, np.ndarray]:
        return np.zeros((4, 2)), np.zeros(4)


result = train(Module(nn.Linear(2, 2)), Data(batch_size=4), max_epochs=1)
folder: Path | None = result.folder
numbers: dict[str, float] = result.metrics
predict(result, np.zeros(2))
module, data = load("name")
module.freeze()


def wrong() -> None:
    print(result.best_epoch + "1")  # type: ignore[operator]
    train(3)  # type: ignore[arg-type]
    module.frieze()  # type: ignore[operator]
