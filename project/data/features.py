"""Feature vectors: generated clusters, or a CSV file with a label column."""

import csv
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from jsonargparse.typing import NonNegativeInt, PositiveInt
from torch import Tensor

from lightbase import BaseDataModule, Batch, UserError


class Features(BaseDataModule):
    """Samples of a few numbers each, standardised by mean and standard deviation of the
    training samples.

    Without a file, each class is a normal cloud of standard deviation 1 around a seeded
    centre, and the clouds overlap a little. With a file, every column but the label
    column is a feature. A seeded fifth of the samples is the test set.

    Args:
        csv_path: File with a header line; numbers in all columns but the label column.
        label_column: Name of the column with the labels, which can be any text.
        num_features: Numbers a sample, generated data only.
        num_classes: Classes, generated data only.
        num_samples: Generated samples.
        data_seed: For the generated samples.
    """

    def __init__(
        self,
        csv_path: Path | None = None,
        label_column: str = "label",
        num_features: PositiveInt = 10,
        num_classes: PositiveInt = 2,
        num_samples: PositiveInt = 10_000,
        data_seed: NonNegativeInt = 0,
        **kwargs,
    ) -> None:
        super().__init__(**kwargs)
        self.csv_path = csv_path
        self.label_column = label_column
        self.num_features = num_features
        self.num_samples = num_samples
        self.data_seed = data_seed
        self.mean: Any = None
        self.std: Any = None
        self.columns: list[str] = []  # of the features, in a file
        if csv_path is None:
            self.classes = [f"class_{i}" for i in range(num_classes)]

    @cached_property
    def table(self) -> tuple[Tensor, list[str]]:
        """Features float32 (N, columns) and the N labels of the file."""
        path = Path(self.csv_path or "")
        cells = read_csv(path)
        labels = cells.pop(self.label_column, [""])
        if "" in labels:
            column = f"in a column {self.label_column!r} (--data.label_column)"
            raise UserError(f"data.csv_path {path}: each row needs a label {column}")
        self.columns = [*cells]
        return numbers_in(cells, self.columns, path), labels

    @cached_property  # which a checkpoint can assign
    def classes(self) -> list[str]:  # type: ignore[override]
        return sorted(set(self.table[1]))

    def load(self, split: Literal["train", "test"]) -> Batch:
        """Return features float32 (N, columns) and classes int64 (N,)."""
        if self.csv_path is None:
            inputs, targets = self._generate()
        else:
            inputs, labels = self.table
            unknown = sorted({*labels} - {*self.classes})
            if unknown:
                raise UserError(
                    f"{self.csv_path} has labels that the training had not: "
                    f"{unknown[:5]}"
                )
            targets = torch.from_numpy(np.searchsorted(self.classes, labels))
        part = self.seeded_part(len(targets), split)
        return inputs[part], targets[part]

    def _generate(self) -> Batch:
        generator = torch.Generator().manual_seed(self.data_seed)
        num_classes, num = len(self.classes), self.num_samples
        centres = torch.randn(num_classes, self.num_features, generator=generator)
        # about 3.5 standard deviations apart, for any number of features
        centres *= 2.5 / self.num_features**0.5
        targets = torch.randint(num_classes, (num,), generator=generator)
        noise = torch.randn(num, self.num_features, generator=generator)
        return centres[targets] + noise, targets

    def setup(self, stage: str) -> None:
        """Load the splits, and compute mean and standard deviation of the training
        samples, unless a checkpoint has given them."""
        super().setup(stage)
        if "train" in self.splits and self.mean is None:
            inputs, _ = self.splits["train"].values  # type: ignore[union-attr]
            std, mean = torch.std_mean(inputs.double(), dim=0)
            # a column without variance becomes 0 for every sample
            std[std <= 1e-6 * mean.abs()] = 1
            self.mean = mean.float()
            self.std = std.float()

    def normalize(self, inputs: Tensor) -> Tensor:
        """Return (inputs - mean) / std of each column, float32 (N, columns)."""
        if self.mean.device != inputs.device:  # once: a copy waits for the GPU
            self.mean = self.mean.to(inputs.device)
            self.std = self.std.to(inputs.device)
        return (inputs - self.mean) / self.std

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps: predictions need the statistics, too."""
        more = {"mean": self.mean.cpu(), "std": self.std.cpu(), "columns": self.columns}
        return super().state_dict() | more

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for name in ("mean", "std", "columns"):
            setattr(self, name, state_dict[name])

    def read_inputs(self, path: Path) -> Iterator[tuple[str, Tensor]]:
        """Yield the rows of a CSV file with the columns of the training, by the name
        "FILE:LINE", where empty lines do not count. Other columns, such as the label,
        do not count."""
        inputs = numbers_in(read_csv(path), self.columns, path)
        for line, features in enumerate(inputs, 2):
            yield f"{path}:{line}", features


def read_csv(path: Path) -> dict[str, list[str]]:
    """Return {column: its texts} of a CSV file. Raise UserError if it cannot be read,
    or if its rows do not have the same number of cells."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = [row for row in csv.reader(file) if row]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"data.csv_path {path} cannot be read: {error}") from error
    uneven = [row for row in rows if len(row) != len(rows[0])]
    if uneven:
        problem = f"{path}: a row does not have as many cells as the first one"
        raise UserError(f"{problem}: {','.join(uneven[0])[:60]}")
    return {name: texts for name, *texts in zip(*rows, strict=True)}


def numbers_in(cells: dict[str, list[str]], columns: list[str], path: Path) -> Tensor:
    """Return the numbers in these columns, float32 (N, columns). Raise UserError if a
    column is missing, or for a cell without a finite number.

    cells: The texts by column.
    path: The file, for the message.
    """
    try:
        numbers = np.array([cells[name] for name in columns], float).T
    except (KeyError, ValueError) as error:
        problem = f"{path}: a column is missing, or has other texts than numbers"
        raise UserError(f"{problem}: {error}") from error
    features = torch.from_numpy(numbers).float()
    if not features.isfinite().all():
        raise UserError(f"{path}: a number is NaN, infinite or too large for float32")
    return features
