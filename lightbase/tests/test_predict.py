"""predict.py: tables, masks and arrays of files and of splits."""

import csv
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from given import Given
from paths import ACCELERATOR, Trained, fails, script
from PIL import Image
from tasks import flags_of, outputs_of
from torch import Tensor
from torch.utils.data import TensorDataset
from written import checkpoint_file

from lightbase.commands.train import main
from lightbase.core.data import BaseDataModule
from lightbase.core.load import load_run
from lightbase.extras.predict import true_columns

STRIPES = [f"stripes_{i}" for i in range(4)]
predict = script("predict").main


@pytest.fixture
def ckpt(trained: Trained) -> list[str]:
    """The flag that names the checkpoint of a run, which no test changes."""
    return ["--ckpt_path", str(checkpoint_file(trained()[0]))]


def best_of(root: Path, name: str = "tiny") -> list[str]:
    """As ckpt, of a run that the test has trained."""
    return ["--ckpt_path", str(checkpoint_file(root / name / "version_0"))]


def rows_of(ckpt: Any, output: Path, *args: object) -> list[dict[str, str]]:
    predict([*ckpt, *map(str, args), "--output", str(output)])
    with output.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_predict_reports_what_it_cannot_read_and_classifies_the_rest(
    ckpt, tmp_path, capsys
):
    below = tmp_path / "images" / "below"
    below.mkdir(parents=True)
    for mode in ("L", "RGB", "RGBA", "P", "1", "LA", "CMYK", "F", "I"):
        Image.new("RGB", (11, 40), (9, 99, 200)).convert(mode).save(
            below / f"{mode}.tiff"
        )
    readable = {str(path) for path in below.iterdir()}
    (below / "broken.png").write_bytes(b"")
    (tmp_path / "notes.txt").write_text("no image")
    output = tmp_path / "x.csv"
    with pytest.raises(SystemExit) as caught:
        rows_of(ckpt, output, below.parent, tmp_path / "notes.txt", "none.png")
    assert caught.value.code == 1
    errors = capsys.readouterr().err
    for name in ("broken.png", "notes.txt", "none.png"):
        assert errors.count(f"{name}: ") == 1
    rows = csv.DictReader(output.read_text().splitlines())
    assert {row["file"] for row in rows} == readable


def test_predict_agrees_with_the_network(ckpt, tmp_path, capsys):
    _, model, data = load_run(Path(ckpt[1]))
    data.setup("test")
    inputs, targets = data.splits["test"].values
    with torch.no_grad():
        expected = model.eval()(data.normalize(inputs)).softmax(1)
    highest, order = expected.topk(2)
    flags = (tmp_path / "x.csv", "--top_k", 2, "--probabilities")
    rows = rows_of(ckpt, *flags)
    Image.fromarray(inputs[0].permute(1, 2, 0).numpy()).save(tmp_path / "0.png")
    (of_file,) = rows_of(ckpt, *flags, tmp_path / "0.png")
    assert of_file["class_2"] == rows[0]["class_2"]
    for i, row in enumerate(rows):
        assert row.pop("sample") == str(i)
        names = [row.pop(name) for name in ("true", "class", "class_2")]
        assert names == [STRIPES[j] for j in (targets[i], *order[i])]
        values = [float(value) for value in row.values()]
        right = [*highest[i].tolist(), *expected[i].tolist()]
        assert values == pytest.approx(right, abs=1e-4)
    for wrong in ("0", "5"):
        command = [*ckpt, "--top_k", wrong]
        error = fails(capsys, 2, lambda command=command: predict(command))
        assert f"--top_k {wrong}: there are 4 classes" in error


def test_predict_takes_the_limit_of_the_trainer(ckpt, tmp_path):
    limit = ("--trainer.limit_predict_batches", 1, "--data.eval_batch_size", 4)
    assert len(rows_of(ckpt, tmp_path / "x.csv", *limit)) == 4


def test_predict_refuses_data_that_files_cannot_replace(train, tmp_path, capsys):
    limits = "--trainer.max_epochs 1 --trainer.limit_test_batches 0"
    train("--data small.Points --model.net.sizes [10,2]", limits)
    error = fails(capsys, 1, lambda: predict([*best_of(tmp_path), "black.png"]))
    assert "Points has no read_inputs(path), nor uint8 images" in error
    train("--data tasks.PlainImages --model.net.sizes [192,4] --name plain", limits)
    ckpt = best_of(tmp_path, "plain")
    error = fails(capsys, 2, lambda: predict([*ckpt, "black.png"]))
    assert "files need a BaseDataModule, which PlainImages is not" in error
    val = [*ckpt, "--split", "val", "--output"]
    predict([*val, str(tmp_path / "x.npz")])
    assert np.load(tmp_path / "x.npz")["prediction"].shape == (32, 4)
    error = fails(capsys, 1, lambda: predict([*val, "/proc/x.npz"]))
    assert "/proc/x.npz cannot be written" in error


def test_a_sample_without_a_label_has_its_number() -> None:
    data = Given((torch.zeros(3, 2), torch.zeros(3)), classes=("cat", "dog"))
    true = [*torch.tensor([0, -1, -100, 1, 2])]
    columns = true_columns(true, data, "multiclass")
    assert columns == {"true": ["cat", "-1", "-100", "dog", "2"]}


