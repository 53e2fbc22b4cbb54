"""The page of HTTP endpoints and bodies, generated from the frontend's OpenAPI document."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from scheduler_service.frontend.auth import Authentication
from scheduler_service.frontend.http.app import make_app
from scheduler_service.frontend.http.middleware import HttpServices

HEAD = """\
# HTTP reference

The endpoints of a frontend at its `--http` address, from its OpenAPI document (`/openapi.json`).
[OpenAI's API](../openai-api.md) explains how to use them, and how they differ from OpenAI's own.
"""

_SCHEMA = "#/components/schemas/"

Json = Mapping[str, Any]


def render() -> str:
    """The page as Markdown."""
    return HEAD + "".join("\n" + part for part in _parts(document()))


def document() -> Json:
    """The OpenAPI document; it needs no running service."""
    services: dict[str, Any] = {field.name: None for field in dataclasses.fields(HttpServices)}
    services["authentication"] = Authentication()
    return make_app(HttpServices(**services)).openapi()


def _parts(openapi: Json) -> Iterator[str]:
    yield "## Endpoints\n"
    for path, operations in openapi["paths"].items():
        for method, operation in operations.items():
            yield from _endpoint(f"{method.upper()} {path}", operation)
    yield "## Bodies\n"
    for name, schema in openapi["components"]["schemas"].items():
        yield from _body(name, schema)


def _endpoint(title: str, operation: Json) -> Iterator[str]:
    yield f"### `{title}`\n\n{operation.get('summary', '')}. {operation.get('description', '')}\n"
    contents = operation.get("requestBody", {}).get("content", {}).values()
    answers = operation["responses"].get("200", {}).get("content", {}).values()
    taken, given = (
        [_type(content["schema"]) for content in of if content.get("schema")]
        for of in (contents, answers)
    )
    if taken:
        yield f"Request body: {', '.join(taken)}.\n"
    if given:
        yield f"Response: {', '.join(given)}.\n"


def _body(name: str, schema: Json) -> Iterator[str]:
    yield f"### {name}\n\n{schema.get('description', '')}\n"
    required = schema.get("required", ())
    rows = [
        f"| `{field}`{' (required)' if field in required else ''} | {_type(row)} "
        f"| {_cell(row.get('description', ''))} |\n"
        for field, row in schema.get("properties", {}).items()
    ]
    if rows:
        yield "| field | type | meaning |\n| --- | --- | --- |\n" + "".join(rows)


def _type(schema: Json) -> str:
    """The type of a value, with its bounds."""
    if "$ref" in schema:
        name = schema["$ref"].removeprefix(_SCHEMA)
        return f"[{name}](#{name.lower()})"
    for key in ("anyOf", "oneOf"):
        if key in schema:
            kinds = [_type(variant) for variant in schema[key] if variant.get("type") != "null"]
            return " or ".join(dict.fromkeys(kinds))
    if "const" in schema or "enum" in schema:
        values = schema.get("enum", [schema.get("const")])
        return " or ".join(f"`{value}`" for value in values)
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    return f"{schema.get('type', 'anything')}{_bounds(schema)}"


def _bounds(schema: Json) -> str:
    least = schema.get("minimum", schema.get("exclusiveMinimum"))
    most = schema.get("maximum", schema.get("exclusiveMaximum"))
    above = "above " if "exclusiveMinimum" in schema else ""
    if least is None or most is None:
        return ""
    return f", {above}{least:g} to {most:g}"


def _cell(text: str) -> str:
    return text.replace("\n", " ").replace("|", "\\|").replace("<", "&lt;")
