"""evaluate.py, predict.py and export.py, in process and, once each, as a user starts them."""

import ast
import csv
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import programs
import pytest
import torch
from example.models.mlp import MLP
from lightning import LightningDataModule, LightningModule
from paths import HERE, TINY, script
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightbase.data.images import read_image
from lightbase.data.module import BaseDataModule
from lightbase.errors import UserError
from lightbase.folder import open_stream, write_whole
from lightbase.resume.load import load_run
from lightbase.run.train import main

Train = Callable[..., dict[str, Any]]


evaluate, predict, export = (script(name).main for name in ("evaluate", "predict", "export"))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A run's folder, which no test changes, and its metrics."""
    root = tmp_path_factory.mktemp("run")
    metrics = main(
        ["--config", TINY, "--trainer.default_root_dir", str(root), "--trainer.max_epochs", "3"]
    )
    return root / "tiny" / "version_0", metrics


def best(run: tuple[Path, Any]) -> str:
    return str(run[0] / "checkpoints" / "best.ckpt")


def test_evaluate_returns_the_numbers_of_the_training(run: Any, capsys: Any) -> None:
    capsys.readouterr()
    evaluate(["--ckpt_path", best(run)])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found == {key: value for key, value in run[1].items() if key.startswith("test/")}
    assert set(found) == {"test/acc", "test/loss", "test/num_samples"}


def test_evaluate_takes_flags_of_data_and_trainer(run: Any) -> None:
    found = evaluate(
        ["--ckpt_path", best(run), "--data.batch_size", "7", "--trainer.precision", "64-true"]
    )
    assert found["test/acc"] == pytest.approx(run[1]["test/acc"])
    assert found["test/loss"] == pytest.approx(run[1]["test/loss"], rel=1e-5)
    assert (
        evaluate(["--ckpt_path", best(run), "--trainer.limit_test_batches", "1"])[
            "test/num_samples"
        ]
        == 16
    )


def test_evaluate_keeps_what_changes_the_number_and_not_the_devices_of_the_run(
    train: Train, tmp_path: Path
) -> None:
    metrics = train(
        "--trainer.precision bf16-mixed --trainer.limit_test_batches 2 --data.batch_size 5"
    )
    found = evaluate(
        ["--ckpt_path", str(tmp_path / "tiny" / "version_0" / "checkpoints" / "best.ckpt")]
    )
    assert found == {key: value for key, value in metrics.items() if key.startswith("test/")}


