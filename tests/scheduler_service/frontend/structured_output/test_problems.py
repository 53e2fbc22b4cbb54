"""The problem of a constraint is reported with its place."""

import json

import pytest

from scheduler_service.frontend.structured_output.problems import MAX_CHARS, find_problem

DEEP = {"properties": {"a/b~": {"items": [{"anyOf": [{"type": "string"}, {}]}]}}}


def _with(place: dict[str, object]) -> str:
    """A schema with something deep inside."""
    schema = json.loads(json.dumps(DEEP))
    schema["properties"]["a/b~"]["items"][0]["anyOf"][1] = place
    schema["$schema"] = "http://json-schema.org/draft-07/schema#"
    return json.dumps(schema)


OPEN = "unclosed group"
BAD_PATTERN = {"pattern": "a(", "type": "string"}
RECURSIVE = {"$defs": {"t": {"items": {"$ref": "#/$defs/t"}}}, "$ref": "#/$defs/t"}
PLACE = "/properties/a~1b~0/items/0/anyOf/1"


@pytest.mark.parametrize(
    ("kind", "text", "problem"),
    [
        ("regex", "a(b", "unclosed group at offset 1"),
        ("regex", "é/\n/(c", "unclosed group at offset 4"),
        ("regex", "ab[", "unclosed character class at offset 2"),
        ("regex", "a\\", "incomplete escape sequence at offset 1"),
        ("regex", "x{3,1}", "at offset 1"),
        ("regex", "(?=a)b", "look-ahead"),
        ("regex", "(a)\\1", "backreferences are not supported at offset 3"),
        ("regex", r"[^\x00-\x{10FFFF}]", "nothing matches"),
        ("grammar", 'start: "a"\n  b', "line 2"),
        ("grammar", 'start: "a" b', 'unknown name: "b" at line 1, column 8'),
        ("grammar", 'start: "x"\nb: "a" %', "at line 2, column 9"),
        ("grammar", 'begin: "a"', "no start rule found"),
        (
            "grammar",
            "start: A\nA: /a(/",
            'regex "a(": unclosed group at offset 1, at line 2, column 4',
        ),
        (
            "grammar",
            'start: "<"\n /</ // <\n <|end|>',
            "special tokens have no text to match at line 3, column 2",
        ),
        ("grammar", 'start: %json {"not": {}}', 'Unimplemented keys: ["not"] at line 1, column 8'),
        ("json_schema", '{"type":\n "a" "b"}', "at line 2, column 6"),
        ("json_schema", '{"minimum": NaN}', "NaN is not valid JSON"),
        ("json_schema", "[" * 100_000, "expected JSON"),
        ("json_schema", "[]", "expected a JSON object or true"),
        ("json_schema", "false", "expected a JSON object or true"),
        ("json_schema", _with({"not": {}}), f'keyword "not" at "{PLACE}" is not supported'),
        ("json_schema", _with({"maxLenght": 3}), f'keyword "maxLenght" at "{PLACE}"'),
        ("json_schema", _with({"x-guidance": {"lenient": True}}), 'keyword "x-guidance"'),
        ("json_schema", _with({"maxLenght": 3}), 'did you mean "maxLength"?'),
        ("json_schema", _with({"nullable": True}), 'is not supported: add "null" to type'),
        ("json_schema", _with({"uniqueItems": True}), "supported: leave it out, and check the"),
        ("json_schema", '{"if": {}}', 'keyword "if" at the root is not supported'),
        ("json_schema", _with({"type": "objct"}), f'or a list of these, got "objct" at "{PLACE}"'),
        ("json_schema", '{"type": "nope"}', 'list of these, got "nope" at the root'),
        ("json_schema", _with({"type": "string", "format": "no"}), f'uri, got "no" at "{PLACE}"'),
        (
            "json_schema",
            '{"oneOf": [{"type": "string"}, {"minLength": 3}]}',
            "choices may match the same value is not supported (use anyOf) at the root",
        ),
        ("json_schema", '{"$ref": "city"}', "is not in the schema (use $defs) at the root"),
        ("json_schema", '{"items":' * 201 + "{}" + "}" * 201, "expected at most 200 levels"),
        ("grammar", 'root ::= a\na ::= "b', "not valid GBNF: Unexpected end"),
        ("grammar", 'root ::= "a" nobody', "not valid GBNF: Rule 'nobody' not found"),
        ("grammar", 'other ::= "a"', "not valid GBNF: No 'root' rule found"),
        ("grammar", 'root ::= a\na ::= a "b"', "converted from GBNF to Lark: "),
        (
            "json_schema",
            _with({"pattern": "a(", "type": "string"}),
            f'pattern "a(" at "{PLACE}": unclosed group at offset 1',
        ),
        ("json_schema", '{"$ref": "#/$defs/a"}', "'/$defs/a' does not exist at the root"),
        ("json_schema", '{"$ref": "http://127.0.0.1/a"}', "http://127.0.0.1/a"),
        ("json_schema", '{"enum": []}', "Unsatisfiable schema"),
    ],
)
def test_a_problem_is_told_with_its_place(kind: str, text: str, problem: str) -> None:
    found = find_problem(kind, [text])
    assert found is not None
    assert problem in found
    assert "\n" not in found
    assert len(found) <= MAX_CHARS


