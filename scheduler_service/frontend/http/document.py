"""The OpenAPI document, where FastAPI's own is not true here."""

from typing import Any

from fastapi import FastAPI
from pydantic.json_schema import models_json_schema

from scheduler_service.frontend.http.callers import OPEN_PATHS
from scheduler_service.frontend.http.openai.protocol import ChatCompletionChunk

CHUNKS = (ChatCompletionChunk,)
"""What streams consist of besides what whole answers do: named in descriptions, but no endpoint's
answer, so that nobody else puts them into the document."""

_NEVER_USED = ("HTTPValidationError", "ValidationError")
"""FastAPI's answer 422 to what is malformed; ours is 400, in OpenAI's shape."""

KEY = "key"
KEY_SCHEME = {
    "type": "http",
    "scheme": "bearer",
    "description": "An API key. `x-api-key: KEY` is taken, too.",
}


def correct_document(app: FastAPI, *, asks_for_key: bool) -> None:
    """Have the application tell what it does. `asks_for_key`: whether callers must bring a key,
    which they need not at the open paths."""
    make = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = _corrected(make())
            app.openapi_schema = _with_key(document) if asks_for_key else document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _corrected(document: dict[str, Any]) -> dict[str, Any]:
    for methods in document["paths"].values():
        for operation in methods.values():
            operation["responses"].pop("422", None)
    schemas = document["components"]["schemas"]
    for name in _NEVER_USED:
        schemas.pop(name, None)
    _, told = models_json_schema(
        [(model, "serialization") for model in CHUNKS],
        ref_template="#/components/schemas/{model}",
    )
    for name, schema in told["$defs"].items():
        schemas.setdefault(name, schema)
    return document


def _with_key(document: dict[str, Any]) -> dict[str, Any]:
    document["components"]["securitySchemes"] = {KEY: KEY_SCHEME}
    for path, methods in document["paths"].items():
        for operation in methods.values():
            operation["security"] = [] if path in OPEN_PATHS else [{KEY: []}]
    return document
