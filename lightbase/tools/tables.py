"""Rows of cells, as CSV and as a table for the terminal; what predict.py, evaluate.py, runs.py and
sweep.py show."""

import csv
import io
import re
from collections.abc import Sequence

from lightbase.ranks import printable


def as_csv(rows: Sequence[Sequence[object]]) -> str:
    """rows: the columns' names first; of None a cell is empty."""
    text = io.StringIO()
    csv.writer(text).writerows(
        [["" if cell is None else for_spreadsheet(str(cell)) for cell in row] for row in rows]
    )
    return text.getvalue()


def as_table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines. rows: the columns' names first, one at least."""
    rows = [tuple(map(printable, row)) for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def count(num: int, noun: str) -> str:
    return f"{num} {noun}{'s' * (num != 1)}"


def for_spreadsheet(cell: str) -> str:
    """A cell that opens as text, not as a formula, in UTF-8; numbers stay as they are."""
    cell = cell.encode(errors="backslashreplace").decode()
    return f"'{cell}" if re.match(r"[=@\t\r]|[+-](?![\d.]+(e[+-]?\d+)?$|inf$)", cell) else cell
