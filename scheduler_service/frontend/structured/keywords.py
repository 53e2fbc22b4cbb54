"""Which JSON schema keywords are kept to; any other is refused by name.

A schema's author expects each keyword to hold. The JSON schema specification lets a validator pass
over keywords that it does not know; a generator that does writes texts that do not match.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

_SUPPORTED = frozenset(
    (
        *("type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref", "$defs", "definitions"),
        *("properties", "additionalProperties", "patternProperties", "required"),
        *("minProperties", "maxProperties"),
        *("items", "prefixItems", "additionalItems", "minItems", "maxItems"),
        *("minLength", "maxLength", "pattern", "format"),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    )
)
_ANNOTATIONS = frozenset(
    (
        *("$schema", "$id", "$comment", "title", "description", "default", "example", "examples"),
        *("deprecated", "readOnly", "writeOnly", "discriminator"),
    )
)
"""Keywords that say nothing of what matches."""

_IN_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_IN_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_IN_PLACE = ("items", "additionalItems", "additionalProperties")
"""Where a schema has schemas in it."""

_CODES = {"~": "~0", "/": "~1"}


class Place(NamedTuple):
    """A schema within a schema."""

    pointer: str
    """JSON pointer; empty for the whole."""

    schema: Any


def places(schema: Any) -> Iterator[Place]:
    """The schema and all schemas in it, outer ones first."""
    waiting = [Place("", schema)]
    while waiting:
        place = waiting.pop()
        yield place
        if isinstance(place.schema, dict):
            waiting.extend(reversed(list(_inner(place))))


def unsupported_keyword(schema: Any) -> tuple[str, str] | None:
    """The first keyword that is not kept to, and the pointer to its schema."""
    for place in places(schema):
        for keyword in place.schema if isinstance(place.schema, dict) else ():
            if keyword not in _SUPPORTED | _ANNOTATIONS and not _is_extension(keyword):
                return keyword, place.pointer
    return None


def _is_extension(keyword: str) -> bool:
    """Names that no specification will ever give a meaning, but for the one our compiler reads."""
    return keyword.startswith("x-") and keyword != "x-guidance"


def _inner(place: Place) -> Iterator[Place]:
    pointer, schema = place
    for keyword in _IN_MAPS:
        if isinstance(named := schema.get(keyword), dict):
            for name, inner in named.items():
                yield Place(f"{pointer}/{keyword}/{_encode(name)}", inner)
    for keyword in (*_IN_LISTS, *_IN_PLACE):
        inner = schema.get(keyword)
        if isinstance(inner, list):  # `items` was a list once
            for index, each in enumerate(inner):
                yield Place(f"{pointer}/{keyword}/{index}", each)
        elif isinstance(inner, dict):
            yield Place(f"{pointer}/{keyword}", inner)


def _encode(name: str) -> str:
    return "".join(_CODES.get(char, char) for char in name)
