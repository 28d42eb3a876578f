"""--model.weights: a new training starts with what fits of a file, and says what does
not."""

import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from paths import script
from safetensors.torch import save_file
from small import ConvNet
from torch import Tensor, nn

from lightbase.core.checkpoint import LEGACY
from lightbase.core.errors import UserError
from lightbase.core.transfer import load_weights


def source() -> dict[str, Tensor]:
    torch.manual_seed(5)
    return ConvNet(num_classes=5).state_dict()


def loaded(path: Path, net: nn.Module | None = None) -> dict[str, Tensor]:
    net = net or ConvNet(num_classes=5)
    load_weights(net, path)
    return net.state_dict()


def prefixed(prefix: str) -> dict[str, Tensor]:
    return {prefix + name: value for name, value in source().items()}


@pytest.mark.parametrize(
    "content",
    [
        source(),
        {"state_dict": source()},
        {
            "epoch": 3,
            "model": source(),
            "optimizer": {"state": {0: {"exp_avg": torch.ones(4)}}},
        },
        prefixed("module."),
        {
            "state_dict": prefixed("net._orig_mod.")
            | {"criterion.weight": torch.ones(5)}
        },
        {
            name.replace("conv.", "conv._orig_mod."): value
            for name, value in source().items()
        },
        {"teacher": {"head.bias": torch.zeros(5)}, "student": prefixed("backbone.")},
    ],
    ids=[
        "plain",
        "state_dict",
        "model",
        "module",
        "compiled",
        "partly compiled",
        "backbone",
    ],
)
def test_the_usual_files_fit(tmp_path, content, capsys):
    torch.save(content, tmp_path / "w.pth")
    weights = loaded(tmp_path / "w.pth")
    assert all(torch.equal(weights[name], value) for name, value in source().items())
    assert (
        f"Weights: 4 of 4 tensors are those of {tmp_path / 'w.pth'}\n"
        in capsys.readouterr().out
    )


def test_safetensors_and_files_of_an_older_torch(tmp_path: Path) -> None:
    save_file(source(), tmp_path / "w.safetensors")
    torch.save(source(), tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    assert (tmp_path / "old.pth").read_bytes().startswith(LEGACY)
    for name in ("w.safetensors", "old.pth"):
        weights = loaded(tmp_path / name)
        assert all(
            torch.equal(weights[name], value) for name, value in source().items()
        )


def test_a_backbone_finds_its_place_in_the_network(tmp_path: Path) -> None:
    torch.save(source(), tmp_path / "w.pth")
    net = nn.ModuleDict({"backbone": ConvNet(5), "probe": nn.Linear(5, 2)})
    weights = loaded(tmp_path / "w.pth", net)
    assert torch.equal(weights["backbone.conv.weight"], source()["conv.weight"])


def test_what_has_another_shape_stays_and_is_said(tmp_path, capsys):
    torch.save(source() | {"extra": torch.ones(1)}, tmp_path / "w.pth")
    net = ConvNet(num_classes=7)
    before = net.head.weight.clone()
    load_weights(net, tmp_path / "w.pth")
    assert torch.equal(net.conv.weight, source()["conv.weight"])
    assert torch.equal(net.head.weight, before)
    out = capsys.readouterr().out
    assert "2 of 4 tensors" in out
    assert "left as initialised: head.weight, head.bias" in out


class Code:
    def __reduce__(self) -> Any:
        return print, ("code was run",)


def broken(kind: str) -> bytes:
    buffer = io.BytesIO()
    torch.save(source(), buffer)
    content = bytearray(buffer.getvalue())
    if kind == "flipped":
        content[content.index(source()["conv.weight"].numpy().tobytes())] ^= 1
    cut = content[: len(content) // 2]
    return {
        "code": pickle.dumps({"a": Code()}),
        "cut": cut,
        "empty": b"",
        "flipped": content,
    }[kind]


@pytest.mark.parametrize("kind", ["code", "cut", "empty", "flipped"])
def test_a_damaged_file_is_refused_and_runs_no_code(tmp_path, kind, capsys):
    for suffix in ("pth", "safetensors"):
        path = tmp_path / f"w.{suffix}"
        path.write_bytes(broken(kind))
        with pytest.raises(
            UserError, match=f"{path} (is damaged or no checkpoint|cannot be read)"
        ):
            loaded(path)
    assert "code was run" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (ConvNet(), "not safe to load"),
        ([1, 2], "no tensors by name"),
        (
            {"stem.weight": torch.ones(9, 9), "num": torch.tensor(1)},
            "no tensor in it fits ConvNet",
        ),
    ],
)
def test_a_file_without_weights_of_the_network_is_refused(tmp_path, content, message):
    torch.save(content, tmp_path / "w.pth")
    with pytest.raises(UserError, match=message) as caught:
        loaded(tmp_path / "w.pth")
    assert len(str(caught.value).splitlines()) == 2


CONV = ("--model.net", "small.ConvNet")


def test_a_run_starts_with_them_once(train, tmp_path, monkeypatch, capsys):
    """With a relative path, from another run; evaluation and resume need the file no
    more."""
    train(*CONV, "--name", "first", "--trainer.max_epochs", 1)
    best = tmp_path / "first" / "version_0" / "checkpoints" / "best.ckpt"
    best.rename(tmp_path / "start.ckpt")
    monkeypatch.chdir(tmp_path)
    flags = (
        *CONV,
        "--data.num_classes",
        3,
        "--model.weights",
        "start.ckpt",
        "--name",
        "second",
    )
    result = train(*flags, "--model.lr", 1e-9, "--trainer.max_epochs", 1)
    text = f"2 of 4 tensors are those of {tmp_path / 'start.ckpt'}; left as initialised"
    assert capsys.readouterr().out.count(text) == 1
    checkpoints = tmp_path / "second" / "version_0" / "checkpoints"
    saved = torch.load(checkpoints / "best.ckpt", weights_only=True)
    assert saved["config"]["model"]["init_args"]["weights"] == str(
        tmp_path / "start.ckpt"
    )
    start = torch.load(tmp_path / "start.ckpt", weights_only=True)["state_dict"]
    assert torch.allclose(
        saved["state_dict"]["net.conv.weight"], start["net.conv.weight"], atol=1e-6
    )

    (tmp_path / "start.ckpt").rename(tmp_path / "gone.ckpt")
    again = script("evaluate").main(["--ckpt_path", str(checkpoints / "best.ckpt")])
    assert again == {
        name: value for name, value in result.items() if name.startswith("test/")
    }
    train("--name", "second", "--ckpt_path", "last", "--trainer.max_epochs", 2)
    assert "Weights:" not in capsys.readouterr().out
