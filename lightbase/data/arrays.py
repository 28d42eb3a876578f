"""Data without a class: arrays, Datasets or DataLoaders, for `lightbase.train`."""

from typing import Any, Literal

from lightning import LightningDataModule
from torch.utils.data import DataLoader

from lightbase.config.errors import UserError
from lightbase.data.module import BaseDataModule


class ArrayData(BaseDataModule):
    """Samples that exist already: arrays, such as a pair (inputs, targets), or
    Datasets. The inputs are not normalised.

    Args:
        class_names: The names of the classes: target i stands for class_names[i].
        image_shape: Channels, height and width of the inputs if they are images. Then
            the run has pictures.
        arguments: Arguments of BaseDataModule, such as batch_size.
    """

    def __init__(
        self,
        class_names: list[str] | None = None,
        image_shape: tuple[int, int, int] | None = None,
        **arguments: Any,
    ) -> None:
        super().__init__(**arguments)
        self.classes = class_names or []
        self.image_shape = image_shape
        self.parts: dict[str, Any] = {}
        self.own_splits = self.parts  # without "val", some of "train" is for validation

    def load(self, split: Literal["train", "test"]) -> Any:
        return self.parts[split]


def loader_data(loaders: dict[str, Any]) -> LightningDataModule:
    """Return a data module of the user's own loaders, which are used as they are.

    loaders: "train", and if they are there "val" and "test".
    """
    data = LightningDataModule()
    for split, loader in loaders.items():
        if not isinstance(loader, DataLoader):
            raise UserError(f"train is a DataLoader, so {split} has to be one, too")
        setattr(data, f"{split}_dataloader", lambda loader=loader: loader)
    return data
