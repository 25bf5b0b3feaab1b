"""Output of the commands: tables for people, JSON for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

WIDE = 200
"""Columns where there is no terminal that has some."""
UNITS = ("B", "kB", "MB", "GB", "TB")


def print_json(content: Any) -> None:
    """One JSON document."""
    sys.stdout.write(json.dumps(content, indent=1, allow_nan=False) + "\n")


def print_line(text: str) -> None:
    """One line, however long."""
    sys.stdout.write(text + "\n")


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> None:
    """Rows under columns; all but the first `left` are aligned to the right."""
    table = Table(box=None, pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < left else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console = Console(width=None if sys.stdout.isatty() else WIDE, markup=False, highlight=False)
    console.print(table)


def readable_bytes(size: float) -> str:
    """Three digits and a unit."""
    for unit in UNITS[:-1]:
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.4g} {UNITS[-1]}"
