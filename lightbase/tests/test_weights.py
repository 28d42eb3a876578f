"""--model.weights: a new training starts with what fits of a file, and says what does
not."""

from pathlib import Path
from typing import Any

import pytest
import torch
from paths import script
from small import ConvNet
from torch import Tensor
from written import checkpoint_file, equal

from lightbase.config.errors import UserError
from lightbase.model.transfer import load_weights


def source(prefix: str = "") -> dict[str, Tensor]:
    torch.manual_seed(5)
    state = ConvNet(num_classes=5).state_dict()
    return {prefix + name: value for name, value in state.items()}


def loaded(path: Path) -> dict[str, Tensor]:
    net = ConvNet(num_classes=5)
    load_weights(net, path)
    return net.state_dict()


COMPILED = source("net._orig_mod.") | {"criterion.weight": torch.ones(5)}
MOMENTS = {"state": {0: {"exp_avg": torch.ones(4)}}}


@pytest.mark.parametrize(
    "content",
    [
        {"epoch": 3, "model": source(), "optimizer": MOMENTS},
        {"state_dict": COMPILED},
        {"teacher": {"head.bias": torch.zeros(5)}, "student": source("backbone.")},
    ],
    ids=["model", "compiled", "backbone"],
)
def test_the_usual_files_fit(tmp_path, content, capsys):
    file = tmp_path / "w.pth"
    torch.save(content, file)
    assert equal(loaded(file), source())
    line = f"Weights: 4 of 4 tensors are those of {file}\n"
    assert line in capsys.readouterr().out


def test_safetensors_fit_and_a_damaged_file_is_refused(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    file = tmp_path / "w.safetensors"
    safetensors.save_file(source(), file)
    assert equal(loaded(file), source())
    file.write_bytes(b"cut")
    with pytest.raises(UserError, match=r"w.safetensors cannot be read"):
        loaded(file)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (ConvNet(), "not safe to load"),
        ({"stem": torch.ones(9, 9), "num": torch.tensor(1)}, "no tensor in it fits"),
    ],
)
def test_a_file_without_weights_of_the_network_is_refused(tmp_path, content, message):
    torch.save(content, tmp_path / "w.pth")
    with pytest.raises(UserError, match=message) as caught:
        loaded(tmp_path / "w.pth")
    assert len(str(caught.value).splitlines()) == 2


def two(first: str, second: str) -> dict[str, Any]:
    """Two networks with other weights, by name."""
    other = {name: value + 1 for name, value in source().items()}
    return {first: source(), second: other}


def flat(tables: dict[str, Any]) -> dict[str, Tensor]:
    return {f"{key}.{name}": x for key in tables for name, x in tables[key].items()}


@pytest.mark.parametrize(
    ("content", "name"),
    [
        (two("ema_model", "model"), "model"),
        ({"model": flat(two("a.net", "b.net"))}, "model.b.net"),
    ],
)
def test_of_two_parts_that_fit_one_has_to_be_named(tmp_path, content, name, capsys):
    file = tmp_path / "w.pth"
    torch.save(content, file)
    with pytest.raises(UserError, match="several parts fit equally well: ") as caught:
        loaded(file)
    assert name in str(caught.value)
    expected = {key: value + 1 for key, value in source().items()}
    assert equal(loaded(Path(f"{file}:{name}")), expected)
    with pytest.raises(UserError, match="no tensor in it fits ConvNet"):
        loaded(Path(f"{file}:nothing"))


def test_averaged_weights_and_equal_names_count_before_others(tmp_path: Path) -> None:
    contents = (
        {"state_dict": source(), "current_model_state": two("a", "b")["b"]},
        source() | flat({"ema": two("a", "b")["b"]}),
    )
    for content in contents:
        torch.save(content, tmp_path / "w.pth")
        assert equal(loaded(tmp_path / "w.pth"), source())


def test_a_run_starts_with_them_once(train, tmp_path, monkeypatch, capsys):
    """With a relative path, from another run; evaluation and resume need the file no
    more."""
    flags = "--model.net small.ConvNet --trainer.max_epochs 1"
    train(flags, "--name first")
    start = tmp_path / "start.ckpt"
    checkpoint_file(tmp_path / "first" / "version_0").rename(start)
    monkeypatch.chdir(tmp_path)
    flags += " --data.num_classes 3 --model.weights start.ckpt --model.lr 1e-9"
    result = train(flags, "--name second")
    assert f"2 of 4 tensors are those of {start}" in capsys.readouterr().out
    best = checkpoint_file(tmp_path / "second" / "version_0")
    name = "net.conv.weight"
    first, saved = (torch.load(file)["state_dict"][name] for file in (start, best))
    assert torch.allclose(saved, first, atol=1e-6)
    start.unlink()
    again = script("evaluate").main(["--ckpt_path", str(best)])
    assert again.items() <= result.items()
    train("--name second --ckpt_path last --trainer.max_epochs 2")
    assert "Weights:" not in capsys.readouterr().out
