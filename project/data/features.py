"""Feature vectors: generated clusters, or a CSV file with a label column."""

import csv
import math
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from jsonargparse.typing import NonNegativeInt, PositiveInt
from torch import Tensor

from lightbase import BaseDataModule, Batch, UserError

LARGEST = torch.finfo(torch.float32).max
Row = dict[str, Any]
"""The cells of a row by column, and further cells under None."""


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
        file, label = f"data.csv_path {self.csv_path}", self.label_column
        header, rows = read_rows(Path(self.csv_path or ""), file)
        self.columns = [name for name in header if name != label]
        if label not in header or not self.columns or len({*header}) < len(header):
            raise UserError(
                f"{file} needs a column {label!r} (--data.label_column) and another "
                f"one, each named once: it has {header[:9]}"
            )
        features: list[list[float]] = []
        labels: list[str] = []
        for line, row in rows:
            features.append(numbers_in(row, self.columns, f"{file}, line {line}"))
            labels.append(row[label])
            if not row[label]:
                raise UserError(f"{file}, line {line}: there is no label")
        return torch.tensor(features), labels

    @cached_property  # which a checkpoint can assign
    def classes(self) -> list[str]:  # type: ignore[override]
        return sorted(set(self.table[1]))

    def load(self, split: Literal["train", "test"]) -> Batch:
        """Return features float32 (N, columns) and classes int64 (N,)."""
        if self.csv_path is None:
            inputs, targets = self._generate()
        else:
            inputs, targets = self._read()
        part = self.seeded_part(len(targets), split)
        return inputs[part], targets[part]

    def _read(self) -> Batch:
        """Return the samples of the file. Raise UserError for a label that is not a
        class of the training."""
        inputs, labels = self.table
        unknown = sorted({*labels} - {*self.classes})
        if unknown:
            raise UserError(
                f"{self.csv_path} has labels that the training had not: {unknown[:5]}"
            )
        return inputs, torch.tensor([self.classes.index(label) for label in labels])

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
        self.mean = state_dict["mean"]
        self.std = state_dict["std"]
        self.columns = state_dict["columns"]

    def read_inputs(self, path: Path) -> Iterator[tuple[str, Tensor]]:
        """Yield the rows of a CSV file with the columns of the training, by the name
        "FILE:LINE". Other columns, such as the label, do not count."""
        header, rows = read_rows(path, str(path))
        columns = self.columns
        if not columns:  # the samples of the training were generated
            columns = [name for name in header if name != self.label_column]
        num = len(self.mean)
        if not {*columns} <= {*header} or len(columns) != num:
            raise UserError(
                f"it does not have the {num} columns {', '.join(columns)[:60]}"
            )
        for line, row in rows:
            numbers = numbers_in(row, columns, f"line {line}")
            yield f"{path}:{line}", torch.tensor(numbers)


def read_rows(path: Path, name: str) -> tuple[list[str], list[tuple[int, Row]]]:
    """Return the header of a CSV file, and the line and the cells of each row. Raise
    UserError if it cannot be read.

    name: What the message begins with.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            rows = [(reader.line_num, row) for row in reader]
            return list(reader.fieldnames or []), rows
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{name} cannot be read: {error}") from error


def numbers_in(row: Row, columns: list[str], place: str) -> list[float]:
    """Return the numbers in these columns. Raise UserError for other cells, and if the
    row does not have as many cells as the header.

    place: What the message begins with: the file, the line.
    """
    try:
        numbers = [float(row[name]) for name in columns]
    except (TypeError, ValueError):  # None: the row is too short
        numbers = [math.nan]
    if None in row or not all(abs(number) < LARGEST for number in numbers):
        cells = str([*row.values()])[:60]
        raise UserError(f"{place}: no {len(columns)} finite numbers: {cells}")
    return numbers
