"""Data modules whose `load` returns what a test gives them."""

from typing import Any

import torch

from lightbase.data.module import BaseDataModule


class Given(BaseDataModule):
    """The data of a test, whatever `load` may return.

    test: The test set; the same as the training set if it is not given.
    """

    def __init__(
        self,
        train: Any,
        test: Any = None,
        classes: tuple[str, ...] = (),
        **options: Any,
    ) -> None:
        super().__init__(**{"batch_size": 8, "val_fraction": 0.2, **options})
        self.loaded = {"train": train, "test": train if test is None else test}
        self.classes = list(classes)

    def load(self, split: str) -> Any:  # type: ignore[override]
        return self.loaded[split]


class OwnSplits(Given):
    """100 training samples, 7 for validation and 20 for the test. Only the splits in
    `own_splits` exist."""

    def __init__(self, own_splits: tuple[str, ...], **options: Any) -> None:
        super().__init__(None, **options)
        self.own_splits = own_splits

    def load(self, split: str) -> Any:  # type: ignore[override]
        assert split in self.own_splits
        num = {"train": 100, "val": 7, "test": 20}[split]
        return torch.rand(num, 3), torch.arange(num) % 2
