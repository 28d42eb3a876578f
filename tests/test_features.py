import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import mean_absolute_error

import lightbase
from lightbase import UserError
from lightbase.commands.script import run_command

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


def test_the_statistics_are_those_of_the_training_part(tmp_path: Path) -> None:
    rows = [f"{i * i},c{i % 2}\n" for i in range(100)]
    data = from_csv(tmp_path / "x.csv", "a,label\n" + "".join(rows))
    data.setup("fit")
    inputs, _ = data.splits["train"].values
    assert len(inputs) == 72  # without the validation and the test
    torch.testing.assert_close(data.mean, inputs.mean(0))
    torch.testing.assert_close(data.std, inputs.std(0))


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, " cannot be read beyond line 1: .* No such file"),
        (b"a,label\n1,\xe9\n", " cannot be .* 'utf-8' codec can't decode"),
        (b'a,label\n\n1,"x\ny"\n2,\n', ":5: nothing in a column label"),
        (b"a,b,a,label\n1,2,3,y\n", " has 2 columns 'a'"),
        (b"a,label\nnan,y\n", ":2: no number in a column: .nan. are not finite"),
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


def test_a_label_column_without_a_file_is_refused() -> None:
    with pytest.raises(UserError, match="time_column have no effect without a file"):
        Features(label_column="kind")


ROWS = "".join(f"2026-01-{1 + i // 4:02},{i},{-i},{100 * i}\n" for i in range(100))
TIMED = "date,a,b,price\n" + ROWS


def test_numbers_of_target_columns_in_the_order_of_dates(tmp_path, capsys) -> None:
    options = {"target_columns": "price", "time_column": "date"}
    data = from_csv(tmp_path / "x.csv", TIMED, val_split="ordered", gap=24, **options)
    data.setup("fit")
    data.setup("test")
    assert data.classes == []
    assert data.columns == ["a", "b"]
    # 4 samples a day; a day is left out before each part
    parts = {name: x.values for name, x in data.splits.items()}
    assert parts["test"][1].tolist() == [100 * i for i in range(80, 100)]
    assert parts["val"][1].tolist() == [100 * i for i in range(68, 76)]
    assert parts["train"][1].tolist() == [100 * i for i in range(64)]
    mean, std = data.target_scale
    assert mean == parts["train"][1].mean()
    assert std == parts["train"][1].std(correction=0)
    assert "val_split" not in capsys.readouterr().out
    data = from_csv(tmp_path / "x.csv", TIMED, scale_targets=False, **options)
    data.setup("fit")
    assert data.target_scale is None
    assert "--data.val_split ordered" in capsys.readouterr().out
    both = from_csv(
        tmp_path / "x.csv", TIMED, target_columns=["price", "a"], time_column="date"
    )
    inputs, targets = both.load("train")
    assert both.columns == ["b"]
    assert torch.equal(targets, torch.cat([-100 * inputs, -inputs], 1))


def test_columns_of_texts_or_dates_are_refused_with_a_page(tmp_path) -> None:
    with pytest.raises(UserError, match=r"tabular.md shows embeddings") as caught:
        from_csv(tmp_path / "x.csv", TIMED, target_columns="price").load("train")
    assert "dates in --data.time_column" in str(caught.value)
    text = TIMED.replace("2026-01-", "Jan ")
    options = {"target_columns": "price", "time_column": "date", "val_split": "ordered"}
    with pytest.raises(UserError, match="give a number, or an ISO date"):
        from_csv(tmp_path / "x.csv", text, **options).load("train")


@pytest.mark.slow
@pytest.mark.usefixtures("regressor")
@pytest.mark.parametrize("unit", [1e5, 1e-5])
def test_a_regression_has_the_units_of_the_file(tmp_path, monkeypatch, unit) -> None:
    monkeypatch.chdir(tmp_path)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 3, generator=generator)
    noise = torch.randn(400, generator=generator)
    y = unit * (5 + x.sum(1) + 0.3 * noise)
    rows = [
        f"{a},{b},{c},{d}\n"
        for (a, b, c), d in zip(x.tolist(), y.tolist(), strict=True)
    ]
    Path("t.csv").write_text("a,b,c,y\n" + "".join(rows))
    flags = (
        "--model project.regressor.Regressor --model.net torch.nn.Linear "
        "--model.net.in_features 3 --model.net.out_features 1 --model.optimizer Adam "
        "--model.lr 0.05 --data project.data.features.Features --data.csv_path t.csv "
        "--data.target_columns y --trainer.max_epochs 4 --trainer.accelerator cpu "
        "--device_monitor false --name t --trainer.default_root_dir logs"
    )
    result = lightbase.main(flags.split())
    best = "logs/t/version_0/checkpoints/best.ckpt"
    root = ["--ckpt_path", best, "--trainer.default_root_dir", "logs"]
    again = run_command("commands.evaluate", root)
    assert again == {name: result[name] for name in again}
    run_command("commands.predict", [*root, "--output", "p.csv"])
    with Path("p.csv").open() as file:
        table = [*csv.DictReader(file)]
    predicted, true = (
        [float(row[name]) for row in table] for name in ("prediction", "true")
    )
    mae = mean_absolute_error(true, predicted)
    assert result["test/mae"] == pytest.approx(mae, rel=1e-4)
    assert 0.15 * unit < mae < 0.5 * unit
    run_command("commands.predict", [*root, "t.csv", "--output", "all.npz"])
    expected = torch.from_numpy(np.load("all.npz")["prediction"])
    module, data = lightbase.load(best, trust=True)
    torch.testing.assert_close(lightbase.predict((module, data), x.double()), expected)
    pytest.importorskip("onnxscript")
    onnxruntime = pytest.importorskip("onnxruntime")
    run_command("commands.export", [*root, "--format", "onnx", "--output", "t.onnx"])
    (outputs,) = onnxruntime.InferenceSession("t.onnx").run(
        None, {"inputs": x.double().numpy()}
    )
    torch.testing.assert_close(
        torch.from_numpy(outputs), expected, rtol=1e-4, atol=1e-4 * unit
    )
