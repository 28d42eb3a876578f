"""export.py: files that compute what predict.py computes, in ONNX Runtime and in plain PyTorch, and
its refusals."""

import csv
import importlib.util
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from paths import TINY, script
from PIL import Image
from test_scripts import Plain, PlainImages, PlainWithStep, fails
from torch import Tensor, nn

from lightbase.data.batches import Batch
from lightbase.data.images import read_image
from lightbase.data.module import BaseDataModule
from lightbase.errors import UserError
from lightbase.resume.load import load_run
from lightbase.run.train import main

export = script("export")
CIFAR = "--data.image_shape [3,32,32] --data.num_train 60 --data.num_test 10 "
MODELS = {  # by the run's name: what differs from tiny.yaml
    "mlp": "",
    "discs": "--model example.regressor.Regressor --data example.data.discs.Discs "
    "--data.num_train 99 --data.num_test 20 --model.net.sizes [1024,8,1]",
    "features": "--data lightbase.data.tables.Features --data.csv_path features.csv "
    "--model.net.sizes [3,5,2]",
    "words": "--data test_export.Words --model.net test_export.BagOfWords",
    "views": "--model.net small.ConvNet --model.net.num_classes 4 "
    "--model.test_views lightbase.data.transforms.mirrored",
    "branches": "--model.net test_export.Branches",
    "random": "--model.net test_export.AlwaysDrops",
    "dicts": "--data test_export.Dicts --model.net test_export.OfDict --try_network false",
}
LARGE = {
    "cnn": CIFAR + "--model.net example.models.cnn.CIFAR10CNN --model.compile_net aot_eager",
    "vit": CIFAR + "--model.net torchvision.models.VisionTransformer --model.net.image_size 32 "
    "--model.net.patch_size 16 --model.net.num_layers 1 --model.net.num_heads 2 "
    "--model.net.hidden_dim 16 --model.net.mlp_dim 16",
    "lstm": "--data test_export.Words --model.net test_export.Recurrent",
}


class Words(BaseDataModule):
    """Seven words of a vocabulary of 20 a sample."""

    classes = ["a", "b"]

    def load(self, split: str) -> Batch:  # type: ignore[override]
        words = torch.randint(20, (100, 7), generator=torch.Generator().manual_seed(0))
        return words, words[:, 0] % 2


class Dicts(Words):
    def load(self, split: str) -> Any:  # type: ignore[override]
        return InDicts(*super().load(split))


class InDicts(torch.utils.data.Dataset):
    def __init__(self, words: Tensor, targets: Tensor) -> None:
        self.words, self.targets = words, targets

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> Any:
        return {"words": self.words[index]}, self.targets[index]


