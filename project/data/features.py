"""Feature vectors: generated clusters, or a CSV file with a label column."""

import csv
import io
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from jsonargparse.typing import NonNegativeInt, PositiveInt
from torch import Tensor

from lightbase import BaseDataModule, Batch, UserError

WAY_OUT = (
    "give a CSV file in UTF-8: a header, as many cells in each line, all quotes closed,"
    " labels in --data.label_column, numbers in all other columns"
)


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

        def convert(cells: dict[str, str]) -> tuple[list[float], str]:
            label = cells.pop(self.label_column, "")
            if not label:
                raise ValueError(f"no label in a column {self.label_column!r}")
            self.columns = [*cells]
            return numbers_in(cells, self.columns), label

        rows = read_csv(Path(self.csv_path or ""), convert)
        inputs, labels = zip(*rows, strict=True)
        return torch.tensor(inputs), list(labels)

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
                    f"{unknown[:5]}",
                    "remove their rows, or start a new training with them",
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
        self.mean = self.mean.to(inputs.device)  # copied once: a copy waits for the GPU
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
        if not self.columns:
            raise UserError("the training had generated samples, without columns")
        rows = read_csv(path, lambda cells: numbers_in(cells, self.columns))
        for line, numbers in enumerate(rows, 2):
            yield f"{path}:{line}", torch.tensor(numbers)


def read_csv(path: Path, convert: Callable[[dict[str, str]], Any]) -> list[Any]:
    """Return what `convert` makes of each row of a CSV file. Empty lines do not count.

    Raise UserError if the file cannot be read, has no row, or has a row of another
    length than the header. Raise it with the line for a ValueError of `convert`, too.

    convert: Gets the texts of a row, by column.
    """
    place = str(path)
    columns: list[str] = []
    rows = []
    try:
        text = path.read_text(encoding="utf-8-sig")
        reader = csv.reader(io.StringIO(text, newline=""), strict=True)
        for cells in reader:
            if not columns:
                columns = cells
            elif len(cells) == len(columns):
                rows.append(convert(dict(zip(columns, cells, strict=True))))
            elif cells:
                raise ValueError(f"{len(cells)} cells for {len(columns)} columns")
            # where the next row begins: a cell in quotes may have several lines
            place = f"{path}, line {reader.line_num + 1}"
        if not rows:
            raise ValueError("no row below the header")
    except csv.Error as error:
        problem = f"{place}: is a quote not closed? {error}"
        raise UserError(problem, WAY_OUT) from error
    except (OSError, ValueError) as error:
        raise UserError(f"{place}: {error}", WAY_OUT) from error
    return rows


def numbers_in(cells: dict[str, str], columns: list[str]) -> list[float]:
    """Return the numbers in these columns of a row. Raise ValueError if a column is
    missing, or for a cell without a number that float32 can hold.

    cells: The texts by column.
    """
    numbers = []
    for name in columns:
        if name not in cells:
            raise ValueError(f"no column {name!r}")
        number = float(cells[name])
        if not abs(number) <= torch.finfo(torch.float32).max:
            raise ValueError(f"{number} is no number, infinite or too large")
        numbers.append(number)
    return numbers
