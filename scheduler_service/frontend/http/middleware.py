"""What endpoints have in common: the services that they use, their caller, and ASGI middleware for
authentication, limits of request bodies, and the client's trace context."""

import asyncio
import json
import logging
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Annotated
from urllib.parse import urlsplit

from fastapi import Depends, Request
from prometheus_client import CollectorRegistry
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from scheduler_service.errors import (
    InvalidArgument,
    PagewireError,
    PermissionDenied,
    Unauthenticated,
)
from scheduler_service.frontend.auth import Authentication, Principal
from scheduler_service.frontend.core_client import CoreConnection
from scheduler_service.frontend.http.content_coding import CODINGS, Decoder
from scheduler_service.frontend.http.errors import (
    error_response,
    invalid_body_response,
    too_large_response,
    too_slow_response,
    undecodable_response,
)
from scheduler_service.frontend.input.processor import draw_request_id
from scheduler_service.frontend.request_manager import RequestManager
from scheduler_service.frontend.served_models import ModelDirectory
from service_common.metadata import TRACEPARENT, authorization

logger = logging.getLogger(__name__)

REQUEST_ID = r"^[A-Za-z0-9._:-]{1,100}$"
"""Shorter than the longest allowed id: the ids of several prompts get numbers appended."""
_REQUEST_ID = re.compile(REQUEST_ID.encode())

BODY_TIMEOUT_S = 60.0
"""Time limit for a whole body to arrive."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HttpServices:
    """The parts of a frontend that HTTP shares with gRPC."""

    requests: RequestManager
    models: ModelDirectory
    core: CoreConnection
    authentication: Authentication
    registry: CollectorRegistry
    """The metrics that Prometheus scrapes."""
    allowed_hosts: frozenset[str] | None = None
    """Names that the Host header may have; None: any."""
    sse_keep_alive_s: float = 0.0
    """Time without output after which a stream gets a comment; 0: never."""


class BodyLimit:
    """Decodes compressed bodies. Answers 415 if it cannot; 413 to longer bodies, at once if the
    content length is known, else when the limit is reached; and 408 to slower ones."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if _content_length(scope) > self._max_bytes:
            await too_large_response(self._max_bytes)(scope, receive, send)
            return
        coding = _content_coding(scope)
        if coding and coding not in CODINGS:
            await undecodable_response(coding, CODINGS)(scope, receive, send)
            return
        body = _CountedBody(receive, self._max_bytes, coding)

        async def send_unless_refused(message: Message) -> None:
            if body.refusal is None:  # the app saw only a part of the body
                await send(message)

        await self._app(scope, body.receive, send_unless_refused)
        if body.refusal is not None:
            await body.refusal(scope, receive, send)


class _CountedBody:
    """Passes a body on, decoded, until it exceeds the size or time limit or is invalid; then its
    reader sees a disconnect."""

    def __init__(self, receive: Receive, max_bytes: int, coding: str) -> None:
        """`coding`: of the body, or empty."""
        self._receive = receive
        self._coding = coding
        self._decoder = Decoder(coding) if coding else None
        self._deadline = asyncio.get_running_loop().time() + BODY_TIMEOUT_S
        self._has_more = True
        self._max_bytes = self._left = max_bytes
        self.refusal: JSONResponse | None = None
        """The answer if the body was cut off."""

    async def receive(self) -> Message:
        if not self._has_more:  # this waits for the client to disconnect
            return await self._receive()
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self._receive()
        except TimeoutError:
            self.refusal = too_slow_response(BODY_TIMEOUT_S)
            return {"type": "http.disconnect"}
        self._has_more = message.get("more_body", False)
        if message["type"] == "http.request":
            if self._decoder is not None:
                message = {**message, "body": await self._decoded(self._decoder, message)}
            self._left -= len(message.get("body", b""))
            if self._left < 0:
                self.refusal = too_large_response(self._max_bytes)
        return message if self.refusal is None else {"type": "http.disconnect"}

    async def _decoded(self, decoder: Decoder, message: Message) -> bytes:
        """The decoded body of a message, up to a piece beyond the limit."""
        decoded = bytearray()
        try:
            for piece in decoder.decode(message.get("body", b"")):
                decoded += piece
                if len(decoded) > self._left:
                    break
                await asyncio.sleep(0)  # for other streams
            else:
                if not self._has_more and not decoder.is_complete:
                    raise ValueError("it ends too early")
        except ValueError as error:
            self.refusal = invalid_body_response(f"the body is not valid {self._coding}: {error}")
        return bytes(decoded)


