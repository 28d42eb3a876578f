"""Feature vectors: generated clusters, or a CSV file with a label column."""

import csv
import math
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from jsonargparse.typing import NonNegativeInt, PositiveInt
from torch import Tensor

from project.base.datamodule import TensorDataModule
from project.base.errors import UserError
from project.base.samples import Batch, TensorBatches


class Features(TensorDataModule):
    """Samples of a few numbers each, standardised by the mean and deviation of the training samples.

    Without a file, each class is a normal cloud of deviation 1 around a seeded centre, overlapping a little. With one,
    every column but the label column is a feature, and a seeded fifth of the rows is the test set.

    Args:
        csv_path: File with a header line; numbers in all columns but the label column.
        label_column: Its name; the labels can be any text.
        num_features: Numbers a sample, generated data only.
        num_classes: Classes, generated data only.
        num_samples: Generated samples, of which a fifth is the test set.
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
        self.mean: Tensor | None = None
        self.std: Tensor | None = None
        if csv_path is None:
            self.classes = [f"class_{i}" for i in range(num_classes)]

    @cached_property
    def table(self) -> tuple[Tensor, list[str]]:
        assert self.csv_path is not None
        return read_csv(Path(self.csv_path), self.label_column)

    @cached_property
    def classes(self) -> list[str]:  # type: ignore[override]  # a checkpoint assigns its own
        return sorted(set(self.table[1]))

    def load(self, split: Literal["train", "test"]) -> Batch:
        if self.csv_path is None:
            inputs, targets = self._make_clusters()
        else:
            inputs, names = self.table
            if unknown := sorted(set(names) - set(self.classes)):
                raise UserError(f"{self.csv_path} has labels that the training had not: {', '.join(unknown[:5])}")
            index = {name: i for i, name in enumerate(self.classes)}
            targets = torch.tensor([index[name] for name in names])
        order = torch.randperm(len(targets), generator=torch.Generator().manual_seed(self.split_seed))
        num_test = len(targets) // 5
        chosen = order[:num_test] if split == "test" else order[num_test:]
        return inputs[chosen], targets[chosen]

    def setup(self, stage: str) -> None:
        super().setup(stage)
        train = self.splits.get("train")
        if isinstance(train, TensorBatches) and self.mean is None:
            deviation, mean = torch.std_mean(train.inputs.double(), dim=0)
            constant = deviation <= 1e-6 * mean.abs()  # such a column tells nothing: 0 for every sample
            self.mean, self.std = mean.float(), deviation.masked_fill(constant, 1).float()

    def normalize(self, inputs: Tensor) -> Tensor:
        assert self.mean is not None
        assert self.std is not None
        return (inputs - self.mean.to(inputs.device)) / self.std.to(inputs.device)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"mean": self.mean, "std": self.std}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.mean, self.std = state_dict["mean"], state_dict["std"]

    def _make_clusters(self) -> Batch:
        generator = torch.Generator().manual_seed(self.data_seed)
        # centres about 3.5 deviations apart, whatever the number of features
        centres = torch.randn(len(self.classes), self.num_features, generator=generator)
        centres *= 2.5 / self.num_features**0.5
        targets = torch.randint(len(self.classes), (self.num_samples,), generator=generator)
        return centres[targets] + torch.randn(self.num_samples, self.num_features, generator=generator), targets


def read_csv(path: Path, label_column: str) -> tuple[Tensor, list[str]]:
    """Features float32 (N, columns - 1) and the N labels.

    Raises UserError naming the line of a value that is missing or no finite number.
    """
    features: list[list[float]] = []
    names: list[str] = []
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, strict=True)
            columns = list(reader.fieldnames or [])
            if label_column not in columns:
                raise UserError(f"data.csv_path {path} has no column {label_column!r}: see --data.label_column")
            if len(set(columns)) < len(columns) or len(columns) < 2:
                raise UserError(
                    f"data.csv_path {path} needs a feature column at least, and each name once: {columns[:9]}"
                )
            for row in reader:
                name = row.pop(label_column)
                values = [to_number(value) for value in row.values()]
                wrong = {key: row[key] for key, value in zip(row, values, strict=True) if not math.isfinite(value)}
                if not name or wrong:
                    what = f"{next(iter(wrong.items()))} is no finite number" if wrong else "the label is missing"
                    raise UserError(f"{path}, line {reader.line_num}: {what}")
                names.append(name)
                features.append(values)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"data.csv_path {path} cannot be read: {error}") from error
    if not names:
        raise UserError(f"data.csv_path {path} has no rows below its header")
    return torch.tensor(features), names


def to_number(text: Any) -> float:
    """The number in a cell, NaN where there is none or float32 cannot hold it."""
    try:
        return float(text) if abs(float(text)) < torch.finfo(torch.float32).max else math.nan
    except (TypeError, ValueError):
        return math.nan
