"""What a run has written: its checkpoints and its curves; or nothing."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from paths import fails
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def checkpoint_file(folder: Path, name: str = "best") -> Path:
    """Return the path of a checkpoint in the folder of a run."""
    return folder / "checkpoints" / f"{name}.ckpt"


def checkpoint(folder: Path, name: str = "last") -> dict[str, Any]:
    """Return the content of a checkpoint, with its tensors on the CPU."""
    file = checkpoint_file(folder, name)
    return torch.load(file, map_location="cpu", weights_only=True)


def weights(folder: Path, name: str = "last") -> dict[str, torch.Tensor]:
    """Return the weights in a checkpoint."""
    return checkpoint(folder, name)["state_dict"]


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """Return whether two runs have the same weights to the bit."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def refused(capsys: Any, folder: Path, run: Callable[[], Any], status: int = 2) -> str:
    """Return the error of a training that leaves no folder of a run below `folder`."""
    error = fails(capsys, status, run)
    assert not [*folder.rglob("version_*")]
    return error


def curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return the points (step, value) of each curve, by the names that Lightning has.

    They are sorted: files of one second may be read in either order.
    """
    events = EventAccumulator(str(folder)).Reload()
    points = {}
    for tag in events.Tags()["scalars"]:
        name = re.sub("^(view|watch)/(?=test|lr)", "", tag)
        points[name] = sorted(
            (event.step, event.value) for event in events.Scalars(tag)
        )
    return points
