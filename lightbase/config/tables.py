"""Tables as text: for CSV files and for the terminal."""

import csv
import io
from collections.abc import Sequence

Table = Sequence[Sequence[object]]
"""Rows of one length. The names of the columns are the first row."""


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
