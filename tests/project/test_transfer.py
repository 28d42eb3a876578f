"""The commands of docs/transfer.md, in their order, shortened."""

from pathlib import Path

import pytest
import torch
from pages import REPO, commands, run, write_files
from torchvision.models import resnet18

PAGE = (REPO / "docs" / "transfer.md").read_text()
COMMANDS = {command.split(" --name ")[1]: command for command in commands(PAGE)}


@pytest.fixture
def user_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_files(PAGE, tmp_path, monkeypatch)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_a_network_goes_from_data_to_data(
    user_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("first", "head", "all"):
        run(COMMANDS[name], user_folder)
    out = capsys.readouterr().out
    assert "left as initialised: head.3.weight (7, 64), in the file (10, 64)" in out
    assert "Weights: 8 of 10 tensors" in out
    assert "Weights: 10 of 10 tensors" in out
    assert "Frozen: 79,328 of 145,383 parameters" in out
    states = {}
    for name in ("first", "head", "all"):
        path = user_folder / "logs" / name / "version_0" / "checkpoints" / "best.ckpt"
        states[name] = torch.load(path, weights_only=True)["state_dict"]["net.features.0.weight"]
    assert torch.equal(states["first"], states["head"])
    assert not torch.equal(states["head"], states["all"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet", "timm", "vit"])
def test_networks_of_torchvision_and_timm(
    user_folder: Path,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(user_folder / "hub"))
    (user_folder / "hub" / "checkpoints").mkdir(parents=True)
    torch.save(
        resnet18().state_dict(), user_folder / "hub" / "checkpoints" / "resnet18-f37072fd.pth"
    )
    result = run(COMMANDS[name], user_folder)
    assert result["steps"] == 3
    assert ("Weights: 120 of 122 tensors" in capsys.readouterr().out) == (name == "resnet")
    best = user_folder / "logs" / name / "version_0" / "checkpoints" / "best.ckpt"
    again = run(f"python scripts/evaluate.py --ckpt_path {best}", user_folder)
    assert again == {key: value for key, value in result.items() if key.startswith("test/")}
