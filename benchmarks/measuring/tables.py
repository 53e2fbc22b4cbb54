"""Command lines and tables of results, shared by the scripts."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.measuring.machine import RESULTS, save

Columns = Mapping[str, str]
"""Titles by the names in a row."""

Rows = Sequence[Mapping[str, Any]]


def script_parser(doc: str | None) -> argparse.ArgumentParser:
    """A parser with `--results`, described by the first line of a script's docstring."""
    assert doc is not None
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the JSON file")
    return parser


def publish(
    name: str,
    facts: str,
    columns: Columns,
    rows: Rows,
    foreign_cores: float,
    folder: Path,
    **figures: object,
) -> None:
    """Print a table, and write it to FOLDER/NAME.json, from which `benchmarks.report` makes a
    section of docs/benchmarks.md.

    `facts`: sentences that the table does not say. `columns`: those that are shown; a row may hold
    more. `figures`: further results, which only the file holds.
    """
    print_table(rows, facts, columns, cell=text)
    content = {"facts": facts, **figures, "columns": columns, "rows": rows}
    save(name, content, foreign_cores, folder)


def print_table(
    rows: Rows, title: str, columns: Columns | None = None, *, cell: Callable[[object], str] = str
) -> None:
    """Print a table of results.

    `columns`: titles by the names in a row; None for all names of the first row. `cell`: formats a
    value; it gets an empty string for a value that a row lacks.
    """
    titles = columns or {name: name for name in rows[0]}
    table = Table(*titles.values(), title=title)
    for row in rows:
        table.add_row(*(cell(row.get(name, "")) for name in titles))
    Console(width=180).print(table)


def text(value: object) -> str:
    """A value in a cell: numbers from 100 on without decimals, and empty for None."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
