"""Read and write files, and the texts for them: JSON, CSV, and tables for the terminal.

A file is written completely or not at all.
"""

import contextlib
import csv
import io
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightbase.config.errors import UserError

Values = dict[str, Any]
"""Values by name, such as settings by the names of their flags."""

Table = Sequence[Sequence[object]]
"""Rows of one length. The names of the columns are the first row."""


def write_whole(
    path: Path, content: str | bytes | memoryview, way_out: str = ""
) -> None:
    """Write a file completely or not at all: an earlier file survives a full disk or a
    crash. The content goes to .NAME.part in the same folder, which is then renamed.
    Raise UserError, with this way out, if the file cannot be written."""
    if isinstance(content, str):
        content = content.encode()
    # always the same name, so that the next write replaces what a crash has left
    staged = path.parent / f".{path.name}.part"
    try:
        staged.unlink(missing_ok=True)  # it may be a link
        with staged.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        staged.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            staged.unlink()
        raise UserError(
            f"{path} cannot be written: {error.strerror}; what was saved before is "
            "whole",
            way_out,
        ) from error


def read_json(path: Path) -> Values:
    """Return the content of a JSON file of a run."""
    try:
        return json.loads(path.read_text("utf-8"))  # type: ignore[no-any-return]
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error


def json_text(values: Values, indent: int | None = None) -> str:
    """Return JSON with null for NaN and infinity, which JSON lacks, directly in
    `values`."""
    finite = dict(values)
    for key, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            finite[key] = None
    return json.dumps(finite, indent=indent, allow_nan=False)


def relative_to_cwd(path: Path) -> str:
    """Return the path relative to the working folder if it lies below that folder, else
    the path as it is."""
    if path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    return str(path)


def as_csv(rows: Table) -> bytes:
    """Return the content of a CSV file in UTF-8, with numbers in all their digits. None
    is an empty cell."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    # the name of a file may not be UTF-8
    return text.getvalue().encode(errors="backslashreplace")


def as_text(cell: object) -> str:
    """Return a cell for the terminal: floats have four significant digits, None is
    "-"."""
    if cell is None:
        return "-"
    if isinstance(cell, float):
        return f"{cell:.4g}"
    text = str(cell)
    if not text.isprintable():  # a file's name may have line breaks, or not be UTF-8
        return ascii(text)
    return text


def as_table(rows: Table) -> list[str]:
    """Return the lines of a table with aligned columns, for the terminal."""
    texts = [list(map(as_text, row)) for row in rows]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    form = "  ".join(f"{{:<{width}}}" for width in widths)  # "{:<5}  {:<7}"
    return [form.format(*words).rstrip() for words in texts]
