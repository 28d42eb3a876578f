"""Damaged checkpoints: the same result to the last bit, or an error of two lines.

FAULT_FLIPS=270 pytest -m slow -n 0 -s lightbase/tests/faults/test_flips.py
"""

import contextlib
import io
import os
import random
import warnings
import zipfile
from pathlib import Path

import pytest
from paths import script

FLIPS = int(os.environ.get("FAULT_FLIPS", 9))
SEED = int(os.environ.get("FAULT_SEED", 0))


def damaged(content: bytes, number: int, draw: random.Random) -> bytes:
    """With a byte changed, a few bytes of zeros, or cut off. In turns this happens
    anywhere, in the header of a record, and behind the last record."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        headers = [record.header_offset for record in archive.infolist()]
        directory = archive.start_dir
    position = (
        draw.randrange(len(content)),
        draw.choice(headers) + draw.randrange(64),
        draw.randrange(directory, len(content)),
    )[number % 3]
    before, after = content[:position], content[position:]
    kind = draw.choice(("byte", "zeros", "cut"))
    if kind == "cut":
        return before
    if kind == "zeros":
        return before + bytes(16) + after[16:]
    return before + bytes([after[0] ^ draw.randrange(1, 256)]) + after[1:]


def evaluate(best: Path) -> dict[str, float]:
    return script("evaluate").main(["--ckpt_path", str(best)])


@pytest.mark.slow
def test_a_damaged_checkpoint_gives_the_same_result_or_is_refused(trained, tmp_path):
    draw, best = random.Random(SEED), tmp_path / "best.ckpt"
    sound = (trained()[0] / "checkpoints" / "best.ckpt").read_bytes()
    best.write_bytes(sound)
    expected = evaluate(best)
    for number in range(FLIPS):
        best.write_bytes(damaged(sound, number, draw))
        error, status = io.StringIO(), 0
        try:
            with contextlib.redirect_stderr(error), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                assert evaluate(best) == expected
        except SystemExit as ended:
            status = ended.code
        if status:
            text = error.getvalue()
            assert text.startswith("error: ")
            assert "best.ckpt" in text
            assert len(text.splitlines()) <= 2, text
