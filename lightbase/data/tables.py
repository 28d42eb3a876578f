"""Feature vectors: generated clusters, or a CSV file with a label column."""

import contextlib
import csv
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from jsonargparse.typing import NonNegativeInt, PositiveInt
from torch import Tensor

from lightbase.data.batches import Batch, TensorBatches
from lightbase.data.module import BaseDataModule
from lightbase.errors import UserError


class Features(BaseDataModule):
    """Samples of a few numbers each, standardised by the mean and deviation of the training
    samples.

    Without a file, each class is a normal cloud of deviation 1 around a seeded centre, overlapping
    a little. With one, every column but the label column is a feature. A seeded fifth of the
    samples is the test set.

    Args:
        csv_path: File with a header line; numbers in all columns but the label column.
        label_column: Its name; the labels can be any text.
        num_features: Numbers a sample, generated data only.
        num_classes: Classes, generated data only.
        num_samples: Generated samples.
        data_seed: For the generated samples.
    """

    def __init__(
        self,
        csv_path: str | None = None,
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
        if csv_path is None:
            self.classes = [f"class_{i}" for i in range(num_classes)]

    @cached_property
    def table(self) -> tuple[Tensor, list[str]]:
        return read_csv(Path(self.csv_path or ""), self.label_column)

    @cached_property
    def classes(self) -> list[str]:  # type: ignore[override]  # a checkpoint assigns its own
        found = sorted(set(self.table[1]))
        if len(found) == 1:
            what = (
                f"data.csv_path {self.csv_path} has one class only, {self.label_column} is "
                f"{found[0]!r} in every row"
            )
            raise UserError(f"{what}:\nthere is nothing to tell apart; see --data.label_column")
        return found

    def load(self, split: Literal["train", "test"]) -> Batch:
        inputs, targets = self._read() if self.csv_path is not None else self._generate()
        chosen = self.seeded_part(len(targets), split)
        return inputs[chosen], targets[chosen]

    def _read(self) -> Batch:
        inputs, names = self.table
        if unknown := sorted(set(names) - set(self.classes)):
            raise UserError(
                f"{self.csv_path} has labels that the training had not: {', '.join(unknown[:5])}"
            )
        index = {name: i for i, name in enumerate(self.classes)}
        return inputs, torch.tensor([index[name] for name in names])

    def _generate(self) -> Batch:
        shape, generator = (
            (self.num_samples, self.num_features),
            torch.Generator().manual_seed(self.data_seed),
        )
        centres = torch.randn(len(self.classes), self.num_features, generator=generator)
        centres *= (
            2.5 / self.num_features**0.5
        )  # about 3.5 deviations apart, whatever the number of features
        targets = torch.randint(len(self.classes), (self.num_samples,), generator=generator)
        return centres[targets] + torch.randn(shape, generator=generator), targets

    def setup(self, stage: str) -> None:
        super().setup(stage)
        train = self.splits.get("train")
        if isinstance(train, TensorBatches) and self.mean is None:
            deviation, mean = torch.std_mean(train.inputs.double(), dim=0)
            constant = (
                deviation <= 1e-6 * mean.abs()
            )  # such a column tells nothing: 0 for every sample
            self.mean, self.std = mean.float(), deviation.masked_fill(constant, 1).float()

    def normalize(self, inputs: Tensor) -> Tensor:
        if self.mean.device != inputs.device:  # once: a copy waits for the GPU
            self.mean, self.std = self.mean.to(inputs.device), self.std.to(inputs.device)
        return (inputs - self.mean) / self.std

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"mean": self.mean.cpu(), "std": self.std.cpu()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.mean, self.std = state_dict["mean"], state_dict["std"]


def read_csv(path: Path, label_column: str) -> tuple[Tensor, list[str]]:
    """Features float32 (N, columns - 1) and the N labels. Raises UserError naming the line of a
    wrong value."""
    features: list[list[float]] = []
    names: list[str] = []
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file, strict=True)
            columns = next(reader, [])
            if label_column not in columns:
                raise UserError(
                    f"data.csv_path {path} has no column {label_column!r}: see --data.label_column"
                )
            if len(set(columns)) < len(columns) or len(columns) < 2:
                raise UserError(
                    f"data.csv_path {path} needs a feature column, and each name once: "
                    f"{columns[:9]}"
                )
            for row in filter(None, reader):  # no blank lines
                where = f"{path}, line {reader.line_num}"
                if len(row) != len(columns):
                    raise UserError(f"{where}: {len(row)} values for {len(columns)} columns")
                names.append(row.pop(columns.index(label_column)))
                features.append([to_number(cell, where) for cell in row])
                if not names[-1]:
                    raise UserError(f"{where}: the label is missing")
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"data.csv_path {path} cannot be read: {error}") from error
    if not names:
        raise UserError(f"data.csv_path {path} has no rows below its header")
    return torch.tensor(features), names


def to_number(cell: str, where: str) -> float:
    with contextlib.suppress(ValueError):
        if abs(float(cell)) < torch.finfo(torch.float32).max:
            return float(cell)
    raise UserError(f"{where}: {cell!r} is no finite number")