class BagOfWords(nn.Module):
    def __init__(self, num_classes: int = 2) -> None:
        super().__init__()
        self.words = nn.Embedding(20, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        # len(x) is a fixed number to torch.export if it is not strict
        return self.words(x).reshape(len(x), x.shape[1], -1).mean(1)


class OfDict(BagOfWords):
    def forward(self, x: Any) -> Tensor:
        return super().forward(x["words"])


class Recurrent(nn.Module):
    def __init__(self, num_classes: int = 2) -> None:
        super().__init__()
        self.words, self.lstm = nn.Embedding(20, 4), nn.LSTM(4, num_classes, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(self.words(x))[0][:, -1]


class Branches(nn.Module):
    def __init__(self, num_classes: int = 4) -> None:
        super().__init__()
        self.head = nn.Linear(192, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            x = x * 2
        return self.head(x.flatten(1))


class AlwaysDrops(Branches):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(nn.functional.dropout(x.flatten(1)))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The path of best.ckpt of a run of MODELS or LARGE, trained when it is first asked for."""
    root = tmp_path_factory.mktemp("export")
    (root / "features.csv").write_text(
        "x,y,z,label\n" + "".join(f"{i},{1000 + i % 7},5,{i % 2}\n" for i in range(90))
    )

    def path(name: str) -> Path:
        file = root / name / "version_0" / "checkpoints" / "best.ckpt"
        if not file.exists():
            flags = f"--name {name} --trainer.default_root_dir {root} --trainer.max_epochs 1 "
            flags += "--trainer.limit_test_batches 0 " + (MODELS | LARGE)[name]
            flags = flags.replace("features.csv", str(root / "features.csv"))
            main(["--config", TINY, *flags.split()])
        return file

    return path


def run_onnx(file: Path, inputs: Tensor) -> tuple[Tensor, dict[str, Any]]:
    onnxruntime = pytest.importorskip("onnxruntime")
    session = onnxruntime.InferenceSession(file)
    (x,), (y,) = session.get_inputs(), session.get_outputs()
    about = dict(session.get_modelmeta().custom_metadata_map)
    for key in ("classes", "input_shape", "raw"):
        about[key] = json.loads(about[key])
    assert x.shape[0] == y.shape[0] == "batch"
    return torch.from_numpy(session.run([y.name], {x.name: inputs.numpy()})[0]), {
        **about,
        "names": (x.name, y.name),
    }


def run_pt2(file: Path, inputs: Tensor) -> tuple[Tensor, dict[str, Any]]:
    extra = {"metadata.json": ""}
    net = torch.export.load(file, extra_files=extra).module()
    return net(inputs), json.loads(extra["metadata.json"])


RUN = {"onnx": run_onnx, "pt2": run_pt2}
EACH = [pytest.param("onnx", marks=pytest.mark.slow), "pt2"]  # onnxscript takes seconds


def compare(checkpoint: Path, kind: str, inputs: Callable[[int], Tensor]) -> dict[str, Any]:
    """Export, run on batches of several sizes, compare with predict_step; returns what the file
    says of itself."""
    file = export.main(["--ckpt_path", str(checkpoint), "--format", kind])
    loaded = load_run(checkpoint)
    for size in (1, 2, 5):
        batch = inputs(size)
        with torch.no_grad():
            x = loaded.datamodule.normalize(batch)  # type: ignore[attr-defined]
            expected = loaded.model.eval().predict_step((x, None), 0)
        found, about = RUN[kind](file, batch)
        assert found.shape == expected.shape
        assert (found - expected).abs().max() < 1e-5
    assert str(Path(__file__).parents[1]).encode() not in file.read_bytes()  # whose machine it was
    return about


def images(*shape: int) -> Callable[[int], Tensor]:
    return lambda size: torch.randint(256, (size, *shape), dtype=torch.uint8)


def words(num: int) -> Tensor:
    return torch.randint(20, (num, 7))


@pytest.mark.parametrize("kind", EACH)
def test_a_file_takes_the_images_and_gives_the_probabilities(checkpoint, kind, capsys):
    about = compare(checkpoint("mlp"), kind, images(3, 8, 8))
    assert about["classes"] == [f"stripes_{i}" for i in range(4)]
    assert about["input_shape"] == [3, 8, 8]
    assert about["input_dtype"] == "uint8"
    assert about["raw"] is True
    assert about["run"] == "mlp/version_0"
    assert about["checkpoint"] == "best.ckpt"
    assert "probability of each class" in about["output"]
    assert about.get("names", ("images", "probabilities")) == ("images", "probabilities")
    output, error = capsys.readouterr()
    assert error == ""
    what = "MLP, images uint8 (N, 3, 8, 8) to probabilities float32 (N, 4), at most "
    assert output.splitlines()[-1].startswith(what)


@pytest.mark.slow
@pytest.mark.parametrize("kind", RUN)
def test_a_table_of_features_needs_no_file_any_more(checkpoint, kind, tmp_path):
    def rows(num: int) -> Tensor:
        return torch.rand(num, 3) * torch.tensor([90, 7, 1]) + torch.tensor([0, 1000, 5])

    path = checkpoint("features")
    table = path.parents[3] / "features.csv"
    table.rename(tmp_path / "away.csv")
    try:
        about = compare(path, kind, rows)
    finally:
        (tmp_path / "away.csv").rename(table)
    assert about["classes"] == ["0", "1"]
    assert about["input_dtype"] == "float32"
    assert about.get("names", ("inputs", "probabilities")) == ("inputs", "probabilities")


@pytest.mark.slow
@pytest.mark.parametrize("kind", RUN)
def test_numbers_words_and_the_mean_over_views(checkpoint: Any, kind: str) -> None:
    about = compare(checkpoint("discs"), kind, images(1, 32, 32))
    assert about["classes"] == []
    assert "predict_step of Regressor" in about["output"]
    assert about.get("names", ("images", "prediction")) == ("images", "prediction")
    about = compare(checkpoint("words"), kind, words)
    assert about["input_dtype"] == "int64"
    compare(checkpoint("views"), kind, images(3, 8, 8))


@pytest.mark.slow
@pytest.mark.parametrize("kind", RUN)
@pytest.mark.parametrize("name", LARGE)
def test_networks_of_every_kind(checkpoint: Any, name: str, kind: str, capsys: Any) -> None:
    compare(checkpoint(name), kind, words if name == "lstm" else images(3, 32, 32))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("model", [Plain, PlainWithStep])
def test_a_plain_module_by_its_forward_or_predict_step(checkpoint, model):
    data: Any = load_run(checkpoint("mlp")).datamodule
    job = export.make_job(model(), data)
    assert (job.input_name, job.output_name) == ("images", "prediction")
    batch = images(3, 8, 8)(2)
    expected = model()(data.normalize(batch)) + (model is PlainWithStep)
    assert torch.equal(job.predictor(batch), expected)


def test_data_that_is_not_ours_needs_an_example_of_the_model() -> None:
    model = Plain()
    with pytest.raises(UserError, match=r"set self.example_input_array of Plain"):
        export.make_job(model, PlainImages())
    model.example_input_array = torch.zeros(1, 3, 8, 8)
    job = export.make_job(model, PlainImages())
    assert job.about["raw"] is False
    assert job.about["input_shape"] == [3, 8, 8]


def test_the_check_sees_numbers_as_the_network_does(checkpoint: Any) -> None:
    """Else a probability of 1 agrees with anything."""
    loaded: Any = load_run(checkpoint("features"))
    job = export.make_job(loaded.model, loaded.datamodule)
    seen = loaded.datamodule.normalize(job.batches[2][0])
    assert seen.abs().max() < 10
    assert 0.3 < seen.std() < 3


def test_an_infinite_output_does_not_hide_what_is_wrong() -> None:
    expected = torch.tensor([[float("inf"), 1.0]])
    assert export.difference(expected, expected) == 0
    assert export.difference(expected + torch.tensor([[0, 0.1]]), expected) > 0.09


def is_clean(folder: Path) -> bool:
    return not [*folder.glob("best.onnx"), *folder.glob("best.pt2"), *folder.glob(".*.part")]


@pytest.mark.slow
@pytest.mark.parametrize("kind", RUN)
def test_what_cannot_be_exported_leaves_no_file(checkpoint: Any, kind: str, capfd: Any) -> None:
    def refused(name: str) -> str:
        path = checkpoint(name)
        capfd.readouterr()
        error = fails(capfd, 1, lambda: export.main(["--ckpt_path", str(path), "--format", kind]))
        assert is_clean(path.parent)
        return error

    error = refused("branches").splitlines()
    assert error[0] == "error: Branches cannot be exported as one graph for batches of any size"
    assert "data-dependent" in error[1]
    assert "AlwaysDrops is wrong and was not kept" in refused("random")
    assert "Dicts are no tensors" in refused("dicts")


def test_mistakes(checkpoint, tmp_path, capsys, monkeypatch):
    path = str(checkpoint("mlp"))

    def error(*flags: str) -> str:
        return fails(capsys, 2, lambda: export.main(["--ckpt_path", path, *flags]))

    assert "x.onx: onx is no format; give --format onnx, pt2, pth" in error(
        "--output", str(tmp_path / "x.onx")
    )
    for none in ("", "/"):  # such as an empty variable of the shell
        assert "is a folder" in fails(
            capsys, 1, lambda none=none: export.main(["--ckpt_path", none])
        )
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "onnxscript" else find(name)
    )
    assert (
        error("--format", "onnx")
        == 'error: --format onnx needs onnxscript: pip install -e ".[export]"'
    )


def test_the_ending_of_the_output_tells_the_format(checkpoint: Any, tmp_path: Path) -> None:
    path = shutil.copy(checkpoint("mlp"), tmp_path / "moved.ckpt")
    file = export.main(["--ckpt_path", str(path), "--output", str(tmp_path / "x.pt2")])
    assert run_pt2(file, torch.zeros(1, 3, 8, 8, dtype=torch.uint8))[1]["run"] == "mlp"


@pytest.mark.slow
def test_a_folder_of_images_from_flags_alone_to_the_same_probabilities(tmp_path, monkeypatch):
    """Train torchvision's resnet18, predict, export: 7 classes, uneven sizes, files of every
    mode."""
    monkeypatch.chdir(tmp_path)
    modes = ["RGB", "RGB", "L", "P", "RGBA", "LA", "1", "CMYK"]
    rng = np.random.default_rng(0)
    for label in range(7):
        folder = tmp_path / "shapes" / f"class {label}"
        folder.mkdir(parents=True)
        for i in range(4 + label):
            height, width = rng.integers(40, 90, 2)
            image = Image.fromarray(
                rng.integers(30 * label, 76 + 30 * label, (height, width, 3), dtype=np.uint8)
            )
            mode = modes[(i + label) % len(modes)]
            image.convert(mode).save(folder / f"{i}.{'jpg' if mode == 'CMYK' else 'png'}")
    flags = (
        "--model example.classifier.Classifier --model.net torchvision.models.resnet18 "
        "--name shapes "
        "--data lightbase.data.images.ImageFolder --data.data_dir shapes --data.num_workers 0 "
        "--data.batch_size 16 --trainer.max_epochs 1 --trainer.default_root_dir logs "
        "--trainer.accelerator cpu --trainer.limit_train_batches 1 "
        "--trainer.limit_test_batches 0 --figures_every_n_epochs 0"
    )
    main(flags.split())
    path = "logs/shapes/version_0/checkpoints/best.ckpt"
    script("predict").main(
        ["--ckpt_path", path, "shapes", "--probabilities", "--output", "found.csv"]
    )
    with Path("found.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == sum(4 + label for label in range(7))
    batch = torch.stack([read_image(Path(row["file"]), (3, 64, 64)) for row in rows])
    for kind in ("onnx", "pt2"):
        found, about = RUN[kind](export.main(["--ckpt_path", path, "--format", kind]), batch)
        assert about["classes"] == [f"class {label}" for label in range(7)]
        expected = [
            [float(row[f"probability_{name}"]) for name in about["classes"]] for row in rows
        ]
        assert (found - torch.tensor(expected)).abs().max() < 1e-4