@pytest.mark.parametrize(
    ("kind", "texts"),
    [
        ("regex", ["a/b\n(c|\\/)"]),
        ("regex", [r"\p{L}{1,20}\d*"]),
        ("grammar", ['start: "(" start ")" | /[0-9]+/ // <a>\n%ignore " "']),
        ("grammar", ['start: "<" x ">"\nx: %json {"type": "integer"}']),
        ("json_schema", ["true"]),
        ("json_schema", ['{"type": "object"}']),
        ("json_schema", [_with({"type": "integer", "title": "A", "x-order": 1})]),
        ("json_schema", [json.dumps(RECURSIVE)]),
        ("json_schema", [_with({"uniqueItems": False, "nullable": False, "not": False})]),
        ("json_schema", [_with({"propertyNames": {"type": "string"}, "dependencies": {}})]),
        ("json_schema", [_with({"propertyNames": {}, "unevaluatedProperties": True})]),
        ("json_schema", [_with({"type": "string", "format": "password", "contentSchema": {}})]),
        ("json_schema", [_with({"type": "integer", "format": "int64"})]),
        ("json_schema", ['{"$defs": {"a": {"$anchor": "b", "type": "string"}}, "$ref": "#b"}']),
        ("json_schema", ['{"type": "object", "properties": {"uniqueItems": false, "not": {}}}']),
        ("grammar", ['root ::= ("a" | [b-d]+)? # comment\r\n\r\nrule-2 ::= "x"{2} |\r\n "y"']),
        ("choice", ["a.b", "*", "\\", "/", "é\n"]),
    ],
)
def test_what_is_right_has_no_problem(kind: str, texts: list[str]) -> None:
    assert find_problem(kind, texts) is None


def _object_of(num_properties: int, num_required: int = 0) -> dict[str, object]:
    names = [f"p{index}" for index in range(num_properties)]
    properties = {name: {"type": "string"} for name in names}
    return {"type": "object", "properties": properties, "required": names[:num_required]}


@pytest.mark.parametrize(("num_properties", "num_required"), [(400, 0), (500, 100)])
def test_objects_may_have_many_properties(num_properties: int, num_required: int) -> None:
    schema = _object_of(num_properties, num_required)
    assert find_problem("json_schema", [json.dumps(schema)]) is None


@pytest.mark.parametrize("num_properties", [401, 500, 2000])
def test_an_object_with_too_many_optional_properties_is_refused(num_properties: int) -> None:
    """A worker's parser would fail at its first byte."""
    problem = find_problem("json_schema", [_with(_object_of(num_properties))])
    assert problem == (
        "too complex: expected at most 400 properties that are not required, "
        f'got {num_properties} at "{PLACE}"'
    )


def test_what_only_parsing_shows_to_be_too_complex_is_refused() -> None:
    rules = [f"r{index}" for index in range(3000)]
    grammar = f'start: "a" ({" | ".join(rules)})\n' + "\n".join(f'{r}: "{r}" {r}?' for r in rules)
    problem = find_problem("grammar", [grammar])
    assert problem is not None
    assert problem.startswith("too complex")
