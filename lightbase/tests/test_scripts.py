"""evaluate.py, predict.py and export.py, in process and as a user starts them."""

import csv
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import programs
import pytest
import torch
from example.classifier import Classifier
from example.models.mlp import MLP
from lightning import LightningDataModule, LightningModule
from paths import ACCELERATOR, HERE, fails, script
from PIL import Image
from test_prediction_figures import flags_of, outputs_of
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightbase.commands.arguments import checkpoint_file
from lightbase.core.data import BaseDataModule
from lightbase.core.errors import UserError
from lightbase.core.folder import write_whole
from lightbase.core.resume import load_run
from lightbase.core.run import main
from lightbase.extras.image_folder import read_image

STRIPES = [f"stripes_{i}" for i in range(4)]
evaluate, predict, export = (
    script(name).main for name in ("evaluate", "predict", "export")
)


@pytest.fixture
def run(trained: Any) -> tuple[Path, dict[str, Any]]:
    """A run's folder, which no test changes, and its metrics."""
    return trained()  # type: ignore[no-any-return]


@pytest.fixture
def ckpt(run: tuple[Path, Any]) -> list[str]:
    """The flag that names the run's checkpoint."""
    return ["--ckpt_path", str(run[0] / "checkpoints" / "best.ckpt")]


@pytest.fixture
def black(tmp_path: Path) -> str:
    Image.new("RGB", (5, 5)).save(tmp_path / "black.png")
    return str(tmp_path / "black.png")


def best_of(tmp_path: Path) -> list[str]:
    """As ckpt, of a run that the test has trained."""
    path = tmp_path / "tiny" / "version_0" / "checkpoints" / "best.ckpt"
    return ["--ckpt_path", str(path)]


# evaluate.py


def test_evaluate_returns_the_numbers_of_the_training_from_any_folder_and_writes_nothing(
    run, ckpt, tmp_path, monkeypatch, capsys
):
    before = sorted(run[0].rglob("*"))
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    evaluate(ckpt)
    *_, header, _, row, _, last = capsys.readouterr().out.splitlines()
    metrics = json.loads(last)
    assert metrics == {
        key: value for key, value in run[1].items() if key.startswith("test/")
    }
    assert (header.split(), row.split()[0]) == (["metric", "value"], "test/acc")
    assert row.split()[1] == f"{metrics['test/acc']:.4f}"
    assert len(str(metrics["test/loss"])) <= 12, "float32 holds no more digits"
    assert set(metrics) == {"test/acc", "test/loss", "test/num_samples"}
    assert sorted(run[0].rglob("*")) == before
    assert not list(tmp_path.iterdir())


def test_evaluate_takes_flags_of_data_and_trainer_only(
    run: Any, ckpt: Any, capsys: Any
) -> None:
    metrics = evaluate(
        [*ckpt, "--data.batch_size", "7", "--trainer.precision", "64-true"]
    )
    assert metrics["test/acc"] == pytest.approx(run[1]["test/acc"])
    assert metrics["test/loss"] == pytest.approx(run[1]["test/loss"], rel=1e-5)
    limited = evaluate([*ckpt, "--trainer.limit_test_batches", "1"])
    assert limited["test/num_samples"] == 16
    assert "--model.lr" in fails(
        capsys, 2, lambda: evaluate([*ckpt, "--model.lr", "1"])
    )
    wrong = [*ckpt, "--data.batchsize", "1"]
    assert "batch_size?" in fails(capsys, 2, lambda: evaluate(wrong))


class Draws(Classifier):
    """Draws random numbers in its test, as a VAE or a BootStrapper does."""

    def test_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        numbers = (torch.rand(()), np.random.rand(), random.random())
        self.log_dict({f"test/{i}": float(number) for i, number in enumerate(numbers)})


class Silent(Classifier):
    def test_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        pass


def test_evaluate_draws_the_random_numbers_of_the_training(train, tmp_path):
    metrics = train(
        "--model test_scripts.Draws --data small.Augmented --trainer.max_epochs 1"
    )
    expected = {name: value for name, value in metrics.items() if name[:5] == "test/"}
    assert len(expected) == 3
    assert evaluate(best_of(tmp_path)) == expected


