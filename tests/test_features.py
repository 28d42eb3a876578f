from pathlib import Path
from typing import Any

import pytest
import torch

from lightbase import UserError

features = pytest.importorskip("project.data.features")
Features = features.Features


def test_generated_features_come_in_overlapping_clusters() -> None:
    data = Features()
    data.setup("fit")
    inputs, targets = data.splits["train"].values
    torch.testing.assert_close(
        data.normalize(inputs).mean(0), torch.zeros(10), atol=1e-5, rtol=0
    )
    centres = torch.stack([inputs[targets == c].mean(0) for c in (0, 1)])
    accuracy = (torch.cdist(inputs, centres).argmin(1) == targets).float().mean()
    assert 0.9 <= accuracy < 0.99
    assert data.load("test")[0].shape == (2000, 10)


def from_csv(path: Path, text: str, **options: Any) -> Any:
    path.write_text(text)
    return Features(csv_path=path, batch_size=4, **options)


def test_features_from_a_csv_file(tmp_path: Path) -> None:
    rows = [f"{i},{'c' * (i % 2 + 1)},{-i},123456.789\n" for i in range(100)]
    text = "a,kind,b,constant\n\n" + "".join(rows)
    data = from_csv(tmp_path / "x.csv", text, label_column="kind")
    data.setup("fit")
    data.setup("test")
    assert data.classes == ["c", "cc"]
    parts = [data.splits[name].values for name in ("train", "val", "test")]
    assert [len(targets) for _, targets in parts] == [72, 8, 20]
    assert data.columns == ["a", "b", "constant"]
    for inputs, targets in parts:
        assert torch.equal(inputs[:, 0], -inputs[:, 1])
        assert torch.equal(targets, inputs[:, 0].long() % 2)
    normalised = data.normalize(parts[0][0])
    assert normalised[:, 2].abs().max() < 0.1
    assert normalised[:, 0].std() == pytest.approx(1, rel=1e-3)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, " cannot be read beyond line 1: .* No such file"),
        (b"a,label\n1,\xe9\n", " cannot be .* 'utf-8' codec can't decode"),
        (b"a,label\n", " has no row below the header"),
        (b'a,label\n\n1,"x\ny"\n2,\n', ":5: no label in a column 'label'"),
        (b"a,b,a,label\n1,2,3,y\n", " has 2 columns 'a'"),
        (b"a;b;label\n1,5;2;y\n", ":2: no number in a column: .*: '1,5'"),
        (b"a,label\noops,y\n", ":2: no number in a column: .*: 'oops'"),
        (b"a,label\nnan,y\n", ":2: no number in a column: .nan. are not finite"),
        (b"label,a\nx,1\nx\n", ":3: not as many cells"),
        (b"a,label\n1,x\n1,x,2\n", ":3: not as many cells"),
        (b'a,label\n1,x\n1,"x\n2,y\n', " cannot be read beyond line 2: unexpected end"),
    ],
)
def test_a_wrong_csv_file_is_named_with_the_line(tmp_path, content, problem):
    path = tmp_path / "x.csv"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=f"^{path}{problem}.*\ngive a CSV file"):
        Features(csv_path=path).load("train")


@pytest.mark.parametrize("separator", [",", ";", "\t", "|"])
def test_the_header_shows_the_separator(tmp_path, separator):
    rows = "".join(f"{i},{-i},c{i % 2}\n" for i in range(100))
    text = ("a,b,label\n" + rows).replace(",", separator)
    data = from_csv(tmp_path / "x.csv", text)
    inputs, targets = data.load("train")
    assert torch.equal(inputs[:, 0], -inputs[:, 1])
    assert torch.equal(targets, inputs[:, 0].long() % 2)


def test_a_missing_label_column_is_named(tmp_path):
    data = from_csv(tmp_path / "x.csv", "a,kind\n1,x\n")
    message = "has no column 'label' for the labels\n--data.label_column .* a, kind$"
    with pytest.raises(UserError, match=message):
        data.load("train")


