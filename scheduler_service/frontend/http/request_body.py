"""JSON bodies of requests: bounded, parsed and validated, the large ones off the event loop.

Parsing and validation run in one piece, with the interpreter's lock held, so a thread alone would
not keep a body of 16 MiB from delaying every stream of tokens. The body's bytes are therefore
counted first: a body that passes is parsed in less than 0.1 s. What can be large in number is token
ids, which are quick to parse; texts are quick whatever their length.
"""

import asyncio
import codecs
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from email.message import Message
from functools import lru_cache
from typing import Any, TypeVar

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from pydantic import TypeAdapter, ValidationError
from pydantic_core import from_json
from starlette.requests import ClientDisconnect

from scheduler_service.frontend.config import MAX_PUBLIC_MESSAGE_BYTES
from scheduler_service.frontend.http.content_coding import CODINGS, Decoder
from scheduler_service.frontend.http.errors import InvalidBody
from scheduler_service.frontend.input.processor import INLINE_BYTES

BODY_TIMEOUT_S = 60.0
"""Time limit for a whole body to arrive."""
MAX_VALUES = 1 << 20
"""Numbers, objects and arrays in one body."""
MAX_STRINGS = 1 << 16
"""Texts and names of fields in one body."""
SLICE_BYTES = 1 << 20

_THREAD = ThreadPoolExecutor(1, "large-bodies")
"""One body at a time: several threads would hold the lock in turn, and the loop would wait for all
of them."""

_IS_LARGE = "pagewire.has_large_body"

T = TypeVar("T")


def json_body(kind: Any) -> Callable[[Request], Awaitable[Any]]:
    """The dependency of an endpoint whose body is of type `kind`.

    It raises RequestValidationError, with paths that begin in the body, or InvalidBody.
    """
    adapter = TypeAdapter[Any](kind)

    async def read(request: Request) -> Any:
        body = await read_body(request)
        _check_content_type(request.headers.get("content-type"))
        request.scope[_IS_LARGE] = len(body) > INLINE_BYTES
        parse_body = parse_large if len(body) > INLINE_BYTES else parse
        return await convert(request, lambda: parse_body(body, adapter))

    return read


async def convert(request: Request, work: Callable[[], T]) -> T:
    """The result of work whose time grows with the body of `request`, off the loop if the body is
    large."""
    if not request.scope[_IS_LARGE]:
        return work()
    return await asyncio.get_running_loop().run_in_executor(_THREAD, work)


async def read_body(request: Request) -> bytes:
    """The body, decoded. Raises InvalidBody: with 413 if it is too long, at once if the content
    length is known, with 408 if it is too slow, and with 415 if it cannot be decoded."""
    length = request.headers.get("content-length", "")
    _check_size(int(length) if length.isdecimal() else 0)
    coding = _content_coding(request)
    decoder = Decoder(coding) if coding else None
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for data in request.stream():
                for piece in decoder.decode(data) if decoder is not None else (data,):
                    body += piece
                    _check_size(len(body))
                    if decoder is not None:
                        await asyncio.sleep(0)  # for other streams
        if decoder is not None and not decoder.is_complete:
            raise ValueError("it ends too early")
    except TimeoutError:
        message = f"the request's body did not arrive within {BODY_TIMEOUT_S:g} s"
        close = {"Connection": "close"}
        raise InvalidBody(message, code=408, reason="request_too_slow", headers=close) from None
    except ClientDisconnect:
        raise InvalidBody("the body was cut off") from None
    except ValueError as error:
        raise InvalidBody(f"the body is not valid {coding}: {error}") from None
    return bytes(body)


def _check_size(num_bytes: int) -> None:
    if num_bytes > MAX_PUBLIC_MESSAGE_BYTES:
        message = f"the request's body is longer than {MAX_PUBLIC_MESSAGE_BYTES} bytes"
        raise InvalidBody(message, code=413, reason="request_too_large")


def _content_coding(request: Request) -> str:
    """The coding in the header, or empty for none. Raises InvalidBody for several, or one that is
    not supported."""
    names = ",".join(request.headers.getlist("content-encoding")).lower().split(",")
    given = [name.strip() for name in names if name.strip() not in ("", "identity")]
    coding = ", ".join("gzip" if name == "x-gzip" else name for name in given)
    if coding and coding not in CODINGS:
        accepted = ", ".join(CODINGS)
        raise InvalidBody(
            f"Content-Encoding: expected one of {accepted}, or none, got {coding[:100]!r}",
            code=415,
            param="Content-Encoding",
            reason="unsupported_content_encoding",
            headers={"Accept-Encoding": accepted},
        )
    return coding


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
        half = ", half of a character (an unpaired surrogate)" if "hex" in str(error) else ""
        raise InvalidBody(f"the body is not valid JSON: {error}{half}") from None
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        errors = error.errors(include_url=False)
        for unknown in (error for error in errors if error["type"] == "extra_forbidden"):
            fields, of_bodies = _field_names(adapter)
            unknown["ctx"] = {"fields": fields, "of_bodies": of_bodies}
        raise RequestValidationError(errors) from None


@lru_cache
def _field_names(adapter: TypeAdapter[Any]) -> tuple[list[str], list[str]]:
    """The names of all fields that the body or a part of it may have; and those of its types, if it
    may have several."""
    schema = adapter.json_schema()
    parts = schema.get("$defs", {})
    bodies = [parts[body["$ref"].rpartition("/")[2]] for body in schema.get("anyOf", ())]
    return _properties([schema, *parts.values()]), _properties(bodies)


def _properties(schemas: Iterable[Any]) -> list[str]:
    return sorted({name for schema in schemas for name in schema.get("properties", ())})


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
    if header == "application/json":
        return
    message = Message()
    message["content-type"] = header or ""
    subtype = message.get_content_subtype()
    if message.get_content_maintype() != "application" or not (
        subtype == "json" or subtype.endswith("+json")
    ):
        raise InvalidBody("expected a JSON object as body, with content-type: application/json")
