"""predict.py: tables, masks and arrays of files and of splits, in the precision of the
run."""

import csv
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from example.classifier import Classifier
from example.data.synthetic import SyntheticImages
from paths import Trained, argv, fails, script
from PIL import Image
from tasks import flags_of, outputs_of
from torch import Tensor
from written import checkpoint_file

from lightbase.setup.load import load_run

STRIPES = [f"stripes_{i}" for i in range(4)]
SEES = "--trainer.max_epochs 1 --model test_predict.Sees --trainer.precision"
predict = script("predict").main
evaluate = script("evaluate").main


class Sees(Classifier):
    """Keeps what its tests see."""

    seen: list[Tensor] = []

    def test_step(self, batch, batch_idx: int):
        logits = super().test_step(batch, batch_idx)
        self.seen.append(logits.softmax(1).cpu())
        return logits


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


def arrays_of(ckpt: Any, output: Path, *args: object) -> dict[str, np.ndarray]:
    predict([*ckpt, *argv(*args), "--output", str(output)])
    with np.load(output) as arrays:
        return dict(arrays)


def test_predictions_are_what_the_test_has_measured(trained, tmp_path):
    """Also with flags of the data and of the trainer."""
    folder, metrics = trained(SEES, "bf16-true")
    ckpt = ["--ckpt_path", str(checkpoint_file(folder))]
    Sees.seen.clear()
    assert evaluate(ckpt)["test/acc"] == metrics["test/acc"]
    predicted = arrays_of(ckpt, tmp_path / "x.npz")["prediction"]
    assert (torch.from_numpy(predicted) == torch.cat(Sees.seen)).all()
    ckpt += argv("--trainer.precision 64-true --data.num_test 40")
    Sees.seen.clear()
    evaluate(ckpt)
    flags = "--data.batch_size=7 --trainer.limit_predict_batches 3"
    predicted = arrays_of(ckpt, tmp_path / "y.npz", flags)["prediction"]
    torch.testing.assert_close(torch.from_numpy(predicted), torch.cat(Sees.seen)[:21])


def test_files_need_no_data_set_and_what_cannot_be_read_is_reported(
    ckpt, tmp_path, capsys, monkeypatch
):
    monkeypatch.delattr(SyntheticImages, "load")
    monkeypatch.chdir(tmp_path)
    below = Path("images") / "below"
    below.mkdir(parents=True)
    image = Image.new("RGB", (11, 40), (9, 99, 200))
    for mode in ("L", "RGBA", "P"):
        image.convert(mode).save(below / f"{mode}.tiff")
    readable = {str(path) for path in below.iterdir()}
    names = [os.fsdecode(b"caf\xe9.png"), "two\nlines.png", "=2.png"]
    for name in names:
        image.save(name)
    (below / "broken.png").write_bytes(b"")
    with pytest.raises(SystemExit) as caught:
        rows_of(ckpt, Path("x.csv"), "images", "none.png", *names)
    assert caught.value.code == 1
    errors = capsys.readouterr().err
    assert "error: cannot read images/below/broken.png: cannot identify" in errors
    assert errors.count("cannot read none.png: ") == 1
    with Path("x.csv").open(newline="") as file:
        files = [row["file"] for row in csv.DictReader(file)]
    assert {*files[:-3]} == readable
    assert files[-3:] == ["caf\\udce9.png", *names[1:]]


def test_a_table_agrees_with_the_network(ckpt, tmp_path):
    _, model, data = load_run(Path(ckpt[1]))
    data.setup("test")
    inputs, targets = data.splits["test"].values
    with torch.no_grad():
        expected = model.eval()(data.normalize(inputs)).softmax(1)
    highest, order = expected.topk(2)
    Image.fromarray(inputs[0].permute(1, 2, 0).numpy()).save(tmp_path / "0.png")
    flags = (tmp_path / "x.csv", "--top_k", 2, "--probabilities")
    (of_file,) = rows_of(ckpt, *flags, tmp_path / "0.png")
    rows = rows_of(ckpt, *flags)
    assert len(rows) == len(inputs)
    assert of_file["class_2"] == rows[0]["class_2"]
    for i, row in enumerate(rows):
        names = [row.pop(name) for name in ("true", "class", "class_2")]
        assert names == [STRIPES[j] for j in (targets[i], *order[i])]
        values = [float(value) for value in row.values()]
        right = [i, *highest[i].tolist(), *expected[i].tolist()]
        assert values == pytest.approx(right, abs=1e-4)


def test_a_plain_module_and_plain_data(tmp_path, capsys):
    place = f"--trainer.default_root_dir {tmp_path} --trainer.max_epochs 1"
    classes = "--model tasks.Plain --data tasks.PlainImages --name plain"
    script("train").main(argv(place, classes))
    ckpt = best_of(tmp_path, "plain")
    arrays = arrays_of(ckpt, tmp_path / "x.npz", "--split val")
    assert arrays["prediction"].shape == (32, 2)
    error = fails(capsys, 2, lambda: predict([*ckpt, "black.png"]))
    assert "files need a BaseDataModule, which PlainImages is not" in error


def test_predict_writes_labels_numbers_and_texts(train, tmp_path):
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
    (x, y), first = outputs_of("regression"), best_of(tmp_path, "regression")
    row = rows_of(first, output)[0]
    assert list(row) == ["sample", "prediction_0", "prediction_1", "true_0", "true_1"]
    numbers = [float(number) for number in row.values()]
    assert numbers == pytest.approx([0, *x[0].tolist(), *y[0].tolist()], rel=1e-5)
    (x, _), last = outputs_of("text"), rows_of(best_of(tmp_path, "text"), output)[-1]
    assert last["text"] == "".join("abcde"[i] for i in x[-1].argmax(1))


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
    arrays = arrays_of(ckpt, tmp_path / "x.npz")
    assert sorted(arrays) == ["mean", "more", "names"]
    assert np.allclose(arrays["mean"], x.flatten(1).mean(1), atol=1e-6)
