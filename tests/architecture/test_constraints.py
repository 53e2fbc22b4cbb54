"""A worker compiles the grammar that a frontend checks."""

import json

import pytest

from service_common import lark
from worker_service.plan import ConstraintKind
from worker_service.structured.grammars import to_lark

SCHEMA = {"type": "object", "properties": {'"/\n': {"const": "é"}}, "x-guidance": {"lenient": True}}
PATTERN = "a/b\\/c\n[/]\\\\/\r\\\n"
CHOICES = ["a.b", "/", "\\", "(x)|[y]{2}^$", "é\n"]


@pytest.mark.parametrize(
    ("kind", "texts", "checked"),
    [
        (ConstraintKind.JSON_SCHEMA, [json.dumps(SCHEMA)], lark.schema_to_lark(SCHEMA)),
        (ConstraintKind.JSON_SCHEMA, ["true"], lark.schema_to_lark({})),
        (ConstraintKind.REGEX, [PATTERN], lark.regex_to_lark(PATTERN)),
        (ConstraintKind.GRAMMAR, ['start: "a"'], lark.grammar_to_lark('start: "a"')),
        (ConstraintKind.CHOICE, CHOICES, lark.choice_to_lark(CHOICES)),
    ],
)
def test_each_kind_of_constraint_is_the_grammar_that_frontends_check(
    kind: ConstraintKind, texts: list[str], checked: str
) -> None:
    assert to_lark(kind, texts) == checked
