"""Feature vectors: generated clusters, or a CSV file with labels or numbers."""

import csv
import math
from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from jsonargparse.typing import NonNegativeInt, PositiveInt
from torch import Tensor

from lightbase import BaseDataModule, Batch, UserError, say

WAY_OUT = (
    "give a CSV file in UTF-8: a header without a name twice, as many cells in each "
    "line, all quotes closed, labels in --data.label_column, or numbers in "
    "--data.target_columns, dates in --data.time_column, numbers in all other columns; "
    "docs/tasks/tabular.md shows embeddings for columns of texts"
)
SEPARATORS = ",;\t|"
Rows = dict[str, dict[str, str]]
"""{"FILE:LINE": {column: text}}."""


class Features(BaseDataModule):
    """Samples of a few numbers each, standardised by mean and standard deviation of the
    training samples.

    Without a file, each class is a normal cloud of standard deviation 1 around a seeded
    centre, and the clouds overlap a little. With a file, every column is a feature but
    those that are named here. A seeded fifth of the samples is the test set, or with
    val_split ordered the newest fifth.

    Args:
        csv_path: File with a header line; numbers in all columns that are features.
        label_column: Name of the column with the labels, which can be any text.
        target_columns: Names of columns with numbers to predict, in the place of
            labels, for a Regressor. They are standardised for the loss, see
            `scale_targets`.
        time_column: Name of a column with ISO dates or numbers that order the samples,
            see `val_split` and `gap`.
        num_features: Numbers a sample, generated data only.
        num_classes: Classes, generated data only.
        num_samples: Generated samples.
        data_seed: For the generated samples.
    """

    # such as Unix time: the mean has to be subtracted in float64, which Macs' GPUs lack
    keeps_float64 = not torch.backends.mps.is_available()

    def __init__(
        self,
        csv_path: Path | None = None,
        label_column: str = "label",
        target_columns: list[str] | str | None = None,
        time_column: str | None = None,
        num_features: PositiveInt = 10,
        num_classes: PositiveInt = 2,
        num_samples: PositiveInt = 10_000,
        data_seed: NonNegativeInt = 0,
        **kwargs,
    ) -> None:
        super().__init__(**kwargs)
        self.csv_path: Any = csv_path
        self.label_column = label_column
        if isinstance(target_columns, str):
            target_columns = target_columns.split(",")
        self.target_columns = target_columns or []
        self.time_column = time_column
        if self.target_columns:
            self.scale_targets = kwargs.get("scale_targets") is not False
            self.classes = []
        self.num_features = num_features
        self.num_samples = num_samples
        self.data_seed = data_seed
        self.mean: Any = None
        self.std: Any = None
        self.columns: list[str] = []  # of the features, in a file
        if csv_path is None:
            if label_column != "label" or target_columns or time_column:
                raise UserError(
                    "data.label_column, target_columns and time_column have no effect "
                    "without a file",
                    "give the file, too: --data.csv_path FILE",
                    2,
                )
            self.classes = [f"class_{i}" for i in range(num_classes)]

    @cached_property
    def table(self) -> tuple[Rows, Rows]:
        """The rows of the file with the columns that are features, and with the others,
        see `read_csv`."""
        rows = read_csv(self.csv_path)
        others = {}
        names = self.target_columns or [self.label_column]
        if self.time_column:
            names = [*names, self.time_column]
        for place, row in rows.items():
            others[place] = {name: row.pop(name, "") for name in names}
            if "" in others[place].values():
                raise UserError(
                    f"{place}: nothing in a column {' or '.join(names)}; the others "
                    f"are {', '.join(row)[:200]}",
                    WAY_OUT,
                )
        if "" in row:
            say(
                "A column has no name, as the index that pandas writes: it is a feature"
            )
        if self.time_column and self.val_split == "random":
            say(
                f"The samples have times, in {self.time_column}: with --data.val_split "
                "ordered the newest ones are for validation and test"
            )
        return rows, others

    @cached_property  # which a checkpoint can assign
    def classes(self) -> list[str]:  # type: ignore[override]
        return sorted({row[self.label_column] for row in self.table[1].values()})

    def load(self, split: Literal["train", "test"]) -> Batch:
        """Return features (N, columns), float32 or from a file float64, and classes
        int64 (N,), or of target columns numbers float64 (N,) or (N, columns)."""
        times: Any = None
        if self.csv_path is None:
            inputs, targets = self._generate()
        else:
            rows, others = self.table
            self.columns = self.columns or list(next(iter(rows.values())))
            inputs = numbers_in(rows, self.columns)
            if self.target_columns:
                targets = numbers_in(others, self.target_columns).squeeze(1)
            else:
                labels = [row[self.label_column] for row in others.values()]
                try:
                    targets = torch.tensor([*map(self.classes.index, labels)])
                except ValueError as error:  # the classes are those of the training
                    problem = f"{self.csv_path} has a label that the training had not"
                    way_out = "remove its rows, or start a new training with them"
                    raise UserError(f"{problem}: {error}", way_out) from error
            if self.time_column:
                times = [row[self.time_column] for row in others.values()]
        part = self.seeded_part(len(targets), split, times=times)
        return inputs[part], targets[part]

    def _generate(self) -> Batch:
        generator = torch.Generator().manual_seed(self.data_seed)
        num_classes = len(self.classes)
        centres = torch.randn(num_classes, self.num_features, generator=generator)
        # about 3.5 standard deviations apart, for any number of features
        centres *= 2.5 / self.num_features**0.5
        targets = torch.randint(num_classes, (self.num_samples,), generator=generator)
        noise = torch.randn(len(targets), self.num_features, generator=generator)
        return centres[targets] + noise, targets

    def setup(self, stage: str) -> None:
        """Load the splits, and compute mean and standard deviation of the training
        samples, unless a checkpoint has given them."""
        super().setup(stage)
        if "train" in self.splits and self.mean is None:
            inputs, _ = self.splits["train"].values  # type: ignore[union-attr]
            std, mean = torch.std_mean(inputs.double(), dim=0)
            # a column without variance becomes 0 for every sample
            std[std <= 1e-12 * mean.abs()] = 1
            self.mean = mean.to(inputs.dtype)
            self.std = std.to(inputs.dtype)

    def normalize(self, inputs: Tensor) -> Tensor:
        """Return (inputs - mean) / std of each column, float32 (N, columns)."""
        self.mean = self.mean.to(inputs.device)  # copied once: a copy waits for the GPU
        self.std = self.std.to(inputs.device)
        return ((inputs - self.mean) / self.std).float()

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
        """Yield ("FILE:LINE", features) for each row of a CSV file. Only the columns of
        the training are read."""
        if not self.columns:
            raise UserError("the training had generated samples, without columns")
        rows = read_csv(path)
        yield from zip(rows, numbers_in(rows, self.columns), strict=True)


