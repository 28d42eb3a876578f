"""export.py: files that compute what predict.py computes, in ONNX Runtime and in plain
PyTorch, and its refusals."""

import json
import sys
from pathlib import Path

import pytest
import torch
from example.models.mlp import MLP
from paths import argv, fails, script
from tasks import PlainImages, PlainWithStep
from torch import Tensor, nn

from lightbase.core.errors import UserError
from lightbase.core.load import load_run
from lightbase.extras.export import graph_file

export = script("export")
KINDS = ("onnx", "pt2")
NETWORKS = {  # flags beside tiny.yaml
    "discs": "--model example.regressor.Regressor --data example.data.discs.Discs "
    "--data.num_train 99 --data.num_test 20 --model.net.sizes [1024,8,1]",
    "cnn": "--data.image_shape [3,32,32] --model.net example.models.cnn.CIFAR10CNN "
    "--model.compile_net aot_eager",
}
REFUSED = {  # networks, and a part of the error
    "Branches": "the network cannot be exported as one graph",
    "AlwaysDrops": "the export is wrong and was not kept: its",
}


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


def run_onnx(file: Path, inputs: Tensor) -> tuple[Tensor, str]:
    onnxruntime = pytest.importorskip("onnxruntime")
    session = onnxruntime.InferenceSession(file)
    outputs = session.run(["outputs"], {"inputs": inputs.numpy()})[0]
    classes = session.get_modelmeta().custom_metadata_map["classes"]
    return torch.from_numpy(outputs), classes


def run_pt2(file: Path, inputs: Tensor) -> tuple[Tensor, str]:
    extra = {"classes.json": ""}
    net = torch.export.load(file, extra_files=extra).module()
    return net(inputs), extra["classes.json"]


RUN = {"onnx": run_onnx, "pt2": run_pt2}


def compare(run: Path, output: Path, *shape: int) -> list[str]:
    """Export, run on batches of several sizes, compare with predict_step; returns the
    classes in the file. shape: of an image."""
    path, kind = run / "checkpoints" / "best.ckpt", output.suffix[1:]
    flags = ["--format", kind, "--output", str(output)]
    export.main(["--ckpt_path", str(path), *flags])
    _, model, data = load_run(path)
    model.eval().requires_grad_(False)
    for size in (1, 2, 5):
        batch = torch.randint(256, (size, *shape), dtype=torch.uint8)
        expected = model.predict_step((data.normalize(batch), None), 0)
        outputs, classes = RUN[kind](output, batch)
        torch.testing.assert_close(outputs, expected, atol=1e-5, rtol=0)
    assert str(Path(__file__).parents[1]).encode() not in output.read_bytes()
    return json.loads(classes)  # type: ignore[no-any-return]


def test_a_file_takes_the_images_and_gives_the_probabilities(trained, tmp_path, capsys):
    folder, _ = trained()
    capsys.readouterr()
    classes = compare(folder, tmp_path / "x.pt2", 3, 8, 8)
    assert classes == [f"stripes_{i}" for i in range(4)]
    output, error = capsys.readouterr()
    assert error == ""
    assert "MLP, outputs at most " in output


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("name", "channels"), [("discs", 1), ("cnn", 3)])
def test_networks_of_every_kind(trained, tmp_path, name, channels, kind, capsys):
    folder, _ = trained(f"--name {name} --trainer.max_epochs 1", *argv(NETWORKS[name]))
    capsys.readouterr()
    compare(folder, tmp_path / f"x.{kind}", channels, 32, 32)
    assert capsys.readouterr().err == ""


def test_a_plain_module_with_data_of_any_kind(trained, tmp_path):
    plain = PlainWithStep()
    _, _, data = load_run(trained()[0] / "checkpoints/best.ckpt")
    batch = torch.randint(256, (2, 3, 8, 8), dtype=torch.uint8)
    x = data.normalize(batch)
    with pytest.raises(UserError, match=r"set self.example_input_array of Plain"):
        graph_file(plain, PlainImages(), "pt2")
    plain.example_input_array = torch.zeros(1, 3, 8, 8)
    for module, inputs in ((data, batch), (PlainImages(), x)):
        content, _ = graph_file(plain, module, "pt2")
        (tmp_path / "x.pt2").write_bytes(content)
        outputs, _ = run_pt2(tmp_path / "x.pt2", inputs)
        torch.testing.assert_close(outputs, plain(x) + 1)


@pytest.mark.slow
@pytest.mark.parametrize(("net", "text"), REFUSED.items())
def test_what_cannot_be_exported_leaves_no_file(trained, tmp_path, capfd, net, text):
    folder, _ = trained(f"--trainer.max_epochs 1 --model.net test_export.{net}")
    capfd.readouterr()
    command = argv("--ckpt_path", folder / "checkpoints/best.ckpt", "--format pt2")
    command += ["--output", str(tmp_path / "x.pt2")]
    assert text in fails(capfd, 1, lambda: export.main(command))
    assert not list(tmp_path.iterdir())


def test_exported_weights_give_the_same_outputs_in_plain_torch(trained):
    best = trained()[0] / "checkpoints" / "best.ckpt"
    output = export.main(["--ckpt_path", str(best)])
    assert output == best.with_suffix(".pth")
    net = MLP([192, 16, 4])
    net.load_state_dict(torch.load(output, weights_only=True))
    x = torch.rand(5, 3, 8, 8)
    _, model, _ = load_run(best)
    assert torch.equal(net(x), model.net.eval()(x))


def test_mistakes(trained, tmp_path, capsys, monkeypatch):
    copied = tmp_path / "x.pth"
    copied.write_bytes((trained()[0] / "checkpoints" / "best.ckpt").read_bytes())

    def error(flags: str) -> str:
        command = ["--ckpt_path", str(copied), *flags.split()]
        return fails(capsys, 2, lambda: export.main(command))

    assert "--output x.onx: give another .pth file" in error("--output x.onx")
    assert f"--output {copied}: " in error("")
    assert "nowhere" in error("--output nowhere/x.pth")
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    missing = error("--format onnx")
    assert "onnxscript" in missing
    assert missing.endswith(': pip install -e ".[export]"')
