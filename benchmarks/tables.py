"""Command lines and tables of results that the scripts have in common."""

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

    `columns`: titles by the names in a row; without them, all names of the first row.
    A value that a row lacks is an empty string for `cell`.
    """
    titles = columns or {name: name for name in rows[0]}
    table = Table(*titles.values(), title=title)
    for row in rows:
        table.add_row(*(cell(row.get(name, "")) for name in titles))
    Console(width=width).print(table)


def general(value: object) -> str:
    """A number as `format(value, "g")` has it; empty for None."""
    return f"{value:g}" if isinstance(value, (int, float)) else ""
