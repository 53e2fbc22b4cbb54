"""Command lines and tables of results, shared by the scripts."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.machine import RESULTS


def script_parser(doc: str | None) -> argparse.ArgumentParser:
    """A parser with `--results`, described by the first line of a script's docstring."""
    assert doc is not None
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the JSON file")
    return parser


def print_table(
    rows: Sequence[Mapping[str, object]],
    title: str,
    columns: Mapping[str, str] | None = None,
    *,
    width: int = 160,
    cell: Callable[[object], str] = str,
) -> None:
    """Print a table of results.

    `columns`: titles by the names in a row; None for all names of the first row. `cell`: formats a
    value; it gets an empty string for a value that a row lacks.
    """
    titles = columns or {name: name for name in rows[0]}
    table = Table(*titles.values(), title=title)
    for row in rows:
        table.add_row(*(cell(row.get(name, "")) for name in titles))
    Console(width=width).print(table)


def general(value: object) -> str:
    """Format a number by `format(value, "g")`; empty for None."""
    return f"{value:g}" if isinstance(value, (int, float)) else ""
