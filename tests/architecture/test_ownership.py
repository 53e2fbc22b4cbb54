"""The state of a sequence changes in its modules, whose methods keep its invariants."""

import ast
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

from scheduler_service.core.progress import Growth, Prefill
from scheduler_service.core.sequence import Sequence

CORE = Path(__file__).parents[2] / "scheduler_service" / "core"
OWNERS = {"sequence.py", "progress.py"}
FIELDS = {field.name for kind in (Sequence, Growth, Prefill) for field in fields(kind)}
CHANGES = {"append", "clear", "extend", "insert", "pop", "remove", "reverse", "sort"}


def is_field(node: ast.AST) -> bool:
    """Whether this is the field of a sequence, or one with such a name, of an object other than
    self."""
    if isinstance(node, ast.Subscript | ast.Starred):
        return is_field(node.value)
    is_own = isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "self"
    return isinstance(node, ast.Attribute) and node.attr in FIELDS and not is_own


def changes(source: str) -> Iterator[str]:
    """The statements that change a sequence's fields."""
    for node in ast.walk(ast.parse(source)):
        targets: list[ast.AST] = []
        match node:
            case ast.Assign() | ast.Delete() | ast.AugAssign() | ast.AnnAssign():
                targets = [
                    part
                    for part in ast.walk(node)
                    if not isinstance(getattr(part, "ctx", ast.Load()), ast.Load)
                ]
            case ast.Call(func=ast.Attribute(value=ast.Attribute() as changed, attr=attr)):
                targets = [changed] if attr in CHANGES else []
        if any(map(is_field, targets)):
            yield ast.unparse(node)


def test_nothing_outside_its_modules_changes_a_sequences_fields() -> None:
    modules = [path for path in CORE.rglob("*.py") if path.name not in OWNERS]
    found = {path.name: list(changes(path.read_text())) for path in modules}
    assert len(found) > 40
    assert {name: lines for name, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "change",
    [
        *(
            "seq.growth.length = 1",
            "growth.length += 1",
            "(a, seq.status) = (1, 2)",
            "del seq.forks[1:]",
        ),
        *("seq.output_token_ids.append(3)", "group.longest.output_token_ids[0] = 3"),
    ],
)
def test_each_way_to_change_a_field_is_found(change: str) -> None:
    assert list(changes(change))


def test_reading_a_field_is_no_change() -> None:
    assert not list(changes("self.length = other[seq.growth.length] = seq.forks.copy()"))
