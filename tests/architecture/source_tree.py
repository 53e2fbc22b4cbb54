"""The modules of a checkout, read with `ast`: nothing is imported.

- Module: a `.py` file outside tests, `__init__.py` included, generated `*_pb2*` excluded.
- Import circle: modules that import one another. Imports in functions and under `TYPE_CHECKING`
  count; importing a submodule does not count as importing its package.
"""

import ast
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

SOURCE_ROOTS = (".", "kernels", "client", "protos")
"""Folders of a checkout that are on the import path."""
SKIPPED_FOLDERS = {"__pycache__", "node_modules", "build", "dist", "site", "venv"}


@dataclass(frozen=True)
class Module:
    """One Python module of a checkout."""

    name: str
    """The name by which it is imported."""
    file: Path
    """Relative to the checkout."""
    tree: ast.Module
    imports: dict[str, tuple[str, str | None]]
    """The module, and the name within it or None, by bound name."""


def python_files(checkout: Path) -> Iterator[Path]:
    """Python files outside tests, relative to the checkout; no generated ones."""
    for path, folders, files in os.walk(checkout):
        folder = Path(path)
        folders[:] = sorted(
            name
            for name in folders
            if not name.startswith(".")
            and name not in SKIPPED_FOLDERS
            and not (folder == checkout and name == "tests")
            and not (folder / name / "pyvenv.cfg").exists()
        )
        for name in sorted(files):
            if name.endswith(".py") and "_pb2" not in name:
                yield (folder / name).relative_to(checkout)


@cache
def read_modules(checkout: Path) -> dict[str, Module]:
    """All modules of a checkout outside tests, by name."""
    modules = {}
    for file in python_files(checkout):
        text = (checkout / file).read_text(encoding="utf-8")
        parts = file.with_suffix("").parts
        parts = parts[1:] if len(parts) > 1 and parts[0] in SOURCE_ROOTS else parts
        package = parts[:-1]
        name = ".".join(package if parts[-1] == "__init__" else parts)
        tree = ast.parse(text, str(file))
        modules[name] = Module(name, file, tree, _imports(tree, package))
    return modules


def _imports(tree: ast.Module, package: tuple[str, ...]) -> dict[str, tuple[str, str | None]]:
    imports: dict[str, tuple[str, str | None]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                imports[alias.asname or alias.name.partition(".")[0]] = alias.name, None
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            source = ".".join([*base, *filter(None, [node.module])])
            for alias in node.names:
                imports[alias.asname or alias.name] = source, alias.name
    return imports


def import_graph(modules: Mapping[str, Module]) -> dict[str, set[str]]:
    """The modules that each one imports."""
    graph: dict[str, set[str]] = {}
    for name, module in modules.items():
        targets = {
            f"{source}.{member}" if f"{source}.{member}" in modules else source
            for source, member in module.imports.values()
        }
        graph[name] = targets & modules.keys() - {name}
    return graph


def circles(graph: Mapping[str, set[str]]) -> list[tuple[str, ...]]:
    """The sets of more than one node that can all be reached from one another."""
    reachable = {}
    for root in graph:
        found: set[str] = set()
        todo = [root]
        while todo:
            new = graph[todo.pop()] - found
            found |= new
            todo += new
        reachable[root] = found
    in_circles = [node for node in graph if node in reachable[node]]
    return sorted(
        {tuple(sorted(n for n in reachable[root] if root in reachable[n])) for root in in_circles}
    )
