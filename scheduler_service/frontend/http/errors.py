"""Pagewire's errors in OpenAI's shape; the only place that knows both.

    HTTP/1.1 400 Bad Request
    {"error": {"message": "…", "type": "invalid_request_error", "param": "top_p",
               "code": "invalid_field"}}

`code` is the error's reason in lower case, except for the few that OpenAI has a name for. The HTTP
code follows from the gRPC code, as `google/rpc/code.proto` maps them, so that the two never
disagree.
"""

import json
import logging
import math
import re
from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import grpc
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException

from scheduler_service.errors import InvalidArgument, PagewireError
from scheduler_service.frontend.http.inert_fields import FIXED, INSTEAD, SYNONYMS
from scheduler_service.status_codes import status_code

logger = logging.getLogger(__name__)

HTTP_CODES = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.FAILED_PRECONDITION: 400,
    grpc.StatusCode.OUT_OF_RANGE: 400,
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.PERMISSION_DENIED: 403,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.ALREADY_EXISTS: 409,
    grpc.StatusCode.ABORTED: 409,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.CANCELLED: 499,
    grpc.StatusCode.INTERNAL: 500,
    grpc.StatusCode.UNIMPLEMENTED: 501,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
}

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    501: "not_implemented_error",
}
"""Types by HTTP code, other than `invalid_request_error` (4xx) and `server_error` (5xx)."""

OPENAI_CODES = {
    "UNKNOWN_MODEL": "model_not_found",
    "PROMPT_TOO_LONG": "context_length_exceeded",
    "UNKNOWN_API_KEY": "invalid_api_key",
    "EXPIRED_API_KEY": "invalid_api_key",
    "QUEUE_FULL": "rate_limit_exceeded",
    "TENANT_LIMIT": "rate_limit_exceeded",
}
"""OpenAI's codes by our reason, where they differ."""

MAX_MESSAGE_CHARS, MAX_PARAM_CHARS = 1000, 200
"""Bounds of an error's texts, which may quote an invalid name as long as a body."""

MAX_VALUE_CHARS = 40

PHRASES = (
    (r"^(Input|String|List|Dictionary|Value) should (be |have )?", "expected "),
    (r"(an? )?valid (integer|number|string|boolean|list)", r"a \2"),
    (r"a integer", "an integer"),
    (r"a valid dictionary( or (instance of \w+|object to extract fields from))?", "an object"),
    (r"greater than or equal to", "at least"),
    (r"less than or equal to", "at most"),
    (r"greater than", "more than"),
    (r" after validation, not .*", ""),
    (r"match pattern", "a text that matches"),
    (r"\bTrue\b", "true"),
    (r"\bFalse\b", "false"),
)
"""Pydantic's phrases and their replacements."""

_MEDIA = re.compile("image|audio|video|file|document")
TEXT_ONLY = ": the models served here read text only"

RETRY_AFTER_S = 1
"""Sent with 429 and 503 if the error has no delay of its own."""

_NO_FIELDS = (
    *("body", "path", "header"),
    *("str", "int", "float", "bool", "NamedToolChoice", "NamedTool", "TextObject"),
)
"""Parts of pydantic's paths that name types that it tried, not fields."""

BODY_FORMS = ("TokenizeText", "TokenizeChat")
"""The types of a body that may have several types; they come first in pydantic's paths."""

PROTO_NAMES = {
    "text": "prompt",
    "include_stop_in_output": "include_stop_str_in_output",
    "choice.choices": "guided_choice",
    "beam_search.width": "n",
    "beam_search.length_penalty": "length_penalty",
    "template_arguments_json": "chat_template_kwargs",
}
"""Fields whose HTTP name differs from the proto's."""


class ErrorDetail(BaseModel):
    """What went wrong."""

    message: str = Field(description="Human-readable.")
    type: str = Field(description="The class of the error.")
    param: str | None = Field(description="The invalid field, if a field is invalid.")
    code: str | None = Field(description="A constant that programs may compare.")


class ErrorResponse(BaseModel):
    """Every answer with a code of 400 or above."""

    error: ErrorDetail


ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    code: {"model": ErrorResponse, "description": description}
    for code, description in {
        400: "A field is invalid, or the prompt is too long",
        401: "Missing or invalid credentials",
        403: "The credentials do not allow this",
        404: "No such model, or no such path",
        408: "The body did not arrive in time",
        409: "A live request has this id, or has been taken over",
        413: "The body is too large",
        415: "The body is compressed in a way that is not supported",
        429: "A queue or a limit is full; Retry-After has the delay",
        499: "The request was aborted by another call",
        500: "A bug, or the model failed",
        503: "No model can be served now, or shutting down",
        504: "The deadline has passed",
    }.items()
}
"""The error answers of endpoints."""


