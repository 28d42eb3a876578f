from pathlib import Path

import pytest
import torch
from attached import attach

from lightbase.data.tables import Features
from lightbase.errors import UserError


def test_generated_features_come_in_overlapping_clusters() -> None:
    data = attach(Features(), "fit")
    inputs, targets = data.splits["train"].inputs, data.splits["train"].targets
    assert inputs.shape[1] == 10
    centres = torch.stack([inputs[targets == c].mean(0) for c in (0, 1)])
    test_inputs, test_targets = data.load("test")
    found = torch.cdist(test_inputs, centres).argmin(1)
    accuracy = (found == test_targets).float().mean()
    assert 0.9 <= accuracy < 0.99
    normalised = data.normalize(inputs)
    torch.testing.assert_close(normalised.mean(0), torch.zeros(10), atol=1e-5, rtol=0)


def write_csv(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_features_from_a_csv_file(tmp_path: Path) -> None:
    rows = "".join(f"{i},{'cat' if i % 2 else 'ant'},{-i}\n" for i in range(100))
    path = write_csv(tmp_path / "x.csv", "a,kind,b\n" + rows)
    data = Features(csv_path=path, label_column="kind", batch_size=4)
    attach(data, "fit")
    data.setup("test")
    assert data.classes == ["ant", "cat"]
    parts = [data.splits[name].inputs for name in ("train", "val", "test")]
    assert [len(part) for part in parts] == [72, 8, 20]
    whole = torch.cat(parts)
    assert sorted(whole[:, 0].tolist()) == list(range(100))
    assert torch.equal(whole[:, 0], -whole[:, 1])
    targets = torch.cat([data.splits[name].targets for name in ("train", "val", "test")])
    assert torch.equal(targets, whole[:, 0].long() % 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "needs a column 'label'"),
        ("a,label\n1,x\noops,y\n", "line 3"),
        ("a,label\n1,x\n1e300,y\n", "line 3"),
        ("label\nx\n", "another"),
        ("a,a,label\n1,2,x\n", "once"),
        ("a,label\n1,x\n1\n", "line 3"),
    ],
)
def test_a_wrong_csv_file(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Features(csv_path=write_csv(tmp_path / "x.csv", text)).load("train")


def test_a_column_that_never_changes_tells_nothing(tmp_path: Path) -> None:
    rows = "".join(f"{i % 7},123456.789,{'ab'[i % 2]}\n" for i in range(300))
    data = attach(
        Features(csv_path=write_csv(tmp_path / "x.csv", "x,k,label\n" + rows), batch_size=4), "fit"
    )
    normalised = data.normalize(data.splits["train"].inputs)
    assert normalised[:, 1].abs().max() < 0.1
    assert normalised[:, 0].std() == pytest.approx(1, rel=1e-3)


def test_another_file_keeps_the_classes_of_the_training(tmp_path: Path) -> None:
    trained = Features(
        csv_path=write_csv(tmp_path / "x.csv", "a,label\n" + "1,x\n2,y\n3,z\n" * 20), batch_size=4
    )
    attach(trained, "fit")
    other = Features(csv_path=write_csv(tmp_path / "yz.csv", "a,label\n" + "2,y\n3,z\n" * 20))
    other.load_state_dict(trained.state_dict())
    assert set(other.load("test")[1].tolist()) == {1, 2}
    unknown = Features(csv_path=write_csv(tmp_path / "w.csv", "a,label\n2,w\n"))
    unknown.load_state_dict(trained.state_dict())
    with pytest.raises(UserError, match="w"):
        unknown.load("test")


def test_a_missing_csv_file_is_an_error_where_it_is_needed(tmp_path: Path) -> None:
    data = Features(csv_path=str(tmp_path / "none.csv"))
    for read in (lambda: data.load("train"), lambda: data.num_classes):
        with pytest.raises(UserError, match=r"none\.csv"):
            read()
