"""No modules import each other in a circle, and one module assigns each field of a sequence."""

import ast
from collections.abc import Iterator, Mapping

from tests.architecture.source_tree import Module, circles, import_graph, read_modules
from tools.launch import ROOT

CORE = "scheduler_service.core"
FIELDS = {"length", "num_computed"}
"""Fields of a sequence that are checked although other classes have fields of these names."""


def _assigned(tree: ast.AST) -> Iterator[ast.Attribute]:
    """The attributes that code assigns or deletes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
            yield node


def _fields(node: ast.ClassDef) -> set[str]:
    """The annotated fields in a class's body."""
    return {
        field.target.id
        for field in node.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    }


def writers_of_sequences(modules: Mapping[str, Module]) -> dict[str, list[str]]:
    """The modules of the core that assign each field of `Sequence`: those in FIELDS, and those that
    no other class of the core has. `self.field` elsewhere is another class's own field."""
    core = {name: module for name, module in modules.items() if f"{name}.".startswith(f"{CORE}.")}
    home, fields, other = "", set[str](), set[str]()
    for name, module in core.items():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef) and node.name == "Sequence":
                home, fields = name, _fields(node)
            elif isinstance(node, ast.ClassDef):
                own = (field for field in _assigned(node) if ast.unparse(field.value) == "self")
                other |= _fields(node) | {field.attr for field in own}
    assert fields, "the core defines the class Sequence"
    writers: dict[str, set[str]] = {name: set() for name in fields & FIELDS | fields - other}
    for name, module in core.items():
        for field in _assigned(module.tree):
            if field.attr in writers and (name == home or ast.unparse(field.value) != "self"):
                writers[field.attr].add(name)
    return {field: sorted(names) for field, names in writers.items()}


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert circles(import_graph(read_modules(ROOT))) == []


def test_one_module_assigns_each_field_of_a_sequence() -> None:
    writers = writers_of_sequences(read_modules(ROOT))
    assert writers.keys() >= FIELDS
    assert {field: names for field, names in writers.items() if len(names) > 1} == {}