def test_a_test_that_logs_nothing_says_so(train, tmp_path, capsys):
    train("--model test_scripts.Silent --trainer.max_epochs 1")
    line = "No test: test_step of Silent logs nothing with self.track or self.log"
    assert f"\n{line}\n" in capsys.readouterr().out
    assert fails(capsys, 1, lambda: evaluate(best_of(tmp_path))) == f"error: {line}"


def test_64_true_is_float64_in_a_resume_a_test_and_an_exported_file(train, tmp_path):
    flags = "--trainer.precision 64-true --trainer.limit_test_batches 2 --trainer.max_epochs"
    metrics = train(flags, 4, "--name straight")
    train(flags, 2, "--name resumed")
    train(flags, 4, "--name resumed --ckpt_path last")
    runs = [
        tmp_path / name / "version_0" / "checkpoints"
        for name in ("straight", "resumed")
    ]
    weights = [
        torch.load(run / "last.ckpt", weights_only=True)["state_dict"] for run in runs
    ]
    assert weights[0]["net.layers.1.weight"].dtype == torch.float64
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    flag = ["--ckpt_path", str(runs[0] / "best.ckpt")]
    assert evaluate(flag) == {
        name: metrics[name] for name in metrics if name[:5] == "test/"
    }
    net = torch.export.load(export([*flag, "--format", "pt2"])).module()
    images = torch.randint(256, (5, 3, 8, 8), dtype=torch.uint8)
    loaded: Any = load_run(Path(flag[1]))
    with torch.no_grad():
        inputs = loaded.datamodule.normalize(images).double()
        expected = loaded.model.eval().net(inputs).softmax(1)
    assert net(images).dtype == torch.float64
    torch.testing.assert_close(net(images), expected, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("main", [evaluate, predict, export])
def test_mistakes_common_to_the_scripts(main, tmp_path, capsys):
    def error(status: int, *args: str) -> str:
        image = ["x.png"] if main is predict else []
        return fails(capsys, status, lambda: main([*args, *image]))

    assert "none.ckpt" in error(1, "--ckpt_path", str(tmp_path / "none.ckpt"))
    assert "--ckpt_path" in error(2)
    assert "--ckpt" in error(2, "--ckpt", "x", "--ckpt_path", __file__)


def test_the_name_of_a_run_stands_for_its_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr("lightbase.core.folder.Project.logs", tmp_path / "logs")
    files = {"mlp/version_2": "best", "mlp/version_10": "best", "cnn/version_0": "last"}
    for time, (name, which) in enumerate(files.items()):
        (tmp_path / "logs" / name / "checkpoints").mkdir(parents=True)
        (tmp_path / "logs" / name / "checkpoints" / f"{which}.ckpt").touch()
        os.utime(
            tmp_path / "logs" / name / "checkpoints" / f"{which}.ckpt", (time, time)
        )
    typed = ["mlp/version_2", "best", "last", "mlp", f"{tmp_path}/logs/mlp/version_10"]
    paths = map(checkpoint_file, typed)
    assert [
        path.parent.parent.name[8:] + path.stem for path in paths if path.is_file()
    ] == [*("2best", "10best", "0last", "10best", "10best")]
    with pytest.raises(
        UserError, match="nor a run with this checkpoint; did you mean mlp"
    ):
        checkpoint_file("mpl")


# export.py --format pth, and how files are written


def test_exported_weights_give_the_same_outputs_in_plain_torch(
    ckpt: Any, tmp_path: Path
) -> None:
    output = tmp_path / "tiny.pth"
    assert export([*ckpt, "--format", "pth", "--output", str(output)]) == output
    net = MLP([192, 16, 4])
    net.load_state_dict(torch.load(output, weights_only=True))
    x = torch.rand(5, 3, 8, 8)
    model: Any = load_run(Path(ckpt[1])).model
    assert torch.equal(net(x), model.net.eval()(x))
    assert export(ckpt) == Path(ckpt[1]).with_suffix(".pth")


@pytest.mark.linux
def test_nothing_is_written_through_a_link_or_into_a_named_pipe(tmp_path: Path) -> None:
    target = tmp_path / "elsewhere" / "file"
    target.parent.mkdir()
    target.write_text("mine")
    (tmp_path / "link").symlink_to(target)
    (tmp_path / "folder").symlink_to(target.parent)
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "folder").symlink_to(target.parent)
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "folder/file", "folder/new", "deep/folder/file", "pipe"):
        with pytest.raises(UserError, match=r"through a link|no regular file"):
            write_whole(tmp_path / name, "theirs")
    # what a crash may have left
    (tmp_path / ".new.part").symlink_to(target)
    write_whole(tmp_path / "new", "written")
    assert (tmp_path / "new").read_text() == "written"
    assert target.read_text() == "mine"
    assert [*target.parent.iterdir()] == [target]


