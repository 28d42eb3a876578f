import csv
from pathlib import Path

import pytest
import torch

import lightbase
from lightbase import UserError
from lightbase.commands import predict

features = pytest.importorskip("project.data.features")
Features = features.Features


def test_generated_features_come_in_overlapping_clusters() -> None:
    data = Features()
    data.setup("fit")
    inputs, targets = data.splits["train"].inputs, data.splits["train"].targets
    assert inputs.shape[1] == 10
    centres = torch.stack([inputs[targets == c].mean(0) for c in (0, 1)])
    test_inputs, test_targets = data.load("test")
    nearest = torch.cdist(test_inputs, centres).argmin(1)
    accuracy = (nearest == test_targets).float().mean()
    assert 0.9 <= accuracy < 0.99
    normalised = data.normalize(inputs)
    torch.testing.assert_close(normalised.mean(0), torch.zeros(10), atol=1e-5, rtol=0)


def write_csv(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_features_from_a_csv_file(tmp_path: Path) -> None:
    rows = "".join(
        f"{i},{'cat' if i % 2 else 'ant'},{-i},123456.789\n" for i in range(100)
    )
    path = write_csv(tmp_path / "x.csv", "a,kind,b,constant\n\n" + rows)
    data = Features(csv_path=path, label_column="kind", batch_size=4)
    data.setup("fit")
    data.setup("test")
    assert data.classes == ["ant", "cat"]
    parts = [data.splits[name].inputs for name in ("train", "val", "test")]
    assert [len(part) for part in parts] == [72, 8, 20]
    all_inputs = torch.cat(parts)
    assert sorted(all_inputs[:, 0].tolist()) == list(range(100))
    assert torch.equal(all_inputs[:, 0], -all_inputs[:, 1])
    targets = torch.cat(
        [data.splits[name].targets for name in ("train", "val", "test")]
    )
    assert torch.equal(targets, all_inputs[:, 0].long() % 2)
    normalised = data.normalize(parts[0])
    assert normalised[:, 2].abs().max() < 0.1
    assert normalised[:, 0].std() == pytest.approx(1, rel=1e-3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", "a label in a column 'label'"),
        ("a,label\n1,x\n2,\n", "a label in a column 'label'"),
        ("a,label\n1,x\noops,y\n", "could not convert string to float: 'oops'"),
        ("a,label\n1,x\n1e300,y\n", "too large"),
        ("a,label\n1,x\n1\n", "as many cells as the first one: 1$"),
    ],
)
def test_a_wrong_csv_file(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Features(csv_path=write_csv(tmp_path / "x.csv", text)).load("train")


def test_another_file_keeps_the_classes_of_the_training(tmp_path: Path) -> None:
    trained = Features(
        csv_path=write_csv(tmp_path / "x.csv", "a,label\n" + "1,x\n2,y\n3,z\n" * 20),
        batch_size=4,
    )
    trained.setup("fit")
    trained.shuffle_seed = 0  # as a Trainer draws it
    other = Features(
        csv_path=write_csv(tmp_path / "yz.csv", "a,label\n" + "2,y\n3,z\n" * 20)
    )
    other.load_state_dict(trained.state_dict())
    assert set(other.load("test")[1].tolist()) == {1, 2}
    unknown = Features(csv_path=write_csv(tmp_path / "w.csv", "a,label\n2,w\n"))
    unknown.load_state_dict(trained.state_dict())
    with pytest.raises(UserError, match="w"):
        unknown.load("test")


def test_classes_are_known_before_the_setup_and_the_file_is_read_once_and_must_be_there(
    tmp_path: Path,
) -> None:
    path = tmp_path / "x.csv"
    data = Features(
        csv_path=write_csv(path, "a,label\n" + "1,x\n2,y\n3,z\n" * 40), batch_size=4
    )
    assert data.classes == ["x", "y", "z"]
    path.unlink()
    data.setup("fit")
    data = Features(csv_path=str(path))
    for read in (lambda: data.load("train"), lambda: data.num_classes):
        with pytest.raises(UserError, match=r"data.csv_path .*x\.csv cannot be read"):
            read()


@pytest.mark.usefixtures("classifier")
def test_predictions_for_rows_of_a_file_by_their_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = "".join(f"{i % 2},{(i % 2) * 9 + i % 3},{'ab'[i % 2]}\n" for i in range(60))
    (tmp_path / "x.csv").write_text("p,q,label\n" + rows)
    flags = f"--data project.data.features.Features --data.csv_path {tmp_path}/x.csv"
    flags += (
        " --name rows --model project.classifier.Classifier --model.net torch.nn.Linear"
    )
    flags += " --model.net.in_features 2 --model.net.out_features 2 --model.lr 0.1"
    flags += " --trainer.max_epochs 4 --trainer.accelerator cpu --data.batch_size 16"
    root = f"--trainer.default_root_dir {tmp_path}".split()
    lightbase.main([*flags.split(), *root])
    (tmp_path / "new.csv").write_text("q,more,p\n10,x,1\n0,y,0\n")
    command = ["--ckpt_path", "rows", *root, str(tmp_path / "new.csv")]
    predict.main([*command, "--output", str(tmp_path / "out.csv")])
    with (tmp_path / "out.csv").open(newline="") as file:
        assert [row["class"] for row in csv.DictReader(file)] == ["b", "a"]
    for text, reason in (
        ("q,r\n1,2\n", "a column is missing, or has other texts than numbers: 'p'"),
        ("p,q\n1,z\n", "could not convert string to float: 'z'"),
    ):
        (tmp_path / "new.csv").write_text(text)
        with pytest.raises(SystemExit):
            predict.main(command)
        assert reason in capsys.readouterr().err
