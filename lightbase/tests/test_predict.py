"""predict.py: tables, masks and arrays of files and of splits."""

import csv
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from paths import ACCELERATOR, Trained, fails, script
from PIL import Image
from plain import PlainData, PlainModule
from tasks import flags_of, outputs_of
from torch import Tensor
from torch.utils.data import TensorDataset
from written import checkpoint_file

from lightbase.commands.predict import task_of
from lightbase.commands.train import main
from lightbase.core.data import BaseDataModule
from lightbase.core.load import load_run

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
    folder = tmp_path / "images"
    (folder / "below").mkdir(parents=True)
    rng = np.random.default_rng(0)
    for i, mode in enumerate(["L", "RGB", "RGBA", "P", "1", "LA", "CMYK", "F", "I"]):
        pixels = rng.integers(0, 256, (11 + 7 * i, 40 - 3 * i, 3), dtype=np.uint8)
        suffix = "tiff" if mode in ("CMYK", "F", "I") else "png"
        Image.fromarray(pixels).convert(mode).save(folder / f"{mode}.{suffix}")
    deep = rng.integers(0, 2**16, (9, 9), dtype=np.uint16)
    Image.fromarray(deep).save(folder / "below" / "deep.png")
    readable = sorted(path.name for path in folder.rglob("*.*"))
    (folder / "broken.png").write_bytes((folder / "RGB.png").read_bytes()[:100])
    (folder / "notes.txt").write_text("no image")

    output = tmp_path / "predictions.csv"
    files = [str(folder), str(folder / "notes.txt"), "none.png"]
    with pytest.raises(SystemExit) as caught:
        predict([*ckpt, *files, "--output", str(output)])
    assert caught.value.code == 1
    errors = capsys.readouterr().err
    for name in ("broken.png", "notes.txt", "none.png"):
        assert errors.count(f"{name}: ") == 1
    rows = list(csv.DictReader(output.read_text().splitlines()))
    assert sorted(Path(row["file"]).name for row in rows) == readable
    for row in rows:
        assert row["class"] in STRIPES
        assert 0.25 <= float(row["probability"]) <= 1


def test_predict_agrees_with_the_network(
    ckpt: Any, tmp_path: Path, capsys: Any
) -> None:
    _, model, data = load_run(Path(ckpt[1]))
    data.setup("test")
    inputs = data.splits["test"].inputs[:30]
    files = [str(tmp_path / f"{i:02d}.png") for i in range(30)]
    for file, image in zip(files, inputs, strict=True):
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(file)
    with torch.no_grad():
        expected = model.eval()(data.normalize(inputs)).softmax(1)
    order = expected.argsort(1, descending=True)
    capsys.readouterr()
    predict([*ckpt, *files])
    table = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert [row[1] for row in table] == [STRIPES[i] for i in order[:, 0]]
    highest = expected.max(1).values.tolist()
    assert [float(row[2]) for row in table] == pytest.approx(highest, abs=1e-4)
    rows = rows_of(ckpt, tmp_path / "all.csv", *files, "--top_k", 3, "--probabilities")
    likeliest = [
        "class",
        "probability",
        "class_2",
        "probability_2",
        "class_3",
        "probability_3",
    ]
    assert list(rows[0]) == [
        "file",
        *likeliest,
        *(f"probability_{name}" for name in STRIPES),
    ]
    for row, values, indices in zip(rows, expected, order, strict=True):
        assert [row[name] for name in likeliest[::2]] == [
            STRIPES[i] for i in indices[:3]
        ]
        each = [float(row[f"probability_{name}"]) for name in STRIPES]
        assert each == pytest.approx(values.tolist(), abs=1e-4)
        assert float(row["probability_3"]) == sorted(each)[1]
    for wrong in ("0", "5", "-1"):
        command = [*ckpt, files[0], "--top_k", wrong]
        error = fails(capsys, 2, lambda command=command: predict(command))
        assert f"--top_k {wrong}: there are 4 classes" in error


def test_predict_refuses_data_that_files_cannot_replace(train, tmp_path, capsys):
    black = str(tmp_path / "black.png")
    Image.new("RGB", (5, 5)).save(black)
    limits = "--trainer.max_epochs 1 --trainer.limit_test_batches 0"
    train("--data", "small.Points", "--model.net.sizes", "[10,2]", limits)
    error = fails(capsys, 1, lambda: predict([*best_of(tmp_path), black]))
    assert "Points has no read_inputs(path), nor uint8 images" in error
    train("--data tasks.PlainImages --model.net.sizes [192,4] --name plain", limits)
    ckpt = best_of(tmp_path, "plain")
    error = fails(capsys, 2, lambda: predict([*ckpt, black]))
    assert "files need a BaseDataModule, which PlainImages is not" in error
    predict([*ckpt, "--split", "val", "--output", str(tmp_path / "x.npz")])
    assert np.load(tmp_path / "x.npz")["prediction"].shape == (32, 4)


def test_predict_takes_a_split_in_its_order_with_the_true_classes(ckpt, tmp_path):
    _, _, data = load_run(Path(ckpt[1]))
    data.setup("fit")
    data.setup("test")
    for split in ("test", "val", "train"):
        rows = rows_of(ckpt, tmp_path / "x.csv", "--split", split)
        targets = data.splits[split].targets.tolist()
        assert [row["true"] for row in rows] == [STRIPES[i] for i in targets]
        assert [row["sample"] for row in rows] == [str(i) for i in range(len(targets))]
        assert sum(row["true"] == row["class"] for row in rows) > 0.5 * len(rows)


