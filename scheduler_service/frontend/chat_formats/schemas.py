"""What the schema of a parameter says about its value, where values are written without quotes."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from scheduler_service.frontend.chat_formats.syntax import LITERAL
from scheduler_service.frontend.chat_formats.values import converted

Schema = Mapping[str, Any]

_MAX_DEPTH = 8
_TYPES = {"{": "object", "[": "array", '"': "string", "t": "boolean", "f": "boolean", "n": "null"}


def parameter_schemas(function: Schema | None, name: str) -> list[Schema]:
    """The schemas of a function's parameter, of which its value follows at least one."""
    if function is None:
        return []
    found = [
        properties[name]
        for schema in _alternatives(function, function)
        if isinstance(properties := schema.get("properties"), Mapping) and name in properties
    ]
    return [part for schema in found for part in _alternatives(schema, function)]


def _alternatives(schema: Any, root: Schema, depth: int = 0) -> Iterator[Schema]:
    """A schema and those that it is made of, with references resolved."""
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return
    yield schema
    parts = [part for key in ("anyOf", "oneOf", "allOf") for part in schema.get(key) or ()]
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        target: Any = root
        for step in reference[2:].split("/"):
            step = step.replace("~1", "/").replace("~0", "~")
            target = target.get(step) if isinstance(target, Mapping) else None
        parts.append(target)
    for part in parts:
        yield from _alternatives(part, root, depth + 1)


def _types(schemas: list[Schema]) -> set[str]:
    found = set()
    for schema in schemas:
        kind = schema.get("type")
        found |= {kind} if isinstance(kind, str) else set(kind or ())
        for value in [*schema.get("enum", ()), *([schema["const"]] if "const" in schema else [])]:
            found.add(_type_of(json.dumps(value)))
    return {"number" if kind == "integer" else kind for kind in found}


def _type_of(value: str) -> str:
    return _TYPES.get(value[0], "number")


def typed_value(text: str, schemas: list[Schema]) -> str:
    """The JSON of a value that was written as `text`: text if the schema says so, otherwise what
    it is as JSON or Python; text if it is neither."""
    types = _types(schemas)
    plain = text.removeprefix("\n").removesuffix("\n")
    value = None if types == {"string"} else converted(text, LITERAL)
    if value is not None and (not types or _type_of(value) in types or "string" not in types):
        return value
    return json.dumps(plain, ensure_ascii=False)
