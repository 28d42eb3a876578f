import re
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
    return Features(csv_path=str(path), batch_size=4, **options)


def test_features_from_a_csv_file(tmp_path: Path) -> None:
    rows = [f"{i},{'c' * (i % 2 + 1)},{-i},123456.789\n" for i in range(100)]
    text = "a,kind,b,constant\n\n" + "".join(rows)
    data = from_csv(tmp_path / "x.csv", text, label_column="kind")
    data.setup("fit")
    data.setup("test")
    assert data.classes == ["c", "cc"]
    parts = [data.splits[name].values for name in ("train", "val", "test")]
    assert [len(targets) for _, targets in parts] == [72, 8, 20]
    assert torch.equal(data.table[0][:, 0], torch.arange(100.0))
    for inputs, targets in parts:
        assert torch.equal(inputs[:, 0], -inputs[:, 1])
        assert torch.equal(targets, inputs[:, 0].long() % 2)
    normalised = data.normalize(parts[0][0])
    assert normalised[:, 2].abs().max() < 0.1
    assert normalised[:, 0].std() == pytest.approx(1, rel=1e-3)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, ": .* No such file"),
        (b"a,label\n1,\xe9\n", ": 'utf-8' codec can't decode"),
        (b"a,label\n", ", line 2: no row below the header"),
        (b"a,b\n1,2\n", ", line 2: no label in a column 'label'"),
        (b'\na,label\n\n1,"x\ny"\n2,\n', ", line 6: no label in a column 'label'"),
        (b"a,label\noops,y\n", ", line 2: could not convert .*: 'oops'"),
        (b"a,label\n1e300,y\n", ", line 2: .* too large"),
        (b"a,label\n1,x\n1\n", ", line 3: 1 cells for 2 columns"),
        (b'a,label\n1,x\n1,"x\n2,y\n', ", line 3: is a quote not closed"),
    ],
)
def test_a_wrong_csv_file_is_named_with_the_line_and_a_way_out(
    tmp_path, content, problem
):
    path = tmp_path / "x.csv"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        _ = Features(csv_path=str(path)).classes
    first, second = str(caught.value).splitlines()
    assert re.match(f"{path}{problem}", first)
    assert second.startswith("give a CSV file in UTF-8: a header,")
    assert "all quotes closed" in second


def test_another_file_keeps_the_classes_of_the_training(tmp_path):
    trained = from_csv(tmp_path / "x.csv", "a,label\n" + "1,x\n2,y\n3,z\n" * 20)
    assert trained.classes == ["x", "y", "z"]
    (tmp_path / "x.csv").unlink()  # it has been read, once
    trained.setup("fit")
    trained.shuffle_seed = 0  # as a Trainer draws it
    other = from_csv(tmp_path / "y.csv", "a,label\n" + "2,y\n3,z\n" * 20)
    other.load_state_dict(trained.state_dict())
    assert set(other.load("test")[1].tolist()) == {1, 2}
    unknown = from_csv(tmp_path / "w.csv", "a,label\n2,w\n")
    unknown.load_state_dict(trained.state_dict())
    with pytest.raises(UserError, match=r"training had not: \['w'\]\nremove"):
        unknown.load("test")


def test_the_rows_of_a_file_are_read_by_their_columns(tmp_path: Path) -> None:
    data = from_csv(tmp_path / "x.csv", "p,q,label\n1,2,x\n")
    assert data.classes == ["x"]
    new = tmp_path / "new.csv"
    new.write_text("q,more,p\n10,x,1\n\n0,y,0\n")
    rows = [(name, numbers.tolist()) for name, numbers in data.read_inputs(new)]
    assert rows == [(f"{new}:2", [1, 10]), (f"{new}:3", [0, 0])]
    new.write_text("q,r\n1,2\n")
    with pytest.raises(UserError, match=r"new.csv, line 2: no column 'p'\ngive a CSV"):
        list(data.read_inputs(new))
    with pytest.raises(UserError, match="generated samples, without columns"):
        list(Features().read_inputs(new))
