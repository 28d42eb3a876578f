"""Damaged checkpoints: through every door the same result to the last bit, or an error of two
lines.

FAULT_FLIPS=270 pytest -m slow -n 0 -s tests/lightbase/faults/test_flips.py   # for each door
"""

import contextlib
import io
import os
import random
import warnings
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from paths import TINY, argv, script

from lightbase.run.record import RunRecorder
from lightbase.run.train import main

FLIPS = int(os.environ.get("FAULT_FLIPS", 9))
SEED = int(os.environ.get("FAULT_SEED", 0))


def damaged(content: bytes, number: int, draw: random.Random) -> bytes:
    """With a bit or a byte changed, a few bytes of zeros, or cut off. In turns this happens
    anywhere, in the header of a record, and behind the last record."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        headers, directory = [i.header_offset for i in archive.infolist()], archive.start_dir
    position = (
        draw.randrange(len(content)),
        draw.choice(headers) + draw.randrange(64),
        draw.randrange(directory, len(content)),
    )[number % 3]
    kind = draw.choice(("bit", "byte", "zeros", "cut"))
    if kind == "cut":
        return content[:position]
    changed = bytearray(content)
    if kind == "zeros":
        changed[position : position + 16] = bytes(len(changed[position : position + 16]))
    else:
        changed[position] ^= 1 << draw.randrange(8) if kind == "bit" else draw.randrange(1, 256)
    return bytes(changed)


class Doors:
    """What reads a checkpoint. Each takes the bytes of best.ckpt and returns what comes of it."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.monkeypatch, self.number = root, monkeypatch, 0

    def run(self, *flags: object) -> tuple[dict[str, Any], Path]:
        self.number += 1
        place = ("--trainer.default_root_dir", self.root, f"--name run_{self.number}")
        results = main(argv("--config", TINY, *place, "--data.num_train 100", *flags))
        checkpoints = self.root / f"run_{self.number}" / "version_0" / "checkpoints"
        return {k: v for k, v in results.items() if k.startswith("test/")}, checkpoints

    def evaluate(self, content: bytes) -> Any:
        (self.root / "best.ckpt").write_bytes(content)
        return script("evaluate").main(["--ckpt_path", str(self.root / "best.ckpt")])

    def train(self, content: bytes) -> Any:
        """The test at the end of a run whose best.ckpt has changed on the disk."""
        best = self.root / f"run_{self.number + 1}" / "version_0" / "checkpoints" / "best.ckpt"
        with self.monkeypatch.context() as patch:
            patch.setattr(RunRecorder, "on_fit_end", lambda *_: best.write_bytes(content))
            return self.run()[0]

    def resume(self, content: bytes) -> Any:
        best = self.root / "best.ckpt"
        best.write_bytes(content)
        results, checkpoints = self.run("--ckpt_path", best, "--trainer.max_epochs 4")
        weights = torch.load(checkpoints / "last.ckpt", weights_only=True)["state_dict"]
        return results, {name: weight.tolist() for name, weight in weights.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["evaluate", "train", "resume"])
def test_a_damaged_checkpoint_gives_the_same_result_or_is_refused(tmp_path, monkeypatch, name):
    doors, draw = Doors(tmp_path, monkeypatch), random.Random(SEED)
    best = (doors.run()[1] / "best.ckpt").read_bytes()
    expected = getattr(doors, name)(best)
    for number in range(FLIPS):
        content, error, status = damaged(best, number, draw), io.StringIO(), None
        try:
            with contextlib.redirect_stderr(error), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                assert getattr(doors, name)(content) == expected
        except SystemExit as ended:
            status = ended.code
        if status is not None:
            text = error.getvalue()
            assert status == 1
            assert text.startswith("error: ")
            assert "best.ckpt" in text
            assert len(text.splitlines()) <= 2, text