def numbers_in(rows: Rows, columns: list[str]) -> Tensor:
    """Return the numbers in these columns, float64 (N, columns). Raise UserError for a
    cell without a number, and for a missing column."""
    values = []
    for place, row in rows.items():
        try:
            numbers = [float(row[column]) for column in columns]
            if not all(map(math.isfinite, numbers)):
                raise ValueError(f"{numbers} are not finite")
        except (KeyError, ValueError) as error:
            raise UserError(
                f"{place}: no number in a column: {error}", WAY_OUT
            ) from error
        values.append(numbers)
    return torch.tensor(values, dtype=torch.float64)


def read_csv(path: Path) -> Rows:
    """Return the rows of a CSV file. LINE is the last
    line of a row, because a cell in quotes may have several lines.

    Cells are separated by the one of SEPARATORS that the header has most of. Raise
    UserError if the file cannot be read, has no row, has two columns of one name, or
    has a row of another length than the header.
    """
    rows = {}
    line = 1
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            header = file.readline()
            file.seek(0)
            separator = max(SEPARATORS, key=header.count)
            reader = csv.DictReader(file, strict=True, delimiter=separator)
            (name, count), *_ = Counter(reader.fieldnames or [""]).most_common(1)
            if count > 1:
                raise UserError(f"{path} has {count} columns {name!r}", WAY_OUT)
            for row in reader:
                line = reader.line_num
                if None in row or None in row.values():
                    raise UserError(
                        f"{path}:{line}: not as many cells as in the header", WAY_OUT
                    )
                rows[f"{path}:{line}"] = row
    except (OSError, UnicodeError, csv.Error) as error:
        raise UserError(
            f"{path} cannot be read beyond line {line}: {error}", WAY_OUT
        ) from error
    if not rows:
        raise UserError(f"{path} has no row below the header", WAY_OUT)
    return rows
