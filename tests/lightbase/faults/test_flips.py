"""Damaged checkpoints: through every door the same result to the last bit, or an error of two
lines.

FAULT_FLIPS=100 pytest -m slow -n 0 -s tests/faults/test_flips.py   # of each region and door;
prints what was found
"""

import contextlib
import io
import json
import os
import random
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from paths import TINY, script

from lightbase.run.record import RunRecorder
from lightbase.run.train import main

FLIPS = int(os.environ.get("FAULT_FLIPS", 1))
SEED = int(os.environ.get("FAULT_SEED", 0))
Regions = dict[str, list[tuple[int, int]]]  # first byte and the one behind the last


def regions_of(content: bytes) -> Regions:
    """The parts of the zip archive that torch.save writes."""
    found: Regions = {
        "local header": [], "name": [], "padding": [], "pickle": [], "tensor data": [],
        "other record": [],
        "between records": [], "central directory": [], "end record": [],
    }  # fmt: skip
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        infos, directory = archive.infolist(), archive.start_dir
    for info, behind in zip(
        infos, [*(info.header_offset for info in infos[1:]), directory], strict=True
    ):
        header = info.header_offset
        name = header + 30
        padding = name + int.from_bytes(content[header + 26 : header + 28], "little")
        record = padding + int.from_bytes(content[header + 28 : header + 30], "little")
        end = record + info.file_size
        is_tensor = "/data/" in info.filename
        kind = (
            "pickle"
            if info.filename.endswith(".pkl")
            else "tensor data"
            if is_tensor
            else "other record"
        )
        found["local header"].append((header, name))
        found["name"].append((name, padding))
        found["padding"].append((padding, record))
        found[kind].append((record, end))
        found["between records"].append(
            (end, behind)
        )  # the sizes and checksum again, where there are any
    end_record = content.index(b"PK\x06\x06", directory)  # zip64's, its locator, and the old one
    found["central directory"].append((directory, end_record))
    found["end record"].append((end_record, len(content)))
    return {name: [part for part in parts if part[0] < part[1]] for name, parts in found.items()}


def damaged(content: bytes, region: list[tuple[int, int]], draw: random.Random) -> bytes:
    """With a byte or a bit of a region changed, a few bytes of zeros, or cut off there."""
    first, behind = draw.choice(region)
    position = draw.randrange(first, behind)
    kind = draw.choice(("bit", "bit", "byte", "byte", "zeros", "cut"))
    if kind == "cut":
        return content[:position]
    changed = bytearray(content)
    if kind == "zeros":
        changed[position : position + 16] = bytes(len(changed[position : position + 16]))
    else:
        changed[position] ^= 1 << draw.randrange(8) if kind == "bit" else draw.randrange(1, 256)
    return bytes(changed)


def values_of_test(results: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in results.items() if key.startswith("test/")}


class Doors:
    """What reads a checkpoint; each takes the bytes of best.ckpt and returns what comes of it."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.monkeypatch, self.number = root, monkeypatch, 0

    def run(self, *flags: str) -> tuple[dict[str, Any], Path]:
        self.number += 1
        place = ["--trainer.default_root_dir", str(self.root), "--name", f"run_{self.number}"]
        small = ["--data.num_train", "100", "--trainer.max_epochs", "2"]
        return values_of_test(
            main(["--config", TINY, *place, *small, *flags])
        ), self.root / f"run_{self.number}" / "version_0"

    def evaluate(self, content: bytes) -> Any:
        path = self.root / "best.ckpt"
        path.write_bytes(content)
        return values_of_test(script("evaluate").main(["--ckpt_path", str(path)]))

    def train(self, content: bytes) -> Any:
        """The test at the end of a run whose best.ckpt has changed on the disk."""
        self.number += 1
        path = self.root / f"run_{self.number}" / "version_0" / "checkpoints" / "best.ckpt"
        self.number -= 1
        with self.monkeypatch.context() as patch:
            patch.setattr(RunRecorder, "on_fit_end", lambda *_: path.write_bytes(content))
            return self.run()[0]

    def resume(self, content: bytes) -> Any:
        path = self.root / "best.ckpt"
        path.write_bytes(content)
        results, folder = self.run("--ckpt_path", str(path), "--trainer.max_epochs", "4")
        weights = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
        return results, {name: weight.tolist() for name, weight in weights.items()}


@pytest.fixture
def doors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Doors:
    return Doors(tmp_path, monkeypatch)


@pytest.fixture
def best(doors: Doors) -> bytes:
    _, folder = doors.run()
    return (folder / "checkpoints" / "best.ckpt").read_bytes()


def outcome(door: Callable[[bytes], Any], content: bytes) -> tuple[Any, str | None]:
    """What comes of a file: a result, or the error."""
    error = io.StringIO()
    try:
        with (
            contextlib.redirect_stderr(error),
            contextlib.redirect_stdout(io.StringIO()),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            return door(content), None
    except SystemExit as ended:
        return None, f"{error.getvalue()}status {ended.code}"


def flip(doors: Doors, name: str, best: bytes, times: int) -> None:
    door, draw, found = getattr(doors, name), random.Random(SEED), Counter[str]()
    expected, refused = outcome(door, best)
    assert refused is None
    for region, parts in regions_of(best).items():
        assert parts or region == "between records", region
        for _ in range(times if parts else 0):
            content = damaged(best, parts, draw)
            result, error = outcome(door, content)
            if error is None:
                assert result == expected, region
            else:
                assert error.startswith("error: ")
                assert "best.ckpt" in error
                *lines, status = error.splitlines()
                assert len(lines) <= 2, error
                assert status == "status 1", error
            found["the same result" if error is None else "refused"] += 1
    print(f"\n{name}: {json.dumps(found)}, seed {SEED}")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["evaluate"])
def test_a_damaged_checkpoint_gives_the_same_result_or_is_refused(doors, best, name):
    flip(doors, name, best, times=2)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["evaluate", "train", "resume"])
def test_many_damaged_checkpoints(doors: Doors, best: bytes, name: str) -> None:
    flip(doors, name, best, times=FLIPS)
