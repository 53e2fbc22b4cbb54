"""No modules import each other in a circle, and one module assigns each field of a sequence."""

import ast
from collections.abc import Iterator, Mapping

import pytest

from tests.architecture.source_tree import Module, circles, import_graph, read_modules
from tools.launch import ROOT

CORE = "scheduler_service.core"
FIELDS = {"Sequence": {"status"}, "Growth": {"length"}, "Prefill": {"num_computed"}}
"""A sequence and its parts: fields that are checked although other classes have fields of these
names."""


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


def writers_of(kind: str, modules: Mapping[str, Module]) -> dict[str, list[str]]:
    """The modules of the core that assign each field of a class: those in FIELDS, and those that no
    other class of the core has. `self.field` elsewhere is another class's own field."""
    core = {name: module for name, module in modules.items() if f"{name}.".startswith(f"{CORE}.")}
    home, fields, other = "", set[str](), set[str]()
    for name, module in core.items():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef) and node.name == kind:
                home, fields = name, _fields(node)
            elif isinstance(node, ast.ClassDef):
                own = (field for field in _assigned(node) if ast.unparse(field.value) == "self")
                other |= _fields(node) | {field.attr for field in own}
    assert fields, f"the core defines the class {kind}"
    writers: dict[str, set[str]] = {name: set() for name in fields & FIELDS[kind] | fields - other}
    for name, module in core.items():
        for field in _assigned(module.tree):
            if field.attr in writers and (name == home or ast.unparse(field.value) != "self"):
                writers[field.attr].add(name)
    return {field: sorted(names) for field, names in writers.items()}


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert circles(import_graph(read_modules(ROOT))) == []


@pytest.mark.parametrize("kind", FIELDS)
def test_one_module_assigns_each_field_of_a_sequence(kind: str) -> None:
    writers = writers_of(kind, read_modules(ROOT))
    assert writers.keys() >= FIELDS[kind]
    assert {field: names for field, names in writers.items() if len(names) > 1} == {}
