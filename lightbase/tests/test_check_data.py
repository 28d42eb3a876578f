"""What the dry run says about samples that train and are wrong. Each planted mistake has
its line, and sound data has none."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from example.data.synthetic import SyntheticImages
from given import Given
from PIL import Image
from small import Numbers, Points
from torch.utils.data import Dataset

from lightbase.checks.data import check_columns, check_samples
from lightbase.config.errors import UserError
from lightbase.data.image_folder import ImageFolder


def lines(data: Any) -> list[str]:
    data.setup("fit")
    data.setup("test")
    return [*check_samples(data), *check_columns(data)]


def rows(num: int, seed: int) -> tuple[Any, Any]:
    """Return 5 columns of noise, and 3 classes."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num, 5, generator=generator)
    return x, torch.randint(3, (num,), generator=generator)


@pytest.mark.parametrize("data", [Points, Numbers, SyntheticImages])
def test_sound_data_has_no_line(data: Any) -> None:
    assert lines(data(val_fraction=0.2)) == []


DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int16]


@pytest.mark.parametrize("dtype", DTYPES)
def test_samples_of_the_test_or_validation_in_the_training_set(dtype: Any) -> None:
    (x, y), (test_x, test_y) = rows(200, 0), rows(50, 1)
    x, test_x = 1000 * x, 1000 * test_x
    test_x[7] = x[5]
    test_x[8] = test_x[9]  # within a test set a sample may be there twice
    x[10:100] = x[110:]
    y[10:100] = y[110:]
    data = Given((x.to(dtype), y), (test_x.to(dtype), test_y))
    val, test = lines(data)
    assert "validation samples are training samples, too, such as train[" in val
    assert test.startswith("1 test samples are training samples, too, such as test[7]")


def test_equal_inputs_with_two_labels() -> None:
    x, y = rows(100, 0)
    x[20] = x[10]
    y[10], y[20] = 0, 1
    x[40] = x[30]
    y[40] = y[30]  # a duplicate of the same label is no mistake
    (line,) = lines(Given((x, y), rows(9, 1), val_fraction=0, batch_size=8))
    assert line.startswith("1 training samples have the inputs of another one, and")
    assert line.endswith("train[20] and train[10]")
    assert lines(Given((x, y.float()), rows(9, 1), val_fraction=0)) == []


def test_files_are_compared_by_their_content(tmp_path: Path) -> None:
    """Names tell nothing, and neither do the bytes that are read first."""
    pixels = np.zeros((60, 60, 3), np.uint8)
    for split in ("train", "test"):
        for label in ("a", "b"):
            (tmp_path / split / label).mkdir(parents=True)
            for i in range(5):
                pixels[29] = [i, ord(label), len(split)]  # in the middle
                Image.fromarray(pixels).save(tmp_path / split / label / f"{i}.bmp")
    pixels[0, 0] = 1
    Image.fromarray(pixels).save(tmp_path / "test/b/like_4.bmp")
    options: Any = {"data_dir": tmp_path, "val_fraction": 0}
    assert lines(ImageFolder(**options)) == []
    shutil.copy(tmp_path / "train/a/3.bmp", tmp_path / "test/b/other.bmp")
    shutil.copy(tmp_path / "train/a/4.bmp", tmp_path / "train/b/twice.bmp")
    train, _, test = lines(ImageFolder(**options))  # it validates on the test set
    assert train.endswith(f"{tmp_path}/train/b/twice.bmp and {tmp_path}/train/a/4.bmp")
    assert test.startswith("1 test samples are training samples, too, such as")
    assert test.endswith(f"{tmp_path}/test/b/other.bmp and {tmp_path}/train/a/3.bmp")
    shutil.move(tmp_path / "train/b", tmp_path / "b")
    with pytest.raises(
        UserError, match="test has a class that the training had not: b"
    ):
        lines(ImageFolder(**options))


class Named(Dataset[Any]):
    """Samples of files whose folder only the Dataset knows."""

    def __init__(self) -> None:
        self.files = ["0.png", "1.png"]
        self.targets = [0, 1]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.zeros(3), index


def test_files_without_their_folder_are_not_read() -> None:
    assert lines(Given(Named(), Named(), val_fraction=0)) == []


def table(names: list[str], num: int = 300, **columns: Any) -> Given:
    """Return 300 samples of three classes, or so many from their middle, in the order
    of the classes. The columns are noise unless they are given."""
    labels = torch.arange(300) // 100
    columns = {"x": rows(300, 0)[0][:, 0], "label": labels, **columns}
    chosen = slice(150 - num // 2, 150 + num // 2)
    x = torch.stack([columns[name].double() for name in names], 1)[chosen]
    y = columns["label"][chosen]
    data = Given((x, y), (torch.randn(9, len(names)), y[:9]))
    data.columns = names
    return data


def test_columns_that_tell_nothing_or_too_much() -> None:
    more = {"one": torch.full((300,), 1.5), "id": torch.arange(300)}
    names = ["x", "one", "id", "code"]
    code = torch.tensor([1, 2, 0])[torch.arange(300) // 100]
    found = lines(table(names, **more, code=code))
    assert [line[: line.index(":")] for line in found] == [
        "column one has one value in all training samples",
        "column id has a range of its own for each class",
        "column code has a range of its own for each class",
    ]
    assert lines(table(["x", "id"], num=20, **more)) == []  # it may be chance
    assert lines(table(["x", "id"], **more, label=torch.zeros(300).long())) == []
    assert lines(table(["x", "x"])) == []