@pytest.mark.linux
def test_a_pipe_of_the_shell_is_written_in_place() -> None:
    reader, writer = os.pipe()  # as the shell's >(command)
    write_whole(Path(f"/dev/fd/{writer}"), "content")
    assert os.read(reader, 99) == b"content"
    for end in (reader, writer):
        os.close(end)


# predict.py


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
        assert errors.count(name) == 1
    rows = list(csv.DictReader(output.read_text().splitlines()))
    assert sorted(Path(row["file"]).name for row in rows) == readable
    for row in rows:
        assert row["class"] in STRIPES
        assert 0.25 <= float(row["probability"]) <= 1


def test_predict_agrees_with_the_network(
    ckpt: Any, tmp_path: Path, capsys: Any
) -> None:
    loaded: Any = load_run(Path(ckpt[1]))
    loaded.datamodule.setup("test")
    inputs = loaded.datamodule.splits["test"].inputs[:30]
    files = [str(tmp_path / f"{i:02d}.png") for i in range(30)]
    for file, image in zip(files, inputs, strict=True):
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(file)
    with torch.no_grad():
        expected = loaded.model.eval()(loaded.datamodule.normalize(inputs)).softmax(1)
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


class PlainImages(LightningDataModule):
    """Images of a plain data module: nobody knows what its loaders do to a file's
    pixels."""

    def train_dataloader(self) -> DataLoader:
        images = torch.rand(32, 3, 8, 8)
        return DataLoader(TensorDataset(images, torch.arange(32) % 4), batch_size=8)

    val_dataloader = train_dataloader


def test_predict_refuses_data_that_files_cannot_replace(train, tmp_path, capsys, black):
    limits = "--trainer.max_epochs 1 --trainer.limit_test_batches 0"
    train("--data", "small.Points", "--model.net.sizes", "[10,2]", limits)
    error = fails(capsys, 1, lambda: predict([*best_of(tmp_path), black]))
    assert "Points has no read_inputs(path), nor uint8 images" in error
    train(
        "--data test_scripts.PlainImages --model.net.sizes [192,4] --name plain", limits
    )
    path = tmp_path / "plain" / "version_0" / "checkpoints" / "best.ckpt"
    error = fails(capsys, 2, lambda: predict(["--ckpt_path", str(path), black]))
    assert "files need a BaseDataModule, which PlainImages is not" in error
    predict(
        [
            "--ckpt_path",
            str(path),
            "--split",
            "val",
            "--output",
            str(tmp_path / "x.npz"),
        ]
    )
    assert np.load(tmp_path / "x.npz")["prediction"].shape == (32, 4)


def test_predict_takes_a_split_in_its_order_with_the_true_classes(ckpt, tmp_path):
    data: Any = load_run(Path(ckpt[1])).datamodule
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
        ckpt = [
            "--ckpt_path",
            str(tmp_path / task / "version_0" / "checkpoints" / "best.ckpt"),
        ]
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
    train(flags_of("segmentation", "Parts"), "--model.task null --name parts")
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


