"""What endpoints have in common: the services that they use, their caller, and ASGI middleware that
admits requests and completes error answers."""

import json
import logging
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Annotated, Any
from urllib.parse import urlsplit

from fastapi import Depends, Request
from prometheus_client import CollectorRegistry
from pydantic_core import to_json
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from scheduler_service.errors import InvalidArgument, PagewireError, PermissionDenied
from scheduler_service.frontend.adapter_service import AdapterService
from scheduler_service.frontend.auth import Authentication, Principal
from scheduler_service.frontend.core_client import CoreConnection
from scheduler_service.frontend.http.errors import error_response
from scheduler_service.frontend.input.processor import draw_request_id
from scheduler_service.frontend.models.served_models import ModelDirectory
from scheduler_service.frontend.pooling.service import PoolingService
from scheduler_service.frontend.request_manager import RequestManager
from service_common.metadata import TRACEPARENT, authorization

logger = logging.getLogger(__name__)

REQUEST_ID = r"^[A-Za-z0-9._:-]{1,100}$"
"""Shorter than the longest allowed id: the ids of several prompts get numbers appended."""
_REQUEST_ID = re.compile(REQUEST_ID)


@dataclass(frozen=True, kw_only=True, slots=True)
class HttpServices:
    """The parts of a frontend that HTTP shares with gRPC."""

    requests: RequestManager
    pooling: PoolingService
    adapters: AdapterService
    models: ModelDirectory
    core: CoreConnection
    authentication: Authentication
    registry: CollectorRegistry
    """The metrics that Prometheus scrapes."""
    allowed_hosts: frozenset[str] | None = None
    """Names that the Host header may have; None: any."""
    sse_keep_alive_s: float = 0.0
    """Time without output after which a stream gets a comment; 0: never."""


OPEN_PATHS = ("/health", "/ping", "/openapi.json")
"""Paths that need no key; they reveal nothing about requests or tenants."""

_KEY = "pagewire.tenant"


class Admission:
    """Admits requests with one Host that is allowed (HTTP/1.0: or none) and, except at the open
    paths, valid credentials. Sets the trace context of their calls."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        authentication: Authentication,
        open_paths: Collection[str],
        allowed_hosts: Collection[str] | None,
    ) -> None:
        """`allowed_hosts`: names in lower case; None: any."""
        self._app = app
        self._authentication = authentication
        self._open_paths = frozenset(open_paths)
        self._allowed_hosts = allowed_hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._check_host(scope)
            if scope["path"] not in self._open_paths:
                scope[_KEY] = self._authentication.authenticate(_credentials(scope))
        except PagewireError as error:
            await error_response(error)(scope, receive, send)
            return
        TRACEPARENT.set(next(iter(_values(scope, b"traceparent")), None))
        await self._app(scope, receive, send)

    def _check_host(self, scope: Scope) -> None:
        hosts = _values(scope, b"host")
        if not hosts and scope["http_version"] < "1.1":
            return
        if len(hosts) != 1:
            raise InvalidArgument("Host", f"expected one such header, got {len(hosts)}")
        if self._allowed_hosts is None:
            return
        try:
            name = urlsplit(f"//{hosts[0]}").hostname
        except ValueError:
            name = None
        if name not in self._allowed_hosts:
            raise PermissionDenied(
                f"Host: expected one of {', '.join(sorted(self._allowed_hosts))}, got "
                f"{hosts[0][:100]!r}; --http-allowed-hosts adds names",
                reason="HOST_NOT_ALLOWED",
            )


def _credentials(scope: Scope) -> str | None:
    """Those in the headers, which are read like gRPC's metadata."""
    return authorization((n.decode(), value.decode("latin-1")) for n, value in scope["headers"])


def _values(scope: Scope, header: bytes) -> list[str]:
    return [value.decode("latin-1") for name, value in scope["headers"] if name == header]


async def caller_of(request: Request) -> Principal:  # FastAPI calls others in a thread
    """The caller of a request that was admitted."""
    tenant = request.scope[_KEY]
    assert isinstance(tenant, Principal)
    return tenant


async def services_of(request: Request) -> HttpServices:
    """The services of the application."""
    services = request.app.state.services
    assert isinstance(services, HttpServices)
    return services


Caller = Annotated[Principal, Depends(caller_of)]
"""The type of an endpoint's parameter that holds the caller."""
Services = Annotated[HttpServices, Depends(services_of)]
"""The type of an endpoint's parameter that holds the services."""

Shape = Callable[[int, dict[str, Any]], dict[str, Any]]
"""From an HTTP code and an error in OpenAI's shape to another shape."""


class ErrorAnswers:
    """Gives error answers the header `X-Request-Id` that successful ones have: the caller's own,
    or a new one if that is absent or malformed. Logs them by it, without what they quote."""

    def __init__(self, app: ASGIApp, shapes: Mapping[str, Shape]) -> None:
        """`shapes`: those of errors that differ from OpenAI's, by path."""
        self._app = app
        self._shapes = shapes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refused: Message | None = None
        body = b""

        async def send_completed(message: Message) -> None:
            nonlocal refused, body
            if message["type"] == "http.response.start" and message["status"] >= 400:
                refused = message
            elif refused is None:
                await send(message)
            else:
                body += message.get("body", b"")
                if not message.get("more_body", False):
                    await self._send(scope, refused, body, send)

        await self._app(scope, receive, send_completed)

    async def _send(self, scope: Scope, start: Message, body: bytes, send: Send) -> None:
        headers = {name.lower(): value for name, value in start["headers"]}
        request_id = headers.setdefault(b"x-request-id", _id_for(scope))
        _log_refusal(scope, start["status"], request_id, body)
        if (shape := self._shapes.get(scope["path"])) is not None:
            body = to_json(shape(start["status"], json.loads(body)))
            headers[b"content-length"] = str(len(body)).encode()
        await send({**start, "headers": list(headers.items())})
        await send({"type": "http.response.body", "body": body})


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
    given = next(iter(_values(scope, b"x-request-id")), "")
    return (given if _REQUEST_ID.fullmatch(given) else draw_request_id()).encode()