@pytest.mark.parametrize("offset", [0.0, 1.7e9, 1e12])
def test_a_large_offset_costs_no_digits(tmp_path, offset):
    """A column such as Unix time becomes float32 after its mean is subtracted."""
    generator = torch.Generator().manual_seed(0)
    values = 100 * torch.randn(300, generator=generator, dtype=torch.float64)
    rows = "".join(f"{offset + x},x{int(x > 0)},1e39\n" for x in values.tolist())
    data = from_csv(tmp_path / "x.csv", "a,label,constant\n" + rows)
    data.setup("fit")
    inputs, targets = data.splits["train"].values
    normalised = data.normalize(inputs)
    assert normalised.dtype == torch.float32
    exact = inputs[:, 0] - offset
    exact = (exact - exact.mean()) / exact.std()
    torch.testing.assert_close(normalised[:, 0].double(), exact, atol=1e-5, rtol=0)
    assert torch.equal(targets, (inputs[:, 0] > offset).long())
    assert torch.equal(normalised[:, 1], torch.zeros(len(inputs)))
    ((_, numbers), *_) = data.read_inputs(data.csv_path)
    assert numbers[0] == offset + values[0]


@pytest.mark.parametrize(
    ("column", "is_said"),
    [
        (range(40), True),  # as pandas writes it
        (range(1, 41), True),
        ([*range(20, 40), *range(20)], True),
        (range(5, 45), False),
        ([*range(39), 39.5], False),
        ([0, *range(39)], False),
    ],
)
def test_a_column_that_numbers_the_rows_is_said(tmp_path, capsys, column, is_said):
    """Rows are often sorted by their label: their numbers tell it."""
    rows = [f"{number},{i % 7},{i // 20}\n" for i, number in enumerate(column)]
    data = from_csv(tmp_path / "x.csv", ",a,label\n" + "".join(rows))
    data.setup("fit")
    data.setup("test")
    line = "Column '' numbers the rows, and is a feature: should it be?"
    assert capsys.readouterr().out.splitlines().count(line) == is_said


def test_another_file_has_the_classes_and_columns_of_the_training(tmp_path):
    text = "p,q,label\n" + "1,2,x\n2,3,y\n3,4,z\n" * 20
    trained = from_csv(tmp_path / "x.csv", text)
    assert trained.classes == ["x", "y", "z"]
    (tmp_path / "x.csv").unlink()  # it has been read, once
    trained.setup("fit")
    text = "q,more,p,label\n10,0,1,z\n\n" + "0,1,0,y\n" * 19
    other = from_csv(tmp_path / "y.csv", text)
    assert other.classes == ["y", "z"]
    other.load_state_dict(trained.state_dict())
    inputs, targets = other.load("train")
    assert set(targets.tolist()) <= {1, 2}
    assert {tuple(row.tolist()) for row in inputs} <= {(1, 10), (0, 0)}
    rows = [
        (name, numbers.tolist()) for name, numbers in other.read_inputs(other.csv_path)
    ]
    assert rows[:2] == [
        (f"{tmp_path}/y.csv:2", [1, 10]),
        (f"{tmp_path}/y.csv:4", [0, 0]),
    ]
    more = from_csv(tmp_path / "z.csv", "p,q,label\n1,2,x\n1,2,new\n")
    more.load_state_dict(trained.state_dict())
    with pytest.raises(UserError, match=r"z.csv has a label .*: 'new' is .*\nremove"):
        more.load("test")
    other.csv_path.write_text("q,label\n1,x\n")
    with pytest.raises(UserError, match=r"y.csv:2: no number in a column: 'p'"):
        list(other.read_inputs(other.csv_path))
    with pytest.raises(UserError, match="generated samples, without columns"):
        list(Features().read_inputs(other.csv_path))


def test_a_label_column_without_a_file_is_refused() -> None:
    with pytest.raises(UserError, match="label_column kind has no effect without a"):
        Features(label_column="kind")