def _content_coding(scope: Scope) -> str:
    """The coding in the header; several are not supported, and lie outside `CODINGS`. Empty for
    none."""
    values = [value for name, value in scope["headers"] if name == b"content-encoding"]
    names = b",".join(values).decode("latin-1").lower().split(",")
    given = [name.strip() for name in names if name.strip() not in ("", "identity")]
    return ", ".join("gzip" if name == "x-gzip" else name for name in given)


def _content_length(scope: Scope) -> int:
    """The value of the header; 0 if it is absent or not a number."""
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit():
            return int(value)
    return 0


class CheckHost:
    """Refuses requests without exactly one Host (HTTP/1.0: or none), and those under a name that is
    not allowed."""

    def __init__(self, app: ASGIApp, allowed: Collection[str] | None) -> None:
        """`allowed`: names in lower case; None: any."""
        self._app = app
        self._allowed = allowed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._why_not(scope) if scope["type"] == "http" else None
        if error is None:
            await self._app(scope, receive, send)
        else:
            await error_response(error)(scope, receive, send)

    def _why_not(self, scope: Scope) -> PagewireError | None:
        hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        if not hosts and scope["http_version"] < "1.1":
            return None
        if len(hosts) != 1:
            return InvalidArgument("Host", f"expected one such header, got {len(hosts)}")
        if self._allowed is None:
            return None
        try:
            name = urlsplit(f"//{hosts[0]}").hostname
        except ValueError:
            name = None
        if name in self._allowed:
            return None
        return PermissionDenied(
            f"Host: expected one of {', '.join(sorted(self._allowed))}, got {hosts[0][:100]!r}; "
            "--http-allowed-hosts adds names",
            reason="HOST_NOT_ALLOWED",
        )


OPEN_PATHS = ("/health", "/ping", "/openapi.json")
"""Paths that need no key; they reveal nothing about requests or tenants."""

_KEY = "pagewire.tenant"


class Authenticate:
    """Refuses callers without valid credentials, except at the open paths."""

    def __init__(
        self, app: ASGIApp, authentication: Authentication, open_paths: Collection[str]
    ) -> None:
        self._app = app
        self._authentication = authentication
        self._open_paths = frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in self._open_paths:
            try:
                scope[_KEY] = self._authentication.authenticate(_authorization(scope))
            except Unauthenticated as error:
                await error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _authorization(scope: Scope) -> str | None:
    """The credentials in the headers, which are read like gRPC's metadata."""
    return authorization(
        (name.decode(), value.decode("latin-1")) for name, value in scope["headers"]
    )


async def _tenant(request: Request) -> Principal:  # FastAPI calls others in a thread
    tenant = request.scope[_KEY]
    assert isinstance(tenant, Principal)
    return tenant


async def _services(request: Request) -> HttpServices:
    services = request.app.state.services
    assert isinstance(services, HttpServices)
    return services


Caller = Annotated[Principal, Depends(_tenant)]
"""The type of an endpoint's parameter that holds the caller."""
Services = Annotated[HttpServices, Depends(_services)]
"""The type of an endpoint's parameter that holds the services."""


class TraceContext:
    """Sets the call's `traceparent` for its requests."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            found = (value for name, value in scope["headers"] if name == b"traceparent")
            TRACEPARENT.set(next((value.decode("latin-1") for value in found), None))
        await self._app(scope, receive, send)


class RequestIds:
    """Gives error answers the header `X-Request-Id` that successful ones have: the caller's own,
    or a new one if that is absent or malformed. Logs them by it, without what they quote."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refused: tuple[int, bytes] | None = None

        async def send_with_id(message: Message) -> None:
            nonlocal refused
            if message["type"] == "http.response.start" and message["status"] >= 400:
                headers = message["headers"]
                found = [value for name, value in headers if name.lower() == b"x-request-id"]
                if not found:
                    found = [_id_for(scope)]
                    message = {**message, "headers": [*headers, (b"x-request-id", found[0])]}
                refused = message["status"], found[0]
            elif refused is not None:
                _log_refusal(scope, *refused, message.get("body", b""))
                refused = None
            await send(message)

        await self._app(scope, receive, send_with_id if scope["type"] == "http" else send)


def _log_refusal(scope: Scope, status: int, request_id: bytes, body: bytes) -> None:
    """The reason and the field, but not the message: it may quote a prompt."""
    if not logger.isEnabledFor(logging.DEBUG):
        return
    try:
        error = json.loads(body)["error"]
    except (ValueError, TypeError, KeyError):
        error = {}
    logger.debug(
        "request refused request_id=%s method=%s path=%s status=%d reason=%s field=%s",
        *(request_id.decode("latin-1"), scope["method"], scope["raw_path"].decode("latin-1")),
        *(status, error.get("code") or error.get("type"), error.get("param")),
    )


def _id_for(scope: Scope) -> bytes:
    given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
    return given if _REQUEST_ID.fullmatch(given) else draw_request_id().encode()
