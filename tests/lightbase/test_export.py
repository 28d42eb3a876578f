"""export.py: files that compute what predict.py computes, in ONNX Runtime and in plain PyTorch, and
its refusals."""

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from paths import argv, script
from test_scripts import Plain, PlainImages, PlainWithStep, fails
from torch import Tensor, nn

from lightbase.data.module import BaseDataModule
from lightbase.errors import UserError
from lightbase.resume.load import load_run

export = script("export")
KINDS = ("onnx", "pt2")
NETWORKS = {  # flags beside tiny.yaml
    "discs": "--model example.regressor.Regressor --data example.data.discs.Discs "
    "--data.num_train 99 --data.num_test 20 --model.net.sizes [1024,8,1]",
    "words": "--data test_export.Words --model.net test_export.BagOfWords",
    "convolutions": "--model.net small.ConvNet --model.net.num_classes 4",
    "cnn": "--data.image_shape [3,32,32] --model.net example.models.cnn.CIFAR10CNN "
    "--model.compile_net aot_eager",
}
REFUSED = {  # flags, and a part of the error
    "branches": ("--model.net test_export.Branches", "the network cannot be exported as one graph"),
    "random": ("--model.net test_export.AlwaysDrops", "the export is wrong and was not kept: its"),
}


class Words(BaseDataModule):
    """Seven words of a vocabulary of 20 a sample."""

    classes = ["a", "b"]

    def load(self, split: str) -> Any:  # type: ignore[override]
        words = torch.randint(20, (100, 7), generator=torch.Generator().manual_seed(0))
        return words, words[:, 0] % 2


class BagOfWords(nn.Module):
    def __init__(self, num_classes: int = 2) -> None:
        super().__init__()
        self.words = nn.Embedding(20, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.words(x).reshape(x.shape[0], x.shape[1], -1).mean(1)


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


def run_onnx(file: Path, inputs: Tensor) -> tuple[Tensor, dict[str, Any]]:
    onnxruntime = pytest.importorskip("onnxruntime")
    session = onnxruntime.InferenceSession(file)
    (x,), (y,) = session.get_inputs(), session.get_outputs()
    assert x.shape[0] == y.shape[0] == "batch"
    about = dict(session.get_modelmeta().custom_metadata_map)
    about |= {"classes": json.loads(about["classes"]), "names": (x.name, y.name)}
    return torch.from_numpy(session.run([y.name], {x.name: inputs.numpy()})[0]), about


def run_pt2(file: Path, inputs: Tensor) -> tuple[Tensor, dict[str, Any]]:
    extra = {"metadata.json": ""}
    net = torch.export.load(file, extra_files=extra).module()
    return net(inputs), json.loads(extra["metadata.json"])


RUN = {"onnx": run_onnx, "pt2": run_pt2}


def compare(checkpoint: Path, output: Path, inputs: Callable[[int], Tensor]) -> dict[str, Any]:
    """Export, run on batches of several sizes, compare with predict_step; returns what the file
    says of itself."""
    export.main(["--ckpt_path", str(checkpoint), "--output", str(output)])
    loaded: Any = load_run(checkpoint)
    for size in (1, 2, 5):
        batch = inputs(size)
        with torch.no_grad():
            x = loaded.datamodule.normalize(batch)
            expected = loaded.model.eval().predict_step((x, None), 0)
        outputs, about = RUN[output.suffix[1:]](output, batch)
        assert outputs.shape == expected.shape
        assert (outputs - expected).abs().max() < 1e-5
    folders_here = str(Path(__file__).parents[1]).encode()
    assert folders_here not in output.read_bytes()
    return about


def images(*shape: int) -> Callable[[int], Tensor]:
    return lambda size: torch.randint(256, (size, *shape), dtype=torch.uint8)


# onnxscript takes seconds
@pytest.mark.parametrize("kind", [pytest.param("onnx", marks=pytest.mark.slow), "pt2"])
def test_a_file_takes_the_images_and_gives_the_probabilities(trained, tmp_path, kind, capsys):
    folder, _ = trained()
    capsys.readouterr()
    best = folder / "checkpoints" / "best.ckpt"
    about = compare(best, tmp_path / f"x.{kind}", images(3, 8, 8))
    assert about.pop("names", ("images", "probabilities")) == ("images", "probabilities")
    assert about == {
        "classes": [f"stripes_{i}" for i in range(4)],
        "input": "uint8 (N, 3, 8, 8)",
        "output": "float32 (N, 4)",
    }
    output, error = capsys.readouterr()
    assert error == ""
    what = "MLP, images uint8 (N, 3, 8, 8) to probabilities float32 (N, 4), at most "
    assert output.splitlines()[-1].startswith(what)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_table_of_features_needs_no_file_any_more(train, tmp_path, kind):
    def rows(num: int) -> Tensor:
        return torch.rand(num, 3) * torch.tensor([90, 7, 1]) + torch.tensor([0, 1000, 5])

    table = tmp_path / "features.csv"
    lines = "".join(f"{i},{1000 + i % 7},5,{i % 2}\n" for i in range(90))
    table.write_text("x,y,z,label\n" + lines)
    data = ("--data lightbase.data.tables.Features --data.csv_path", table)
    train(*data, "--model.net.sizes [3,5,2]")
    table.unlink()
    best = tmp_path / "tiny" / "version_0" / "checkpoints" / "best.ckpt"
    about = compare(best, tmp_path / f"x.{kind}", rows)
    assert about["classes"] == ["0", "1"]
    assert about.get("names", ("inputs", "probabilities")) == ("inputs", "probabilities")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NETWORKS)
