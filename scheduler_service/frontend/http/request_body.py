"""JSON bodies of requests: bounded, parsed and validated, the large ones off the event loop.

Parsing and validation run in one piece, with the interpreter's lock held, so a thread alone would
not keep a body of 16 MiB from delaying every stream of tokens. The body's bytes are therefore
counted first: a body that passes is parsed in less than 0.1 s. What can be large in number is token
ids, which are quick to parse; texts are quick whatever their length.
"""

import asyncio
import codecs
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from email.message import Message
from functools import lru_cache
from typing import Any, TypeVar

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from pydantic import TypeAdapter, ValidationError
from pydantic_core import from_json
from starlette.requests import ClientDisconnect

from scheduler_service.frontend.http.errors import InvalidBody
from scheduler_service.frontend.input.processor import INLINE_BYTES

MAX_VALUES = 1 << 20
"""Numbers, objects and arrays in one body."""
MAX_STRINGS = 1 << 16
"""Texts and names of fields in one body."""
SLICE_BYTES = 1 << 20

_THREAD = ThreadPoolExecutor(1, "large-bodies")
"""One body at a time: several threads would hold the lock in turn, and the loop would wait for all
of them."""

T = TypeVar("T")


def json_body(kind: Any) -> Callable[[Request], Awaitable[Any]]:
    """The dependency of an endpoint whose body is of type `kind`.

    It raises RequestValidationError, with paths that begin in the body, or InvalidBody.
    """
    adapter = TypeAdapter[Any](kind)

    async def read(request: Request) -> Any:
        try:
            body = await request.body()
        except ClientDisconnect:
            raise InvalidBody("the body was cut off") from None
        _check_content_type(request.headers.get("content-type"))
        if len(body) <= INLINE_BYTES:
            return parse(body, adapter)
        return await asyncio.get_running_loop().run_in_executor(_THREAD, parse_large, body, adapter)

    return read


async def convert(request: Request, work: Callable[[], T]) -> T:
    """The result of work whose time grows with the body of `request`, off the loop if the body is
    large."""
    if len(await request.body()) <= INLINE_BYTES:
        return work()
    return await asyncio.get_running_loop().run_in_executor(_THREAD, work)


def describe_body(*kinds: type[Any]) -> dict[str, Any]:
    """The endpoint's `openapi_extra`: a body of one of these types."""
    schemas = [{"$ref": f"#/components/schemas/{kind.__name__}"} for kind in kinds]
    schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def parse(body: bytes, adapter: TypeAdapter[T]) -> T:
    """The validated body."""
    try:
        value = from_json(body.removeprefix(codecs.BOM_UTF8), allow_inf_nan=False)
    except ValueError as error:
        raise InvalidBody(f"the body is not valid JSON: {error}") from None
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        errors = error.errors(include_url=False)
        for unknown in (error for error in errors if error["type"] == "extra_forbidden"):
            unknown["ctx"] = {"fields": _field_names(adapter)}
        raise RequestValidationError(errors) from None


@lru_cache
def _field_names(adapter: TypeAdapter[Any]) -> list[str]:
    """The names of all fields that the body or a part of it may have."""
    schema = adapter.json_schema()
    parts = (schema, *schema.get("$defs", {}).values())
    return sorted({name for part in parts for name in part.get("properties", ())})


def parse_large(body: bytes, adapter: TypeAdapter[T]) -> T:
    """The validated body, if it does not hold too many values to be parsed in one piece."""
    check_counts(body)
    return parse(body, adapter)


def check_counts(body: bytes) -> None:
    """Raise InvalidBody for a body that holds too many values or strings."""
    if _num_values(body) <= MAX_VALUES and body.count(b'"') <= 2 * MAX_STRINGS:
        return  # even if no bracket, comma or quote is part of a text
    body = _without_escapes(body)
    num_strings = body.count(b'"') // 2
    if num_strings > MAX_STRINGS:
        raise InvalidBody(
            f"the body holds {num_strings} texts and field names; at most {MAX_STRINGS} are "
            "allowed: send fewer prompts, messages or tools at a time"
        )
    num_values = _num_values(b"".join(body.split(b'"')[::2]))
    if num_values > MAX_VALUES:
        raise InvalidBody(
            f"the body holds {num_values} values; at most {MAX_VALUES} are allowed: send fewer "
            "token ids at a time, or the prompt as text"
        )


def _num_values(body: bytes) -> int:
    return body.count(b",") + body.count(b"[") + body.count(b"{")


def _without_escapes(body: bytes) -> bytes:
    """The body without its escaped quotes and backslashes, slice by slice: other threads run in
    between."""
    pieces, start = [], 0
    while start < len(body):
        end = start + SLICE_BYTES
        piece = body[start:end]
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:  # it ends within an escape
            piece += body[end : end + 1]
        start += len(piece)
        pieces.append(piece.replace(b"\\\\", b"").replace(b'\\"', b""))
    return b"".join(pieces)


def _check_content_type(header: str | None) -> None:
    message = Message()
    message["content-type"] = header or ""
    subtype = message.get_content_subtype()
    if message.get_content_maintype() != "application" or not (
        subtype == "json" or subtype.endswith("+json")
    ):
        raise InvalidBody("expected a JSON object as body, with content-type: application/json")