def test_predict_writes_labels_numbers_and_texts(train, tmp_path, capsys):
    rows = {}
    for task in ("multilabel", "regression", "text"):
        train(flags_of(task), "--name", task)
        ckpt = best_of(tmp_path, task)
        flags = ["--threshold", 0.7, "--probabilities"] if task == "multilabel" else []
        rows[task] = rows_of(ckpt, tmp_path / "x.csv", *flags)
    (x, _), names = outputs_of("multilabel"), np.array(["red", "green", "blue"])
    for row, logits in zip(rows["multilabel"], x, strict=True):
        assert row["labels"] == ", ".join(names[logits.sigmoid() > 0.7])
        each = [float(row[f"probability_{name}"]) for name in names]
        assert each == pytest.approx(logits.sigmoid().tolist(), abs=1e-4)
    (x, y), first = outputs_of("regression"), rows["regression"][0]
    numbers = [
        float(first[name])
        for name in ("prediction_0", "prediction_1", "true_0", "true_1")
    ]
    assert numbers == pytest.approx([*x[0].tolist(), *y[0].tolist()], rel=1e-5)
    (x, _), last = outputs_of("text"), rows["text"][-1]
    assert last["text"] == "".join("abcde"[i] for i in x[-1].argmax(1))
    ckpt[1] = ckpt[1].replace("text", "regression")
    (tmp_path / "lines.txt").write_text("1 2\n3 4\n")
    capsys.readouterr()
    predict([*ckpt, str(tmp_path / "lines.txt")])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[1:] == [["lines.txt:0", "1", "2"], ["lines.txt:1", "3", "4"]]


def test_predict_writes_masks_and_nested_tensors(train, tmp_path, capsys):
    train(flags_of("segmentation"))
    ckpt, (x, _) = best_of(tmp_path), outputs_of("segmentation")
    predict([*ckpt, "--output", str(tmp_path / "masks")])
    for i in range(40):
        with Image.open(tmp_path / "masks" / f"{i}.png") as image:
            assert image.mode == "P"
            assert (np.array(image) == x[i].argmax(0).numpy()).all()
    assert "give --output FOLDER" in fails(capsys, 2, lambda: predict(ckpt))
    train(flags_of("segmentation", "tasks.Parts"), "--model.task null --name parts")
    ckpt[1] = ckpt[1].replace("tiny", "parts")
    assert "--output FILE.npz writes any tensors" in fails(
        capsys, 2, lambda: predict(ckpt)
    )
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
    config = tmp_path / "plain.yaml"
    config.write_text(
        f"model: {{class_path: tasks.{model}}}\n"
        "data: {class_path: test_predict.Halved, init_args: {batch_size: 8}}\n"
        f"trainer: {{max_epochs: 1, accelerator: {ACCELERATOR}, "
        f"default_root_dir: {tmp_path}, log_every_n_steps: 1}}\n"
        "step_timer: false\ndevice_monitor: false\n"
    )
    main(["--config", str(config)])
    Image.new("RGB", (5, 5), (51, 102, 0)).save(tmp_path / "x.png")
    path = str(next(tmp_path.rglob("last.ckpt")))
    predict(["--ckpt_path", path, str(tmp_path / "x.png"), "--top_k", "2"])
    cells = capsys.readouterr().out.splitlines()[-1].split()
    assert cells[1:] == ["b", f"{a + 0.1:.4f}", "a", f"{a:.4f}"]


def test_predict_writes_any_file_name(ckpt, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos" / ".thumbs").mkdir(parents=True)
    Image.new("RGB", (8, 8)).save("photos/.thumbs/1.png")
    cells = {  # by name: what the CSV has
        os.fsdecode(b"caf\xe9.png"): "caf\\udce9.png",
        "two\nlines.png": "two\\nlines.png",
        "photos/=2.png": "photos/=2.png",
        "n\u00e9.png": "n\u00e9.png",
    }
    for name in cells:
        Image.new("RGB", (8, 8)).save(name)
    names = [name.partition("/")[0] for name in cells]
    rows = rows_of(ckpt, tmp_path / "x.csv", *names)
    assert [row["file"] for row in rows] == list(cells.values())
    capsys.readouterr()
    predict([*ckpt, *names[:2]])
    table = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in table] == [
        "file",
        "caf\\udce9.png",
        "two\\nlines.png",
    ]
    Path("bad\nname.png").write_bytes(b"")
    error = fails(capsys, 1, lambda: predict([*ckpt, "bad\nname.png"]))
    assert error == "error: cannot read bad\\nname.png: not an image, or cut short"


class OwnTask(PlainModule):
    """Somebody else's module that says what its outputs mean."""

    task = "regression"


class WithClasses(PlainData):
    """Somebody else's data with names for its classes."""

    classes = ["low", "high"]


def test_a_plain_module_or_its_data_may_say_what_the_outputs_mean() -> None:
    assert task_of(OwnTask(), WithClasses()) == "regression"
    assert task_of(PlainModule(), WithClasses()) == "multiclass"
    assert task_of(PlainModule(), PlainData()) is None
