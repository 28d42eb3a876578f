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
        what, label = f"data.csv_path {self.csv_path}", self.label_column
        header, rows = read_rows(Path(self.csv_path or ""), what)
        self.columns = [name for name in header if name != label]
        if label not in header or not self.columns or len({*header}) < len(header):
            needs = f"a column {label!r} (--data.label_column) and another one, each named once"
            raise UserError(f"{what} needs {needs}: it has {header[:9]}")
        features = []
        for line, row in rows:
            features.append(numbers_in(row, self.columns, f"{what}, line {line}"))
            if not row[label]:
                raise UserError(f"{what}, line {line}: there is no label")
        return torch.tensor(features), [row[label] for _, row in rows]

    @cached_property
    def classes(self) -> list[str]:  # type: ignore[override]  # a checkpoint assigns its classes
        return sorted(set(self.table[1]))

    def load(self, split: Literal["train", "test"]) -> Batch:
        inputs, targets = self._generate() if self.csv_path is None else self._read()
        part = self.seeded_part(len(targets), split)
        return inputs[part], targets[part]

    def _read(self) -> Batch:
        inputs, labels = self.table
        if unknown := sorted(set(labels) - set(self.classes)):
            raise UserError(
                f"{self.csv_path} has labels that the training had not: {unknown[:5]}"
            )
        return inputs, torch.tensor([self.classes.index(label) for label in labels])

    def _generate(self) -> Batch:
        generator = torch.Generator().manual_seed(self.data_seed)
        centres = torch.randn(len(self.classes), self.num_features, generator=generator)
        # about 3.5 standard deviations apart, for any number of features
        centres *= 2.5 / self.num_features**0.5
        targets = torch.randint(
            len(self.classes), (self.num_samples,), generator=generator
        )
        noise = torch.randn(self.num_samples, self.num_features, generator=generator)
        return centres[targets] + noise, targets

    def setup(self, stage: str) -> None:
        super().setup(stage)
        if "train" in self.splits and self.mean is None:
            inputs, _ = self.splits["train"].values  # type: ignore[union-attr]
            std, mean = torch.std_mean(inputs.double(), dim=0)
            is_constant = (
                std <= 1e-6 * mean.abs()
            )  # this column becomes 0 for every sample
            self.mean, self.std = mean.float(), std.masked_fill(is_constant, 1).float()

    def normalize(self, inputs: Tensor) -> Tensor:
        if self.mean.device != inputs.device:  # once: a copy waits for the GPU
            self.mean, self.std = (
                self.mean.to(inputs.device),
                self.std.to(inputs.device),
            )
        return (inputs - self.mean) / self.std

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {
            "mean": self.mean.cpu(),
            "std": self.std.cpu(),
            "columns": self.columns,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.mean, self.std = state_dict["mean"], state_dict["std"]
        self.columns = state_dict["columns"]

    def read_inputs(self, path: Path) -> Iterator[tuple[str, Tensor]]:
        """The rows of a CSV file with the columns of the training. Other columns, such
        as the label, do not count."""
        header, rows = read_rows(path, str(path))
        columns = self.columns or [name for name in header if name != self.label_column]
        if not {*columns} <= {*header} or len(columns) != len(self.mean):
            raise UserError(
                f"it does not have the {len(self.mean)} columns {', '.join(columns)[:60]}"
            )
        for line, row in rows:
            yield (
                f"{path}:{line}",
                torch.tensor(numbers_in(row, columns, f"line {line}")),
            )


def read_rows(
    path: Path, what: str
) -> tuple[list[str], list[tuple[int, dict[str, Any]]]]:
    """The header of a CSV file, and the line and the cells of each row. Raises
    UserError, which begins with `what`, if it cannot be read."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            return list(reader.fieldnames or []), [
                (reader.line_num, row) for row in reader
            ]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{what} cannot be read: {error}") from error


def numbers_in(row: dict[str, Any], columns: list[str], what: str) -> list[float]:
    """The numbers in these columns. Raises UserError, which begins with `what`, for
    other cells."""
    try:
        numbers = [float(row[name]) for name in columns]
    except (TypeError, ValueError):  # None: the row is too short
        numbers = [math.nan]
    if None in row or not all(abs(number) < LARGEST for number in numbers):
        raise UserError(
            f"{what}: no {len(columns)} finite numbers: {str([*row.values()])[:60]}"
        )
    return numbers
