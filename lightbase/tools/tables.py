"""Rows of cells as CSV, and as a table for the terminal."""

import csv
import io
import re
from collections.abc import Sequence

from lightbase.ranks import printable


def as_csv(rows: Sequence[Sequence[object]]) -> str:
    """rows: The names of the columns first. None is an empty cell."""
    text = io.StringIO()
    writer = csv.writer(text)
    for row in rows:
        writer.writerow(["" if cell is None else for_spreadsheet(str(cell)) for cell in row])
    return text.getvalue()


def as_table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines with aligned columns. rows: The names of the columns first, so one row at least."""
    rows = [tuple(map(printable, row)) for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return lines


def for_spreadsheet(cell: str) -> str:
    """A cell in UTF-8 that a spreadsheet opens as text, not as a formula. Numbers stay."""
    cell = cell.encode(errors="backslashreplace").decode()
    is_formula = re.match(r"[=@\t\r]|[+-](?![\d.]+(e[+-]?\d+)?$|inf$)", cell)
    return f"'{cell}" if is_formula else cell