def test_networks_of_every_kind(trained, tmp_path, name, kind, capsys):
    folder, _ = trained(f"--name {name} --trainer.max_epochs 1", *argv(NETWORKS[name]))
    capsys.readouterr()
    shape = {"discs": (1, 32, 32), "cnn": (3, 32, 32)}.get(name, (3, 8, 8))
    inputs = images(*shape)
    if name == "words":
        inputs = lambda num: torch.randint(20, (num, 7))  # noqa: E731
    about = compare(folder / "checkpoints" / "best.ckpt", tmp_path / f"x.{kind}", inputs)
    if name == "discs":
        assert about["classes"] == []
        assert about.get("names", ("images", "prediction")) == ("images", "prediction")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("model", [Plain, PlainWithStep])
def test_a_plain_module_with_data_of_any_kind(trained, tmp_path, model):
    def outputs(data: Any, batch: Tensor) -> Tensor:
        content, text = export.checked_graph(plain, data, "pt2")
        assert " to prediction float32 (N, 2), at most 0 off" in text
        (tmp_path / "x.pt2").write_bytes(content)
        return run_pt2(tmp_path / "x.pt2", batch)[0]

    plain = model()
    batch, data = images(3, 8, 8)(2), load_run(trained()[0] / "checkpoints/best.ckpt").datamodule
    expected = plain(data.normalize(batch)) + (model is PlainWithStep)
    assert torch.equal(outputs(data, batch), expected)
    with pytest.raises(UserError, match=r"set self.example_input_array of Plain"):
        export.checked_graph(plain, PlainImages(), "pt2")
    plain.example_input_array = torch.zeros(1, 3, 8, 8)
    x = torch.rand(2, 3, 8, 8)
    assert torch.equal(outputs(PlainImages(), x), plain(x) + (model is PlainWithStep))


def test_the_check_sees_numbers_as_the_network_does() -> None:
    """Else a probability of 1 agrees with anything."""

    def normalize(x: Tensor) -> Tensor:
        return (x - 1000) / 7

    seen = torch.cat([normalize(x) for x in export.random_batches(torch.zeros(0, 99), normalize)])
    assert seen.abs().max() < 10
    assert 0.5 < seen.std() < 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_exported_leaves_no_file(trained, tmp_path, capfd, name, kind):
    flags, text = REFUSED[name]
    folder, _ = trained("--trainer.max_epochs 1", *argv(flags))
    capfd.readouterr()
    command = argv("--ckpt_path", folder / "checkpoints/best.ckpt", "--output", tmp_path / "x")
    assert text in fails(capfd, 1, lambda: export.main([*command, "--format", kind]))
    assert not list(tmp_path.iterdir())


def test_mistakes(trained, tmp_path, capsys, monkeypatch):
    best = trained()[0] / "checkpoints" / "best.ckpt"
    copied = tmp_path / "x.ckpt"
    copied.write_bytes(best.read_bytes())

    def error(*flags: str) -> str:
        return fails(capsys, 2, lambda: export.main(["--ckpt_path", str(copied), *flags]))

    assert error("--output", "x.onx") == "error: --output x.onx: give --format onnx, pt2, pth"
    assert "checkpoint itself" in error("--output", str(copied), "--format", "pth")
    assert copied.read_bytes() == best.read_bytes()
    assert "nowhere" in error("--output", "nowhere/x.pth")
    for none in ("", "/"):  # such as an empty variable of the shell
        command = ["--ckpt_path", none]
        assert "Is a directory" in fails(capsys, 1, lambda command=command: export.main(command))
    find = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda n: (n != "onnxscript" and find(n)) or None
    )
    missing = 'error: --format onnx needs onnxscript: pip install -e ".[export]"'
    assert error("--format", "onnx") == missing