def test_evaluate_works_from_any_folder_and_writes_nothing(
    run: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    before = sorted(run[0].rglob("*"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    evaluate(["--ckpt_path", best(run)])
    assert sorted(run[0].rglob("*")) == before
    assert not list((tmp_path / "elsewhere").iterdir())


def fails(capsys: Any, status: int, run: Callable[[], Any]) -> str:
    with pytest.raises(SystemExit) as caught:
        run()
    error = capsys.readouterr().err.rstrip("\n")
    assert caught.value.code == status, error
    assert 1 <= len(error.splitlines()) <= 2, error
    return error


@pytest.mark.parametrize("main", [evaluate, predict, export])
def test_mistakes_common_to_the_scripts(
    main: Callable[..., Any], tmp_path: Path, capsys: Any
) -> None:
    image = ["x.png"] if main is predict else []
    assert "none.ckpt" in fails(
        capsys, 1, lambda: main(["--ckpt_path", str(tmp_path / "none.ckpt"), *image])
    )
    assert "--ckpt_path" in fails(capsys, 2, lambda: main([*image]))
    assert "--ckpt" in fails(capsys, 2, lambda: main(["--ckpt", "x", "--ckpt_path", "y", *image]))


def test_evaluate_refuses_other_flags(run: Any, capsys: Any) -> None:
    assert "--model.lr" in fails(
        capsys, 2, lambda: evaluate(["--ckpt_path", best(run), "--model.lr", "1"])
    )
    wrong = ["--ckpt_path", best(run), "--data.batchsize", "1"]
    assert "batch_size?" in fails(capsys, 2, lambda: evaluate(wrong))


def test_exported_weights_give_the_same_outputs_in_plain_torch(run: Any, tmp_path: Path) -> None:
    output = tmp_path / "tiny.pth"
    assert export(["--ckpt_path", best(run), "--format", "pth", "--output", str(output)]) == output
    net = MLP([192, 16, 4])
    net.load_state_dict(torch.load(output, weights_only=True))
    checkpoint = torch.load(best(run), weights_only=True)["state_dict"]
    reference = MLP([192, 16, 4])
    reference.load_state_dict(
        {name.removeprefix("net."): value for name, value in checkpoint.items()}
    )
    x = torch.rand(5, 3, 8, 8)
    assert torch.equal(net(x), reference(x))
    assert export(["--ckpt_path", best(run)]) == run[0] / "checkpoints" / "best.pth"


def test_export_never_overwrites_the_checkpoint(run: Any, capsys: Any) -> None:
    before = Path(best(run)).read_bytes()
    command = ["--ckpt_path", best(run), "--output", best(run), "--format", "pth"]
    assert "checkpoint itself" in fails(capsys, 2, lambda: export(command))
    assert Path(best(run)).read_bytes() == before


def test_a_full_disk_leaves_earlier_predictions_whole(
    run: Any, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    output = tmp_path / "predictions.csv"
    output.write_text("earlier")
    Image.new("RGB", (5, 5)).save(tmp_path / "black.png")

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    command = ["--ckpt_path", best(run), str(tmp_path / "black.png"), "--output", str(output)]
    assert "No space left" in fails(capsys, 1, lambda: predict(command))
    assert output.read_text() == "earlier"
    assert not list(tmp_path.glob(".*.part"))


@pytest.mark.linux
def test_a_link_stays_and_its_target_is_written(run: Any, tmp_path: Path, capsys: Any) -> None:
    link, target = tmp_path / "link.pth", tmp_path / "elsewhere" / "weights.pth"
    target.parent.mkdir()
    link.symlink_to(target)  # which is not there yet
    for _ in range(2):
        export(["--ckpt_path", best(run), "--output", str(link)])
        assert link.readlink() == target
        assert torch.load(target, weights_only=True)
        assert list(target.parent.iterdir()) == [target]
        target.write_text("earlier")
    shutil.rmtree(target.parent)
    error = fails(capsys, 1, lambda: export(["--ckpt_path", best(run), "--output", str(link)]))
    assert "link.pth cannot be written: No such file" in error


@pytest.mark.linux
@pytest.mark.parametrize("kind", ["named pipe", "process substitution", "device"])
def test_what_is_no_regular_file_is_written_in_place(run: Any, tmp_path: Path, kind: str) -> None:
    output = tmp_path / "output"
    if kind == "device":
        try:
            os.mknod(output, stat.S_IFCHR | 0o666, os.makedev(1, 3))  # as /dev/null
            output.write_text("")
        except PermissionError:
            pytest.skip("only root makes devices")
        reader = os.open(os.devnull, os.O_RDONLY)
    elif kind == "named pipe":
        os.mkfifo(output)
        reader = os.open(output, os.O_RDONLY | os.O_NONBLOCK)
    else:
        reader, writer = os.pipe()
        output = Path(f"/dev/fd/{writer}")
    before = stat.S_IFMT(output.stat().st_mode)
    Image.new("RGB", (5, 5)).save(tmp_path / "black.png")
    predict(["--ckpt_path", best(run), str(tmp_path / "black.png"), "--output", str(output)])
    assert stat.S_IFMT(output.stat().st_mode) == before
    assert os.read(reader, 99).startswith(b"file,class" if kind != "device" else b"")
    os.close(reader)
    if kind == "process substitution":
        with pytest.raises(UserError, match="Broken pipe"):
            write_whole(output, "x")
        os.close(writer)


@pytest.mark.linux
def test_an_open_file_goes_on_where_it_is(capfd: pytest.CaptureFixture[str]) -> None:
    print("before", flush=True)
    write_whole(Path("/dev/fd/1"), "content\n")
    stream = open_stream(Path("/dev/stdout"))
    assert stream is not None
    with stream:
        stream.write(b"more\n")
    print("after", flush=True)
    assert capfd.readouterr().out == "before\ncontent\nmore\nafter\n"


def test_export_refuses_a_folder_that_is_not_there(run: Any, capsys: Any) -> None:
    assert "nowhere" in fails(
        capsys, 2, lambda: export(["--ckpt_path", best(run), "--output", "nowhere/x.pth"])
    )


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """A folder with an image of each mode, in several sizes, and one of them cut short."""
    folder = tmp_path / "images"
    (folder / "below").mkdir(parents=True)
    rng = np.random.default_rng(0)
    for i, mode in enumerate(["L", "RGB", "RGBA", "P", "1", "LA", "CMYK", "F", "I"]):
        size = (11 + 7 * i, 40 - 3 * i, 3)
        suffix = "tiff" if mode in ("CMYK", "F", "I") else "png"
        Image.fromarray(rng.integers(0, 256, size, dtype=np.uint8)).convert(mode).save(
            folder / f"{mode}.{suffix}"
        )
    Image.fromarray(rng.integers(0, 2**16, (9, 9), dtype=np.uint16)).save(
        folder / "below" / "deep.png"
    )
    (folder / "broken.png").write_bytes((folder / "RGB.png").read_bytes()[:100])
    (folder / "notes.txt").write_text("no image")
    return folder


def test_predict_reports_what_it_cannot_read_and_classifies_the_rest(
    run: Any, images: Path, tmp_path: Path, capsys: Any
) -> None:
    output = tmp_path / "predictions.csv"
    command = [
        "--ckpt_path",
        best(run),
        str(images),
        str(images / "notes.txt"),
        "none.png",
        "--output",
        str(output),
    ]
    with pytest.raises(SystemExit) as caught:
        predict(command)
    assert caught.value.code == 1
    errors = capsys.readouterr().err
    for name in ("broken.png", "notes.txt", "none.png"):
        assert errors.count(name) == 1
    rows = list(csv.DictReader(output.read_text().splitlines()))
    assert sorted(Path(row["file"]).name for row in rows) == sorted(
        path.name for path in images.rglob("*.*") if path.name not in ("broken.png", "notes.txt")
    )
    for row in rows:
        assert row["class"] in {f"stripes_{i}" for i in range(4)}
        assert 0.25 <= float(row["probability"]) <= 1


def test_predict_agrees_with_the_network_on_images_of_the_test_set(
    run: Any, tmp_path: Path, capsys: Any
) -> None:
    loaded = load_run(Path(best(run)))
    loaded.datamodule.setup("test")
    inputs = loaded.datamodule.splits["test"].inputs[:30]
    files = []
    for i, image in enumerate(inputs):
        files.append(str(tmp_path / f"{i:02d}.png"))
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(files[-1])
    with torch.no_grad():
        expected = loaded.model.eval()(loaded.datamodule.normalize(inputs)).softmax(1).max(1)
    capsys.readouterr()
    predict(["--ckpt_path", best(run), *files])
    table = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert [row[1] for row in table] == [f"stripes_{i}" for i in expected.indices.tolist()]
    assert [float(row[2]) for row in table] == pytest.approx(expected.values.tolist(), abs=1e-4)


class PlainImages(LightningDataModule):
    """Images of a plain data module: nobody knows what its loaders do to a file's pixels."""

    def train_dataloader(self) -> DataLoader:
        return DataLoader(
            TensorDataset(torch.rand(32, 3, 8, 8), torch.arange(32) % 4), batch_size=8
        )

    val_dataloader = train_dataloader


class FloatImages(BaseDataModule):
    image_shape = (3, 8, 8)

    def load(self, split: str) -> Any:  # type: ignore[override]
        return torch.rand(32, 3, 8, 8), torch.arange(32.0)


@pytest.mark.parametrize(
    ("data", "sizes", "model"),
    [
        ("small.Points", "[10,2]", "Classifier"),
        ("test_scripts.PlainImages", "[192,4]", "Classifier"),
        ("test_scripts.FloatImages", "[192,1]", "Regressor"),
    ],
)
def test_predict_refuses_data_for_which_no_file_can_stand(
    train: Train, tmp_path: Path, capsys: Any, data: str, sizes: str, model: str
) -> None:
    model = f"example.{model.lower()}.{model}"
    limits = ("--trainer.max_epochs", 1, "--trainer.limit_test_batches", 0)
    train("--model", model, "--data", data, "--model.net.sizes", sizes, *limits)
    path = tmp_path / "tiny" / "version_0" / "checkpoints" / "best.ckpt"
    error = fails(capsys, 1, lambda: predict(["--ckpt_path", str(path), "x.png"]))
    assert (
        f"trained on {data.rpartition('.')[2]}: how an image file becomes such an input is "
        "not known" in error
    )
    assert "BaseDataModule" in error


class Halved(BaseDataModule):
    """uint8 images of a Dataset, without image_shape."""

    classes = ["a", "b"]

    def load(self, split: str) -> Any:  # type: ignore[override]
        return TensorDataset(
            torch.randint(256, (40, 3, 8, 8), dtype=torch.uint8), torch.arange(40) % 2
        )

    def normalize(self, inputs: Tensor) -> Tensor:
        return inputs / 510


class Plain(LightningModule):
    """A module of Lightning's alone: its predict_step is Lightning's own, or one that takes
    (inputs, targets)."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0]).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/acc", 0.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * x.mean((2, 3))[:, :2]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


class PlainWithStep(Plain):
    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0]) + 1


class Blind(Plain):
    """Has neither predict_step nor forward."""

    forward = LightningModule.forward  # type: ignore[assignment]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.scale.sum()


def trained_on_halved(tmp_path: Path, model: str) -> str:
    """The last checkpoint of a model of this file."""
    config = tmp_path / "plain.yaml"
    data = "{class_path: test_scripts.Halved, init_args: {batch_size: 8}}"
    trainer = (
        f"{{max_epochs: 1, accelerator: cpu, log_every_n_steps: 1, default_root_dir: {tmp_path}}}"
    )
    config.write_text(
        f"model: {{class_path: test_scripts.{model}}}\ndata: {data}\ntrainer: {trainer}\n"
    )
    main(["--config", str(config), "--step_timer", "false", "--device_monitor", "false"])
    return str(next(tmp_path.rglob("last.ckpt")))


@pytest.mark.parametrize(("model", "first"), [("Plain", 0.1), ("PlainWithStep", 1.1)])
def test_predict_goes_through_the_predict_step_of_any_module(
    tmp_path: Path, capsys: Any, model: str, first: float
) -> None:
    Image.new("RGB", (5, 5), (51, 102, 0)).save(tmp_path / "x.png")
    path = trained_on_halved(tmp_path, model)
    predict(["--ckpt_path", path, str(tmp_path / "x.png"), "--top_k", "2"])
    cells = capsys.readouterr().out.splitlines()[-1].split()
    assert cells[1:] == ["b", f"{first + 0.1:.4f}", "a", f"{first:.4f}"]


def test_predict_with_a_module_that_cannot(tmp_path: Path, capsys: Any) -> None:
    path = trained_on_halved(tmp_path, "Blind")
    assert "Blind has neither predict_step nor forward" in fails(
        capsys, 1, lambda: predict(["--ckpt_path", path, "x"])
    )


def rows_of(run: Any, output: Path, *args: object) -> list[dict[str, str]]:
    predict(["--ckpt_path", best(run), *map(str, args), "--output", str(output)])
    with output.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_predict_names_the_k_likeliest_and_all_probabilities(
    run: Any, tmp_path: Path, capsys: Any
) -> None:
    images = [tmp_path / f"{i}.png" for i in range(5)]
    for i, image in enumerate(images):
        Image.new("RGB", (8, 8), (40 * i, 250 - 40 * i, 99)).save(image)
    names = [f"stripes_{i}" for i in range(4)]
    usual = rows_of(run, tmp_path / "1.csv", *images)
    assert list(usual[0]) == ["file", "class", "probability"]
    rows = rows_of(run, tmp_path / "2.csv", *images, "--top_k", 3, "--probabilities")
    pairs = ["class", "probability", "class_2", "probability_2", "class_3", "probability_3"]
    assert list(rows[0]) == ["file", *pairs, *(f"probability_{name}" for name in names)]
    for row, one in zip(rows, usual, strict=True):
        assert {key: row[key] for key in one} == one
        found = {name: row[f"probability_{name}"] for name in names}
        assert sum(map(float, found.values())) == pytest.approx(1, abs=1e-3)
        ordered = sorted(found.items(), key=lambda item: -float(item[1]))[:3]
        assert [(row[a], row[b]) for a, b in zip(pairs[::2], pairs[1::2], strict=True)] == ordered
    for wrong in ("0", "5", "-1"):
        command = ["--ckpt_path", best(run), str(images[0]), "--top_k", wrong]
        assert f"--top_k {wrong}: SyntheticImages has 4 classes" in fails(
            capsys, 2, lambda c=command: predict(c)
        )


def test_predict_writes_any_file_name(
    run: Any, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    names = [
        os.fsdecode(b"caf\xe9.png"),
        "two\nlines.png",
        "=1+1.png",
        "-x.png",
        "@x.png",
        "photos/=2.png",
        "n\u00e9.png",
    ]
    (tmp_path / "photos").mkdir()
    for name in names:
        Image.new("RGB", (8, 8)).save(name)
    (tmp_path / "photos" / "._=2.png").write_bytes(b"of macOS")
    (tmp_path / "photos" / ".thumbs").mkdir()
    Image.new("RGB", (8, 8)).save("photos/.thumbs/1.png")
    rows = rows_of(
        run, tmp_path / "x.csv", *names[:3], f"./{names[3]}", *names[4:5], "photos", names[6]
    )
    expected = [
        "caf\\udce9.png",
        "two\nlines.png",
        "'=1+1.png",
        "'-x.png",
        "'@x.png",
        "photos/=2.png",
        "n\u00e9.png",
    ]
    assert [row["file"] for row in rows] == expected
    assert all(row["class"].startswith("stripes_") for row in rows)
    capsys.readouterr()
    predict(["--ckpt_path", best(run), *names[:2]])
    table = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in table] == ["file", "caf\\udce9.png", "two\\nlines.png"]
    Path("bad\nname.png").write_bytes(b"")
    with pytest.raises(SystemExit):
        predict(["--ckpt_path", best(run), "bad\nname.png"])
    assert capsys.readouterr().err == "cannot read bad\\nname.png: not an image, or cut short\n"


def test_numbers_are_no_formulas() -> None:
    as_cell = script("tables").for_spreadsheet
    for plain in ("-0.5", "+1", "-1e-05", "-inf", "nan", "cat", "photos/=1.png", "-1"):
        assert as_cell(plain) == plain
    for formula in ("=1", "+cmd|x", "-2+3+cmd|x", "@SUM(A1)", "\t=1"):
        assert as_cell(formula) == f"'{formula}"


@pytest.mark.parametrize("mode", ["I;16", "F", "I", "L"])
def test_white_stays_white_and_grey_grey_in_every_depth(tmp_path: Path, mode: str) -> None:
    white = {"I;16": 65535, "F": 1.0, "I": 65535, "L": 255}[mode]
    values = np.full(
        (8, 8),
        white,
        dtype={"I;16": np.uint16, "F": np.float32, "I": np.int32, "L": np.uint8}[mode],
    )
    values[:, :4] = values[0, 0] / 2
    Image.fromarray(values).save(tmp_path / "x.tiff")
    pixels = read_image(tmp_path / "x.tiff", (1, 8, 8))
    assert pixels.shape == (1, 8, 8)
    assert pixels[0, 0, 7] == 255
    assert abs(int(pixels[0, 0, 0]) - 127) <= 1


def test_a_transparent_image_lies_on_white_and_a_photo_is_turned_upright(tmp_path: Path) -> None:
    Image.new("RGBA", (8, 8), (0, 0, 0, 0)).save(tmp_path / "clear.png")
    assert (read_image(tmp_path / "clear.png", (3, 8, 8)) == 255).all()
    photo = Image.new("L", (16, 8))
    photo.paste(255, (0, 0, 8, 8))  # left half white
    exif = photo.getexif()
    exif[0x0112] = 6  # to be turned by 90 degrees clockwise
    photo.save(tmp_path / "photo.png", exif=exif)
    upright = read_image(tmp_path / "photo.png", (1, 16, 8))
    assert upright[0, 0].min() > 200
    assert upright[0, -1].max() < 50


def test_predict_writes_the_numbers_of_a_regression(train: Train, tmp_path: Path) -> None:
    data = ("--data", "example.data.discs.Discs", "--data.num_train", 100, "--data.num_test", 30)
    train(
        "--model example.regressor.Regressor --model.net.sizes [1024,1]",
        *data,
        "--trainer.max_epochs 1",
    )
    path = tmp_path / "tiny" / "version_0" / "checkpoints" / "best.ckpt"
    Image.new("L", (32, 32), 200).save(tmp_path / "disc.png")
    predict(
        [
            "--ckpt_path",
            str(path),
            str(tmp_path / "disc.png"),
            "--output",
            str(tmp_path / "numbers.csv"),
        ]
    )
    (row,) = csv.DictReader((tmp_path / "numbers.csv").read_text().splitlines())
    loaded = load_run(path)
    image = loaded.datamodule.normalize(torch.full((1, 1, 32, 32), 200, dtype=torch.uint8))
    with torch.no_grad():
        assert float(row["prediction"]) == pytest.approx(
            loaded.model.eval()(image).item(), rel=1e-4
        )


@pytest.mark.slow
def test_the_scripts_run_as_programs(run: Any, tmp_path: Path) -> None:
    def shown(name: str, *args: str) -> str:
        command = [sys.executable, str(HERE / "scripts" / name), "--ckpt_path", best(run), *args]
        with programs.start(
            command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as process:
            output, error = process.communicate()
        assert process.returncode == 0, error
        assert error == ""
        return output

    assert json.loads(shown("evaluate.py").splitlines()[-1])["test/acc"] == run[1]["test/acc"]
    shown("export.py", "--output", "x.pth")
    assert (tmp_path / "x.pth").exists()
    Image.new("RGB", (5, 5)).save(tmp_path / "black.png")
    assert "black.png" in shown("predict.py", "black.png")


PREPARE = ["--config", TINY, "--data", "small.Points", "--data.data_dir"]


def test_prepare_data_says_what_is_there_and_needs_no_device(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script("prepare_data").main([*PREPARE, str(tmp_path), "--trainer.accelerator", "gpu"])
    assert (
        capsys.readouterr().out
        == f"Points is complete: 90 train, 10 val, 30 test samples in {tmp_path}\n"
    )


def test_prepare_data_wants_a_config_and_tells_of_damage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "--config" in fails(capsys, 2, lambda: script("prepare_data").main([]))
    (tmp_path / "damaged").touch()
    error = fails(capsys, 1, lambda: script("prepare_data").main([*PREPARE, str(tmp_path)]))
    assert str(tmp_path / "damaged") in error


@pytest.mark.parametrize(("status", "requeued"), [(0, False), (143, True), (1, False)])
@pytest.mark.linux
def test_the_slurm_script_goes_on_in_its_own_run_and_puts_a_stopped_job_back(
    tmp_path: Path, status: int, requeued: bool
) -> None:
    """With stand-ins for srun and scontrol, which write down how they are called."""
    for name, end in (("srun", status), ("scontrol", 0)):
        (tmp_path / name).write_text(f'#!/bin/sh\necho {name} "$@" >> calls\nexit {end}\n')
        (tmp_path / name).chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    command = ["bash", str(HERE / "scripts" / "slurm.sh"), "--config", "a b.yaml"]
    assert subprocess.run(command, cwd=tmp_path, env=environment).returncode == status
    (tmp_path / "logs" / "slurm_7" / "version_0" / "checkpoints").mkdir(parents=True)
    (tmp_path / "logs" / "slurm_7" / "version_0" / "checkpoints" / "last.ckpt").touch()
    assert subprocess.run(command, cwd=tmp_path, env=environment).returncode == status
    calls = (tmp_path / "calls").read_text().splitlines()
    started = "srun --kill-on-bad-exit=1 python scripts/train.py --config a b.yaml --name slurm_7"
    back = ["scontrol requeue 7"] * requeued
    assert calls == [started, *back, f"{started} --ckpt_path last", *back]


def test_a_script_imports_torch_where_ctrl_c_is_heard() -> None:
    """That is, inside of `with starting()`: what it imports before needs no torch."""
    texts = [file.read_text() for file in (HERE / "scripts").glob("*.py")]
    nodes = [
        node for text in texts if '__name__ == "__main__"' in text for node in ast.parse(text).body
    ]
    imports = {ast.unparse(node) for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)}
    assert any("starting" in line for line in imports)
    program = "\n".join([*sorted(imports), "import sys", "assert 'torch' not in sys.modules"])
    subprocess.run([sys.executable, "-c", program], cwd=HERE / "scripts", check=True)


@pytest.mark.parametrize(
    ("name", "first", "flags"),
    [
        ("evaluate", "load_run", "--ckpt_path x"),
        ("runs", "find_runs", ""),
        ("predict", "load_run", "--ckpt_path x y"),
        ("export", "load_run", "--ckpt_path x"),
        ("tune", "parse", ""),
        ("prepare_data", "TrainingCLI", f"--config {TINY}"),
    ],
)
@pytest.mark.linux
def test_ctrl_c_ends_a_script_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    first: str,
    flags: str,
) -> None:
    module = script(name)
    monkeypatch.setattr(module, first, lambda *_, **__: signal.raise_signal(signal.SIGINT))
    with pytest.raises(SystemExit) as caught:
        module.main(flags.split())
    assert caught.value.code == 130
    assert capsys.readouterr().err == "Stopped by Ctrl-C\n"