class Plain(LightningModule):
    """A module of Lightning's alone, with Lightning's own predict_step."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.scale.sum()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/acc", 0.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * x.mean((2, 3))[:, :2]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


class PlainWithStep(Plain):
    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0]) + 1


@pytest.mark.parametrize(("model", "a"), [("Plain", 0.1), ("PlainWithStep", 1.1)])
def test_predict_goes_through_the_predict_step_of_any_module(
    tmp_path, capsys, model, a
):
    config = tmp_path / "plain.yaml"
    config.write_text(
        f"model: {{class_path: test_scripts.{model}}}\n"
        "data: {class_path: test_scripts.Halved, init_args: {batch_size: 8}}\n"
        f"trainer: {{max_epochs: 1, accelerator: {ACCELERATOR}, default_root_dir: {tmp_path}, "
        "log_every_n_steps: 1}\nstep_timer: false\ndevice_monitor: false\n"
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


def test_grey_white_transparent_and_turned_images(tmp_path: Path) -> None:
    for white, dtype in (
        (65535, "uint16"),
        (1, "float32"),
        (65535, "int32"),
        (255, "uint8"),
    ):
        values = np.full((8, 8), white, dtype=dtype)
        values[:, :4] = values[0, 0] / 2
        Image.fromarray(values).save(tmp_path / "x.tiff")
        pixels = read_image(tmp_path / "x.tiff", (1, 8, 8))[0]
        assert pixels[0, 7] == 255
        assert abs(int(pixels[0, 0]) - 127) <= 1
    Image.new("RGBA", (8, 8), (0, 0, 0, 0)).save(tmp_path / "clear.png")
    assert (read_image(tmp_path / "clear.png", (3, 8, 8)) == 255).all()
    photo = Image.new("L", (16, 8))
    photo.paste(255, (0, 0, 8, 8))  # left half white
    exif = photo.getexif()
    exif[0x0112] = 6  # to be turned by 90 degrees clockwise
    photo.save(tmp_path / "photo.png", exif=exif)
    upright = read_image(tmp_path / "photo.png", (1, 16, 8))[0]
    assert upright[0].min() > 200 > 50 > upright[-1].max()


# all scripts


@pytest.mark.slow
def test_the_scripts_run_as_programs(
    run: Any, ckpt: Any, black: str, tmp_path: Path
) -> None:
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    for name, *args, words in (
        ("evaluate.py", f'"test/acc": {run[1]["test/acc"]}'),
        ("export.py", "--output", "x.pth", "MLP, weights: x.pth"),
        ("predict.py", black, "black.png"),
    ):
        root = ["--trainer.default_root_dir", str(Path(ckpt[1]).parents[3])]
        command = [sys.executable, str(HERE / "scripts" / name), *ckpt, *args, *root]
        with programs.start(command, cwd=tmp_path, **pipes) as process:
            output, error = process.communicate()
        assert (process.returncode, error) == (0, "")
        assert words in output


@pytest.mark.parametrize(("status", "requeued"), [(0, False), (143, True), (1, False)])
@pytest.mark.linux
def test_the_slurm_script_goes_on_in_its_own_run_and_puts_a_stopped_job_back(
    tmp_path, status, requeued
):
    """With stand-ins for srun and scontrol, which write down how they are called."""
    for name, end in (("srun", status), ("scontrol", 0)):
        (tmp_path / name).write_text(
            f'#!/bin/sh\necho {name} "$@" >> calls\nexit {end}\n'
        )
        (tmp_path / name).chmod(0o755)
    environment = os.environ | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "7",
    }
    environment["SLURM_CPUS_PER_TASK"] = "4"
    command = ["bash", str(HERE / "scripts" / "slurm.sh"), "--config", "a b.yaml"]
    assert subprocess.run(command, cwd=tmp_path, env=environment).returncode == status
    (tmp_path / "logs" / "slurm_7" / "version_0" / "checkpoints").mkdir(parents=True)
    (tmp_path / "logs" / "slurm_7" / "version_0" / "checkpoints" / "last.ckpt").touch()
    assert subprocess.run(command, cwd=tmp_path, env=environment).returncode == status
    calls = (tmp_path / "calls").read_text().splitlines()
    started = "srun --kill-on-bad-exit=1 --cpus-per-task=4 python scripts/train.py"
    started += " --config a b.yaml --name slurm_7"
    back = ["scontrol requeue 7"] * requeued
    assert calls == [started, *back, f"{started} --ckpt_path last", *back]


@pytest.mark.parametrize(
    ("name", "first"),
    [("evaluate", "load_run"), ("predict", "load_run"), ("tune", "parse")],
)
@pytest.mark.linux
def test_ctrl_c_ends_a_script_in_one_line(monkeypatch, capsys, name, first):
    module = script(name)
    monkeypatch.setattr(
        module, first, lambda *_, **__: signal.raise_signal(signal.SIGINT)
    )
    with pytest.raises(SystemExit) as caught:
        module.main([] if name == "tune" else ["--ckpt_path", __file__])
    assert caught.value.code == 130
    assert capsys.readouterr().err == "Stopped by Ctrl-C\n"
