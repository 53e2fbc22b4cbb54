"""What the schema of a parameter says about its value, where values are written without quotes."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from scheduler_service.frontend.chat_formats.syntax import LITERAL
from scheduler_service.frontend.chat_formats.values import converted

Schema = Mapping[str, Any]

_MAX_DEPTH = 8
_TYPES = {"{": "object", "[": "array", '"': "string", "t": "boolean", "f": "boolean", "n": "null"}


def parameter_types(function: Schema | None, name: str) -> set[str]:
    """The JSON types of a function's parameter; empty if its schema does not say, or is none."""
    types: set[str] = set()
    for schema in _parts(function, function or {}):
        properties = schema.get("properties")
        parameter = properties.get(name) if isinstance(properties, Mapping) else None
        for part in _parts(parameter, function or {}):
            kind = part.get("type")
            kinds = [kind] if isinstance(kind, str) else _list(part, "type")
            types.update(kind for kind in kinds if isinstance(kind, str))
            values = [*_list(part, "enum"), *([part["const"]] if "const" in part else ())]
            types |= {_type_of(json.dumps(value)) for value in values}
    return {"number" if kind == "integer" else kind for kind in types}


def _parts(schema: Any, root: Schema, depth: int = 0) -> Iterator[Schema]:
    """A schema and those that it is made of, with references resolved."""
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return
    yield schema
    parts = [part for key in ("anyOf", "oneOf", "allOf") for part in _list(schema, key)]
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        target: Any = root
        for step in reference[2:].split("/"):
            step = step.replace("~1", "/").replace("~0", "~")
            target = target.get(step) if isinstance(target, Mapping) else None
        parts.append(target)
    for part in parts:
        yield from _parts(part, root, depth + 1)


def _list(schema: Schema, key: str) -> list[Any]:
    value = schema.get(key)
    return value if isinstance(value, list) else []


def _type_of(value: str) -> str:
    return _TYPES.get(value[0], "number")


def typed_value(text: str, types: set[str]) -> str:
    """The JSON of a value that was written as `text`: text if its types say so, otherwise what it
    is as JSON or Python; text if it is neither."""
    value = None if types == {"string"} else converted(text, LITERAL)
    if value is not None and (not types or _type_of(value) in types or "string" not in types):
        return value
    return json.dumps(text, ensure_ascii=False)