class InvalidBody(Exception):
    """A request's body cannot be read, is not JSON, or holds too many values."""

    def __init__(
        self,
        message: str,
        *,
        code: int = 400,
        param: str | None = None,
        reason: str = "invalid_body",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.param = param
        self.reason = reason
        self.headers = headers


def http_code(error: Exception) -> int:
    """The HTTP status code of `error`; 500 unless it is a PagewireError."""
    return HTTP_CODES[status_code(error)]


def error_body(error: PagewireError) -> dict[str, Any]:
    """`error` as OpenAI's clients expect it."""
    param = param_of(error.field) if isinstance(error, InvalidArgument) else None
    message = f"{param}: {error.expected}" if isinstance(error, InvalidArgument) else error.message
    code = OPENAI_CODES.get(error.reason, error.reason.lower())
    return _body(http_code(error), message, param, code)


def error_response(error: Exception) -> JSONResponse:
    """The answer. An error that is not a PagewireError is a bug: callers do not see its text."""
    if not isinstance(error, PagewireError):
        error = PagewireError("internal error")
    code = http_code(error)
    headers = {}
    if code in (429, 503):
        delay_s = RETRY_AFTER_S if error.retry_delay_s is None else error.retry_delay_s
        headers["Retry-After"] = str(max(1, math.ceil(delay_s)))
    if code == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if code == 504 or (code == 500 and error.reason != PagewireError.reason):
        # OpenAI's and Anthropic's clients would retry twice, and what failed would fail again.
        headers["x-should-retry"] = "false"
    return JSONResponse(error_body(error), status_code=code, headers=headers)


def param_of(field: str) -> str:
    """The HTTP name of a field that an error names as the proto does."""
    name = re.sub(r"^chat\.tool_choice\.name$", "tool_choice.function.name", field)
    name = name.removeprefix("sampling_params.").removeprefix("chat.")
    name = re.sub(r"^token_ids\.ids", "prompt", name)
    name = re.sub(r"^logit_bias\[\d+\]\.token_id$", "logit_bias", name)
    name = re.sub(r"\.(arguments|parameters)_json$", r".function.\1", name)
    return PROTO_NAMES.get(name, name)


def handle_errors(app: FastAPI) -> None:
    """Answer the errors of all endpoints in this shape."""

    @app.exception_handler(PagewireError)
    @app.exception_handler(Exception)
    async def on_error(_: Request, error: Exception) -> JSONResponse:
        return error_response(error)

    @app.exception_handler(RequestValidationError)
    async def on_invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        return _invalid(error)

    @app.exception_handler(InvalidBody)
    async def on_unreadable(_: Request, error: InvalidBody) -> JSONResponse:
        return _unreadable(error)

    @app.exception_handler(HTTPException)
    async def on_http(request: Request, error: HTTPException) -> JSONResponse:
        message = str(error.detail)
        if error.status_code == 404:
            similar = get_close_matches(request.url.path, app.openapi()["paths"], 1, 0.8)
            advice = f"did you mean {similar[0]}?" if similar else "see /openapi.json"
            message = f"not found: {request.url.path} ({advice})"
        if error.status_code == 405:
            allowed = (error.headers or {}).get("Allow", "another method")
            message = f"{request.url.path} takes {allowed}, got {request.method}"
        reason = "not_implemented" if error.status_code == 501 else None
        body = _body(error.status_code, message, None, reason)
        return JSONResponse(body, status_code=error.status_code, headers=error.headers)


def _invalid(error: RequestValidationError) -> JSONResponse:
    """The answer to the first of pydantic's errors, with its path in the body."""
    first = _most_specific(_of_closest_form(error.errors()))
    loc = first["loc"]
    if loc[:1] == ("response_format",):
        loc = loc[:1] + loc[2:]  # the format's type, which is not a field, follows
    path = [part for part in loc if part not in _NO_FIELDS]
    if not path and first["type"] in ("model_attributes_type", "model_type", "dict_type"):
        return _unreadable(InvalidBody("expected a JSON object as body"))
    names = [part for part in path if isinstance(part, int) or part.isidentifier()]
    dotted = "".join(f"[{name}]" if isinstance(name, int) else f".{name}" for name in names)
    param = dotted.removeprefix(".") or None
    message = _explain(first, dotted.rpartition(".")[2])
    if path[:1] == ["logit_bias"] and len(path) > 1:
        message += f" for token {_received(path[1])}"
    return JSONResponse(
        _body(400, f"{param}: {message}" if param else message, param, "invalid_field"), 400
    )


def _explain(error: Mapping[str, Any], field: str) -> str:
    """The allowed values, and the value received."""
    kind, context = error["type"], error.get("ctx", {})
    if kind == "missing":
        return "required"
    if kind == "extra_forbidden":
        return _explain_extra(field, error["input"], **context)
    if kind == "union_tag_invalid":
        return f"expected one of {context['expected_tags']} as type, got {context['tag']!r}"
    if kind == "union_tag_not_found":
        return "expected an object with the field type"
    message = error["msg"]
    for pattern, replacement in PHRASES:
        message = re.sub(pattern, replacement, message)
    received = error["input"]
    is_media = field == "type" and _MEDIA.search(str(received)) is not None
    return f"{message}, got {_received(received)}{TEXT_ONLY if is_media else ''}"


def _explain_extra(
    field: str, value: Any, fields: Collection[str] = (), of_bodies: Collection[str] = ()
) -> str:
    """What to do with a field that a body which may have `fields` does not declare, and may not
    have beside the others: one of another type of body has the fields `of_bodies`."""
    if field in FIXED:
        return f"expected {json.dumps(FIXED[field])}, got {_received(value)}"
    if field in of_bodies:
        return "it cannot be combined with the other fields of this request"
    similar = _similar(field, [name for name in fields if name != field])
    if field in INSTEAD and not set(similar) & set(SYNONYMS.get(field, ())):
        return f"not supported: {INSTEAD[field]}"
    advice = f"did you mean {similar[0]}?" if similar else "leave it out"
    return f"unknown field: {advice} (/openapi.json lists the fields)"


def _similar(field: str, fields: Collection[str]) -> list[str]:
    """The one of `fields` that is meant, if there is any. Names may be as long as a body."""
    synonyms = [name for name in SYNONYMS.get(field, ()) if name in fields]
    return get_close_matches(field[:MAX_PARAM_CHARS], synonyms or fields, 1, 0 if synonyms else 0.8)


def _received(value: Any) -> str:
    """The value as JSON, or its size where it may be long."""
    if isinstance(value, dict | list):
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value)} entries"
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MAX_VALUE_CHARS else f"{text[:MAX_VALUE_CHARS]}…"


