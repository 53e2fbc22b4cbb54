"""The application: its routers, middleware, the shape of errors, and its OpenAPI document."""

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from pydantic import TypeAdapter

from scheduler_service.frontend.http import anthropic, monitoring, tokenize, unsupported
from scheduler_service.frontend.http.dashboard import hub as dashboard
from scheduler_service.frontend.http.errors import handle_errors
from scheduler_service.frontend.http.middleware import OPEN_PATHS, Admission, HttpServices
from scheduler_service.frontend.http.openai import (
    adapters,
    models,
    protocol,
    serving_chat,
    serving_completion,
    serving_responses,
)
from scheduler_service.frontend.http.pooling import endpoints
from service_common.version import VERSION

SCHEMAS: Sequence[type[Any]] = (
    protocol.ChatRequest,
    protocol.CompletionRequest,
    serving_responses.ResponsesRequest,
    anthropic.MessagesRequest,
    anthropic.CountTokensRequest,
    tokenize.TokenizeText,
    tokenize.TokenizeChat,
    tokenize.DetokenizeBody,
    adapters.LoadLoRAAdapter,
    adapters.UnloadLoRAAdapter,
    *(endpoint.body for endpoint in endpoints.ENDPOINTS),
    protocol.ChatCompletionChunk,
)
"""Bodies that FastAPI does not know, because it neither parses requests nor writes streams."""

_NEVER_USED = ("HTTPValidationError", "ValidationError")
"""Schemas of FastAPI's 422 answer, which this application never gives."""

KEY = "key"
KEY_SCHEME = {
    "type": "http",
    "scheme": "bearer",
    "description": "An API key. `x-api-key: KEY` is accepted, too.",
}


def correct_document(app: FastAPI, *, asks_for_key: bool) -> None:
    """Make the application serve a corrected OpenAPI document. `asks_for_key`: whether callers need
    a key, except at the open paths."""
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
    _, added = TypeAdapter.json_schemas(
        [(kind.__name__, "validation", TypeAdapter[Any](kind)) for kind in SCHEMAS],
        ref_template="#/components/schemas/{model}",
    )
    for name, schema in added["$defs"].items():
        schemas.setdefault(name, schema)
    return document


def _with_key(document: dict[str, Any]) -> dict[str, Any]:
    document["components"]["securitySchemes"] = {KEY: KEY_SCHEME}
    for path, methods in document["paths"].items():
        for operation in methods.values():
            operation["security"] = [] if path in OPEN_PATHS else [{KEY: []}]
    return document


ENDPOINTS = (
    serving_completion,
    serving_chat,
    serving_responses,
    anthropic,
    endpoints,
    tokenize,
    monitoring,
    models,
    adapters,
    unsupported,
)
"""Modules with a router each, those first that are called most: the paths of all routes before the
one that matches are compared."""


def make_app(services: HttpServices) -> FastAPI:
    """The ASGI application of one frontend.

    The pages that FastAPI makes of the OpenAPI document are off, as they load scripts from
    elsewhere; the document itself is at `/openapi.json`.
    """
    app = FastAPI(
        title="Pagewire",
        version=VERSION,
        summary="An LLM serving engine, by OpenAI's interface",
        docs_url=None,
        redoc_url=None,
        # Requests have spans and metrics of our own.
        telemetry={"tracing": False, "metrics": False, "logs": False},
    )
    app.state.services = services
    # `include_router` would make each route again, for 0.1 s of the first request.
    for router in (*(module.router for module in ENDPOINTS), dashboard.make_router(services)):
        app.router.routes.extend(router.routes)
    handle_errors(app)
    correct_document(app, asks_for_key=services.authentication.asks_for_key)
    app.add_middleware(
        Admission,
        authentication=services.authentication,
        open_paths=(*OPEN_PATHS, *dashboard.FILE_PATHS),
        allowed_hosts=services.allowed_hosts,
    )
    return app
