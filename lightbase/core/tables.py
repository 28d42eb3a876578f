"""Tables as text: for CSV files and for the terminal."""

import csv
import io
from collections.abc import Sequence

from lightbase.core.errors import printable


def as_csv(rows: Sequence[Sequence[object]]) -> str:
    """Return the text of a CSV file.

    rows: The names of the columns come first. None is an empty cell.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for row in rows:
        writer.writerow(["" if cell is None else printable(str(cell)) for cell in row])
    return text.getvalue()


def as_table(rows: Sequence[Sequence[object]]) -> list[str]:
    """Return lines with aligned columns. Floats have four decimals.

    rows: The names of the columns come first, so there is one row at least.
    """
    texts: list[list[str]] = []
    for row in rows:
        cells = [f"{cell:.4f}" if isinstance(cell, float) else cell for cell in row]
        texts.append([printable(str(cell)) for cell in cells])
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    lines = []
    for words in texts:
        padded = [word.ljust(width) for word, width in zip(words, widths, strict=True)]
        lines.append("  ".join(padded).rstrip())
    return lines