def _unreadable(error: InvalidBody) -> JSONResponse:
    body = _body(error.code, str(error), error.param, error.reason)
    return JSONResponse(body, error.code, headers=error.headers)


def _of_closest_form(errors: Sequence[Any]) -> Sequence[Any]:
    """The errors of a body. If it may have several types: those for the type with the fewest
    errors, without the type's name in their paths."""
    by_form: dict[str, list[Any]] = {}
    for error in errors:
        form, *path = error["loc"] or ("",)
        if form not in BODY_FORMS:
            return errors
        by_form.setdefault(form, []).append(error | {"loc": tuple(path)})
    return min(by_form.values(), key=len)


def _most_specific(errors: Sequence[Any]) -> Any:
    """A misspelled field that is missing, or else the most specific error of the first
    field. Where several types are allowed, that is an invalid value of one of them, or otherwise
    the type error that lies deepest; a wrong `type` explains errors of the other fields."""
    missing = [error["loc"] for error in errors if error["type"] == "missing"]
    for error in errors:
        *where, name = error["loc"] or ("",)
        beside = [loc[-1] for loc in missing if list(loc[:-1]) == where]
        if error["type"] == "extra_forbidden" and _similar(name, beside):
            return error
    field = errors[0]["loc"][:1]
    return max(
        (error for error in errors if error["loc"][:1] == field),
        key=lambda e: (not e["type"].endswith("_type"), len(e["loc"]), e["loc"][-1:] == ("type",)),
    )


def _body(code: int, message: str, param: str | None, reason: str | None) -> dict[str, Any]:
    kind = TYPES.get(code, "invalid_request_error" if code < 500 else "server_error")
    shown = param and param[:MAX_PARAM_CHARS]
    error = {"message": message[:MAX_MESSAGE_CHARS], "type": kind, "param": shown, "code": reason}
    return {"error": error}
