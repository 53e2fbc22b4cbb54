"""Schemas allow what their author meant, closed and moved, by what the compiler makes of them."""

import json
from pathlib import Path
from typing import Any

import pytest

from scheduler_service.frontend.structured_output.schemas import closed, moved
from tests.support.json_schemas import accepts

Schema = dict[str, Any]


def read(file: str) -> dict[str, tuple[Schema, list[Any], list[Any]]]:
    """By name: a schema, values that it allows and others."""
    cases = {}
    for block in (Path(__file__).parent / file).read_text().split("\n\n")[1:]:
        name, schema, *values = block.strip("\n").split("\n  ")
        good, bad = (
            [json.loads(value[2:]) for value in values if value[0] == sign] for sign in "+-"
        )
        cases[name] = json.loads(schema), good, bad
    return cases


CLOSED, MOVED = read("closed_schemas.txt"), read("referring_schemas.txt")


def test_objects_of_a_schema_are_closed_unless_it_says_so() -> None:
    point = {"type": "object", "properties": {"x": {"type": "number"}}}
    schema: Schema = {
        "type": "object",
        "properties": {
            "properties": point,
            "open": point | {"additionalProperties": True},
            "named": point | {"patternProperties": {"^y": {}}},
            "any": {"anyOf": [point, {"type": "null"}]},
            "list": {"type": "array", "items": point, "prefixItems": [{"$ref": "#/$defs/p"}]},
            "map": {"type": "object"},
        },
        "$defs": {"p": point},
    }
    shut = point | {"additionalProperties": False}
    assert closed(schema) == {
        "type": "object",
        "properties": {
            "properties": shut,
            "open": point | {"additionalProperties": True},
            "named": point | {"patternProperties": {"^y": {}}},
            "any": {"anyOf": [shut, {"type": "null"}]},
            "list": {"type": "array", "items": shut, "prefixItems": [{"$ref": "#/$defs/p"}]},
            "map": {"type": "object"},
        },
        "$defs": {"p": shut},
        "additionalProperties": False,
    }


@pytest.mark.parametrize("name", CLOSED)
def test_a_closed_schema_allows_what_it_describes_and_no_more(name: str) -> None:
    schema, good, bad = CLOSED[name]
    before = json.dumps(schema)
    found = closed(schema)
    assert [value for value in good if not accepts(found, value)] == []
    assert [value for value in bad if accepts(found, value)] == []
    assert json.dumps(schema) == before, "the client's own is as it was"


@pytest.mark.parametrize("name", MOVED)
def test_references_lead_to_the_same_wherever_a_schema_stands(name: str) -> None:
    schema, [good], [bad] = MOVED[name]
    other: Schema = {"$defs": {"C": {"type": "null"}}, "type": "object", "properties": {"a": {}}}
    outer: Schema = {
        "anyOf": [
            {"properties": {"first": moved(other, "/anyOf/0/properties/first")}},
            {"properties": {"p": moved(schema, "/anyOf/1/properties/p")}},
        ],
        "type": "object",
        "additionalProperties": True,
    }
    for choice in outer["anyOf"]:
        choice |= {"required": list(choice["properties"]), "additionalProperties": False}
    assert accepts(outer, {"p": good})
    assert not accepts(outer, {"p": bad})
    assert accepts(moved(schema), good)
    assert not accepts(moved(schema), bad)
    assert accepts(closed(schema), good)


def test_a_reference_that_leads_nowhere_does_not_lead_into_the_outer_schema() -> None:
    inner = moved({"$ref": "#/$defs/C"}, "/properties/p")
    outer = {"$defs": {"C": {}}, "type": "object", "properties": {"p": inner}}
    with pytest.raises(ValueError, match="'/properties/p/\\$defs/C' does not exist"):
        accepts(outer, {})


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": 5, "required": "x", "allOf": {}, "anyOf": 3, "$ref": 7, "$defs": []},
        {"allOf": [1, None, True], "required": [1]},
        {"$id": "http://[", "$ref": "x", "items": True},
        {"$ref": "#/$defs/A", "$defs": {"A": {"$ref": "#/$defs/A"}}},
        {"$defs": {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(5000)}, "$ref": "#/$defs/0"},
        [1],
        True,
    ],
    ids=lambda schema: str(schema)[:40],
)
def test_what_is_no_schema_is_left_to_the_check_of_constraints(schema: Any) -> None:
    closed(schema)
    moved(schema, "/x")