def test_predict_writes_labels_numbers_and_texts(train, tmp_path, capsys):
    output = tmp_path / "x.csv"
    for task in ("multilabel", "regression", "text"):
        train(flags_of(task), "--name", task)
    ckpt = best_of(tmp_path, "multilabel")
    (x, _), names = outputs_of("multilabel"), np.array(["red", "green", "blue"])
    rows = rows_of(ckpt, output, "--threshold", 0.7, "--probabilities")
    labels = [", ".join(names[logits > 0.7]) for logits in x.sigmoid()]
    assert [row["labels"] for row in rows] == labels
    blue = [float(row["probability_blue"]) for row in rows]
    assert blue == pytest.approx(x[:, 2].sigmoid().tolist(), abs=1e-4)
    error = fails(capsys, 2, lambda: predict([*ckpt, "--top_k", "2"]))
    assert "--top_k is for classes" in error
    (x, y), first = outputs_of("regression"), best_of(tmp_path, "regression")
    row = rows_of(first, output)[0]
    assert list(row) == ["sample", "prediction_0", "prediction_1", "true_0", "true_1"]
    numbers = [float(number) for number in row.values()]
    assert numbers == pytest.approx([0, *x[0].tolist(), *y[0].tolist()], rel=1e-5)
    (x, _), last = outputs_of("text"), rows_of(best_of(tmp_path, "text"), output)[-1]
    assert last["text"] == "".join("abcde"[i] for i in x[-1].argmax(1))
    (tmp_path / "lines.txt").write_text("1 2\n3 4\n")
    predict([*first, str(tmp_path / "lines.txt")])
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.split() == ["lines.txt:1", "3", "4"]


def test_predict_writes_masks_and_nested_tensors(train, tmp_path, capsys):
    train(flags_of("segmentation"))
    ckpt, (x, _) = best_of(tmp_path), outputs_of("segmentation")
    predict([*ckpt, "--output", str(tmp_path / "masks")])
    with Image.open(tmp_path / "masks" / "39.png") as image:
        assert image.mode == "P"
        assert (np.array(image) == x[39].argmax(0).numpy()).all()
    assert "give --output FOLDER" in fails(capsys, 2, lambda: predict(ckpt))
    train(flags_of("segmentation", "tasks.Parts"), "--model.task null --name parts")
    ckpt = best_of(tmp_path, "parts")
    error = fails(capsys, 2, lambda: predict(ckpt))
    assert "--output FILE.npz writes any tensors" in error
    predict([*ckpt, "--output", str(tmp_path / "x.npz")])
    arrays = np.load(tmp_path / "x.npz")
    assert sorted(arrays) == ["mean", "more", "names"]
    assert np.allclose(arrays["more"], x + 1)
    assert np.allclose(arrays["mean"], x.flatten(1).mean(1), atol=1e-6)


class Halved(BaseDataModule):
    """uint8 images of a Dataset, without image_shape."""

    classes = ["a", "b"]

    def load(self, split: str) -> Any:  # type: ignore[override]
        images = torch.randint(256, (40, 3, 8, 8), dtype=torch.uint8)
        return TensorDataset(images, torch.arange(40) % 2)

    def normalize(self, inputs: Tensor) -> Tensor:
        return inputs / 510


@pytest.mark.parametrize(("model", "a"), [("Plain", 0.1), ("PlainWithStep", 1.1)])
def test_predict_goes_through_the_predict_step_of_any_module(
    tmp_path, capsys, model, a
):
    classes = f"--model tasks.{model} --data test_predict.Halved --data.batch_size 8"
    place = f"--trainer.default_root_dir {tmp_path} --trainer.max_epochs 1"
    main(f"{classes} {place} --trainer.accelerator {ACCELERATOR}".split())
    Image.new("RGB", (5, 5), (51, 102, 0)).save(tmp_path / "x.png")
    path = str(next(tmp_path.rglob("last.ckpt")))
    predict(["--ckpt_path", path, str(tmp_path / "x.png"), "--top_k", "2"])
    cells = capsys.readouterr().out.splitlines()[-1].split()
    assert cells[1:] == ["b", f"{a + 0.1:.4f}", "a", f"{a:.4f}"]


def test_predict_writes_any_file_name(ckpt, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = [os.fsdecode(b"caf\xe9.png"), "two\nlines.png", "=2.png", "n\u00e9.png"]
    for name in names:
        Image.new("RGB", (8, 8)).save(name)
    shown = ["caf\\udce9.png", "two\\nlines.png", *names[2:]]
    assert [row["file"] for row in rows_of(ckpt, Path("x.csv"), *names)] == shown
    predict([*ckpt, *names])
    table = capsys.readouterr().out.splitlines()[-4:]
    assert [line.split()[0] for line in table] == shown
    Path("bad\nname.png").write_bytes(b"")
    error = fails(capsys, 1, lambda: predict([*ckpt, "bad\nname.png"]))
    assert error == "error: cannot read bad\\nname.png: not an image, or cut short"
