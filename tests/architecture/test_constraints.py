"""What a frontend checks is what a worker compiles, though neither imports the other."""

import json

import pytest

from scheduler_service.frontend.structured_output import lark, problems
from worker_service.sampling_params import ConstraintKind
from worker_service.structured import grammars
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
def test_both_make_the_same_grammar(kind: ConstraintKind, texts: list[str], checked: str) -> None:
    assert to_lark(kind, texts) == checked


def test_both_have_the_same_limits() -> None:
    names = [name for name in dir(grammars.LIMITS) if not name.startswith("_")]
    assert len(names) == 8
    for name in names:
        assert getattr(grammars.LIMITS, name) == getattr(problems.LIMITS, name)
