"""export.py: files that compute what predict.py computes, in ONNX Runtime and in plain
PyTorch, and its refusals."""

import json
import sys
from pathlib import Path

import pytest
import torch
from example.classifier import Classifier
from paths import argv, fails, script
from tasks import PlainImages, PlainWithStep
from torch import nn

from lightbase.commands.export import graph_file
from lightbase.config.errors import UserError
from lightbase.setup.load import load_run

export = script("export")
CNN = (
    "--data.image_shape [3,32,32] --model.net example.models.cnn.CIFAR10CNN "
    "--model.compile_net aot_eager"
)


def run_file(file, inputs):
    """Return the outputs of the file for a batch, and the classes in the file."""
    if file.suffix == ".pt2":
        extra = {"classes.json": ""}
        net = torch.export.load(file, extra_files=extra).module()
        return net(inputs), json.loads(extra["classes.json"])
    onnxruntime = pytest.importorskip("onnxruntime")
    session = onnxruntime.InferenceSession(file)
    outputs = session.run(["outputs"], {"inputs": inputs.numpy()})[0]
    metadata = session.get_modelmeta().custom_metadata_map
    return torch.from_numpy(outputs), json.loads(metadata["classes"])


@pytest.mark.parametrize(
    ("kind", "flags", "shape"),
    [
        ("pt2", "--name mlp", (3, 8, 8)),
        pytest.param("onnx", CNN, (3, 32, 32), marks=pytest.mark.slow),
    ],
)
def test_a_file_takes_images_and_gives_the_outputs_of_predict_step(
    trained, tmp_path, capsys, kind, flags, shape
):
    if kind == "onnx":
        pytest.importorskip("onnxscript")
        pytest.importorskip("onnxruntime")
    best = trained(flags)[0] / "checkpoints" / "best.ckpt"
    output = tmp_path / f"x.{kind}"
    capsys.readouterr()
    export.main(argv("--ckpt_path", best, "--format", kind, "--output", output))
    shown, error = capsys.readouterr()
    assert error == ""
    assert ", outputs at most " in shown
    assert str(Path(__file__).parents[1]).encode() not in output.read_bytes()
    _, model, data = load_run(best)
    model.eval().requires_grad_(False)
    for size in (1, 2, 5):
        batch = torch.randint(256, (size, *shape), dtype=torch.uint8)
        expected = model.predict_step((data.normalize(batch), None), 0)
        outputs, classes = run_file(output, batch)
        torch.testing.assert_close(outputs, expected, atol=1e-5, rtol=0)
    assert classes == data.classes


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
        outputs, _ = run_file(tmp_path / "x.pt2", inputs)
        torch.testing.assert_close(outputs, plain(x) + 1)


class Branches(nn.Linear):
    def forward(self, x):
        if x.sum() > 0:
            x = x * 2
        return super().forward(x)


class AlwaysDrops(nn.Linear):
    def forward(self, x):
        return super().forward(nn.functional.dropout(x))


@pytest.mark.parametrize(
    ("net", "text"),
    [
        (Branches(8, 4), "the network cannot be exported as one graph"),
        (AlwaysDrops(8, 4), "the export is wrong and was not kept: its"),
    ],
)
def test_what_cannot_be_exported_is_refused(net, text):
    model = Classifier(net, lr=0.1)
    model.example_input_array = torch.zeros(1, 8)
    with pytest.raises(UserError, match=text):
        graph_file(model, PlainImages(), "pt2")


def test_mistakes(trained, tmp_path, capsys, monkeypatch):
    copied = tmp_path / "x.pth"
    copied.write_bytes((trained()[0] / "checkpoints" / "best.ckpt").read_bytes())

    def error(flags):
        command = ["--ckpt_path", str(copied), *flags.split()]
        return fails(capsys, 2, lambda: export.main(command))

    assert "--output x.onx: give another .pth file" in error("--output x.onx")
    assert f"--output {copied}: " in error("")
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    command = ["--ckpt_path", str(copied), "--format", "onnx"]
    missing = fails(capsys, 1, lambda: export.main(command))
    assert "onnxscript" in missing
    assert missing.endswith('pip install -c constraints.txt -e ".[export]"')
