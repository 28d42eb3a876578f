"""Tables as text: for CSV files and for the terminal.

Cells may hold names from files of somebody else. So control characters, which could
change the terminal or break a line, become escapes such as \\n.
"""

import csv
import io
from collections.abc import Sequence

from lightbase.core.errors import printable


def as_csv(rows: Sequence[Sequence[object]]) -> str:
    """Return the text of a CSV file, with numbers in all their digits.

    rows: The names of the columns are the first row. None is an empty cell.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for row in rows:
        cells = []
        for cell in row:
            if cell is None:
                cells.append("")
            else:
                cells.append(printable(str(cell)))
        writer.writerow(cells)
    return text.getvalue()


def as_table(rows: Sequence[Sequence[object]]) -> list[str]:
    """Return the lines of a table with aligned columns, for the terminal. Floats have
    four decimals.

    rows: The names of the columns are the first row. All rows have the same length.
    """
    texts: list[list[str]] = []
    for row in rows:
        cells = []
        for cell in row:
            if isinstance(cell, float):
                cells.append(f"{cell:.4f}")
            else:
                cells.append(printable(str(cell)))
        texts.append(cells)
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    lines = []
    for words in texts:
        padded = [word.ljust(width) for word, width in zip(words, widths, strict=True)]
        lines.append("  ".join(padded).rstrip())
    return lines
