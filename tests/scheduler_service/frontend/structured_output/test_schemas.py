"""Schemas allow what their author meant, closed and moved, by what the compiler makes of them."""

import json
from typing import Any

import pytest

from scheduler_service.frontend.structured_output.schemas import closed, moved
from tests.support.json_schemas import accepts

Schema = dict[str, Any]
A: Schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
B: Schema = {"type": "object", "properties": {"b": {"type": "integer"}}, "required": ["b"]}
KIND: Schema = {
    "type": "object",
    "properties": {"kind": {"type": "string"}},
    "required": ["kind"],
}
DEFS: Schema = {"$defs": {"A": A, "B": B}}
REF_A, REF_B = {"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}
BASE: Schema = {
    "type": "object",
    "properties": {
        "id": {"type": "integer"},
        "parent": {"anyOf": [{"$ref": "#/$defs/Node"}, {"type": "null"}]},
    },
    "required": ["id"],
}
NODE: Schema = {
    "allOf": [
        {"$ref": "#/$defs/Base"},
        {
            "type": "object",
            "properties": {"kids": {"type": "array", "items": {"$ref": "#/$defs/Node"}}},
            "required": ["kids"],
        },
    ]
}
OPERATION: Schema = {"type": "object", "properties": {"op": {"type": "string"}}, "required": ["op"]}
UNARY: Schema = {"properties": {"of": {"$ref": "#/$defs/Expression"}}, "required": ["of"]}
LITERAL: Schema = {"properties": {"value": {"type": "integer"}}, "required": ["value"]}
EXPRESSION: Schema = {
    "$defs": {
        "Expression": OPERATION | {"anyOf": [{"$ref": "#/$defs/U"}, {"$ref": "#/$defs/L"}]},
        "U": UNARY,
        "L": LITERAL,
    },
    "$ref": "#/$defs/Expression",
}
EITHER = ([{"kind": "x", "a": 1}, {"kind": "x", "b": 1}], [{"kind": "x"}, {"a": 1}])
ONE = {"kind": "x", "a": 1, "b": 2}

CLOSED: dict[str, tuple[Schema, list[Any], list[Any]]] = {
    "anyOf beside properties": (KIND | {"anyOf": [A, B]}, EITHER[0], [*EITHER[1], ONE]),
    "oneOf beside properties": (KIND | {"oneOf": [A, B]}, EITHER[0], [*EITHER[1], ONE]),
    "references in anyOf beside properties": (
        KIND | DEFS | {"anyOf": [REF_A, REF_B]},
        EITHER[0],
        [*EITHER[1], ONE],
    ),
    "references in oneOf beside properties": (
        KIND | DEFS | {"oneOf": [REF_A, REF_B]},
        EITHER[0],
        [*EITHER[1], ONE],
    ),
    "anyOf without properties": (
        DEFS | {"anyOf": [REF_A, REF_B]},
        [{"a": 1}, {"b": 1}],
        [{"a": 1, "b": 1}, {"a": 1, "z": 1}],
    ),
    "allOf": ({"allOf": [A, B]}, [{"a": 1, "b": 2}], [{"a": 1}, {"a": 1, "b": 2, "z": 1}]),
    "allOf beside properties": (
        {"allOf": [A, B]} | KIND,
        [{"a": 1, "b": 2, "kind": "x"}],
        [{"a": 1, "b": 2}, {"a": 1, "b": 2, "kind": "x", "z": 1}],
    ),
    "allOf of one reference": (DEFS | {"allOf": [REF_A]}, [{"a": 1}], [{"a": 1, "z": 1}]),
    "allOf of a reference and properties": (
        DEFS | {"allOf": [REF_A, B]},
        [{"a": 1, "b": 1}],
        [{"a": 1}, {"a": 1, "b": 1, "z": 1}],
    ),
    "a reference beside properties": (
        DEFS | REF_A | KIND,
        [{"a": 1, "kind": "x"}],
        [{"a": 1}, {"a": 1, "kind": "x", "z": 1}],
    ),
    "allOf in anyOf": (
        KIND | {"anyOf": [{"allOf": [A, {"properties": {"c": {"type": "integer"}}}]}, B]},
        [{"kind": "x", "a": 1, "c": 1}, {"kind": "x", "b": 1}],
        [{"kind": "x", "c": 1}, {"kind": "x", "a": 1, "z": 1}],
    ),
    "a choice without properties": (
        KIND | {"anyOf": [A, {"type": "object"}]},
        [{"kind": "x", "a": 1}, {"kind": "x"}],
        [{"kind": "x", "z": 1}],
    ),
    "choices that only require": (
        {"type": "object", "properties": {"a": {}, "b": {}}}
        | {"anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        [{"a": 1}, {"b": 2}, {"a": 1, "b": 2}],
        [{}, {"a": 1, "z": 2}],
    ),
    "a required property that is not described": (
        {"type": "object", "properties": {"b": {"type": "integer"}}, "required": ["a", "b"]},
        [{"b": 1, "a": [1]}],
        [{"b": 1}, {"b": 1, "a": 1, "z": 1}],
    ),
    "inheritance that refers to itself": (
        {"$defs": {"Base": BASE, "Node": NODE}, "$ref": "#/$defs/Node"},
        [{"id": 1, "parent": None, "kids": [{"id": 2, "kids": []}]}],
        [{"id": 1, "kids": [{"id": 2, "kids": [], "z": 1}]}],
    ),
    "a base that is also a value alone": (
        {
            "$defs": {"A": A, "S": {"allOf": [REF_A, B]}},
            "properties": {"base": REF_A, "sub": {"$ref": "#/$defs/S"}},
            "type": "object",
        },
        [{"base": {"a": 1}, "sub": {"a": 1, "b": 1}}],
        [{"base": {"a": 1, "z": 1}}, {"sub": {"a": 1}}, {"sub": {"a": 1, "b": 1, "z": 1}}],
    ),
    "a property that another one extends": (
        {
            "properties": {"p": A, "q": {"allOf": [{"$ref": "#/properties/p"}, B]}},
            "type": "object",
        },
        [{"p": {"a": 1}, "q": {"a": 1, "b": 1}}],
        [{"p": {"a": 1, "b": 1}}, {"q": {"a": 1, "b": 1, "z": 1}}],
    ),
    "choices that refer to the whole": (
        EXPRESSION,
        [{"op": "-", "of": {"op": "n", "value": 1}}],
        [{"op": "-", "of": {"op": "n", "value": 1, "z": 1}}, {"op": "-", "of": 1}],
    ),
    "objects that say what else there may be": (
        {"allOf": [A, B | {"additionalProperties": True}]},
        [{"a": 1, "b": 2, "z": 3}],
        [{"a": 1}],
    ),
    "a discriminator": (
        {
            "$defs": {
                name: {"properties": {"t": {"const": name}}, "required": ["t"], "type": "object"}
                for name in "xy"
            },
            "oneOf": [{"$ref": "#/$defs/x"}, {"$ref": "#/$defs/y"}],
            "discriminator": {"propertyName": "t"},
        },
        [{"t": "x"}, {"t": "y"}],
        [{"t": "z"}, {"t": "x", "z": 1}],
    ),
    "properties with the names of keywords": (
        {
            "type": "object",
            "properties": {
                "properties": {"type": "object", "properties": {"enum": {"type": "string"}}},
                "$ref": {"type": "integer"},
            },
        },
        [{"properties": {"enum": "s"}, "$ref": 1}],
        [{"properties": {"z": 1}}],
    ),
    "values that look like schemas": (
        {"enum": [A, {"$ref": "#/x"}]},
        [A, {"$ref": "#/x"}],
        [A | {"additionalProperties": False}],
    ),
}


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


CITY: Schema = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
TREE: Schema = {"properties": {"kids": {"type": "array", "items": {"$ref": "#"}}}}
MOVED: dict[str, tuple[Schema, Any, Any]] = {
    "$defs": ({"$defs": {"C": CITY}, "$ref": "#/$defs/C"}, {"name": "x"}, {"name": 1}),
    "definitions": (
        {"definitions": {"C": CITY}, "properties": {"c": {"$ref": "#/definitions/C"}}},
        {"c": {"name": "x"}},
        {"c": {"name": 1}},
    ),
    "a version that ignores what is beside a reference": (
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "$ref": "#/definitions/C",
            "definitions": {"C": CITY},
        },
        {"name": "x"},
        {"name": 1},
    ),
    "an unknown version": (
        {"$schema": "http://json-schema.org/schema#", **CITY},
        {"name": "x"},
        {"name": 1},
    ),
    "a reference to a property": (
        {"properties": {"a": CITY, "b": {"$ref": "#/properties/a"}}},
        {"b": {"name": "x"}},
        {"b": {"name": 1}},
    ),
    "the whole": (TREE | {"type": "object"}, {"kids": [{"kids": []}]}, {"kids": [1]}),
    "definitions of definitions": (
        {"$defs": {"a": {"$defs": {"b": CITY}}}, "$ref": "#/$defs/a/$defs/b"},
        {"name": "x"},
        {"name": 1},
    ),
    "definitions in a place of one's own": (
        {"x-types": {"C": {"$ref": "#/x-types/D"}, "D": CITY}, "$ref": "#/x-types/C"},
        {"name": "x"},
        {"name": 1},
    ),
    "an anchor": ({"$defs": {"C": {"$anchor": "c"} | CITY}, "$ref": "#c"}, {"name": "x"}, 1),
    "an anchor of old": (
        {"definitions": {"C": {"$id": "#c"} | CITY}, "$ref": "#c"},
        {"name": "x"},
        1,
    ),
    "an identifier": (
        {"$id": "https://a/root", "$defs": {"C": CITY}, "$ref": "https://a/root#/$defs/C"},
        {"name": "x"},
        {"name": 1},
    ),
    "a relative identifier": (
        {"$id": "https://a/root", "$defs": {"C": {"$id": "city"} | CITY}, "$ref": "city"},
        {"name": "x"},
        {"name": 1},
    ),
    "a pointer within an identified part": (
        {
            "$defs": {
                "C": {"$id": "urn:c", "$defs": {"N": CITY}, "$ref": "#/$defs/N"},
                "N": {"type": "integer"},
            },
            "$ref": "#/$defs/C",
        },
        {"name": "x"},
        1,
    ),
    "names with odd characters": (
        {
            "$defs": {"a b/c~<é>": CITY, "d%e": {"type": "object", "$ref": "#/$defs/a b~1c~0<é>"}},
            "$ref": "#/$defs/d%25e",
        },
        {"name": "x"},
        {"name": 1},
    ),
}


@pytest.mark.parametrize("name", MOVED)
def test_references_lead_to_the_same_wherever_a_schema_stands(name: str) -> None:
    schema, good, bad = MOVED[name]
    other = {"$defs": {"C": {"type": "null"}}, "type": "object", "properties": {"a": {}}}
    outer = {
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
