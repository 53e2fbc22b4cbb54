"""The page's files, for anybody, and its stream, for operators."""

import hashlib
from collections.abc import AsyncIterator
from contextlib import aclosing
from importlib import resources
from typing import Annotated

from fastapi import APIRouter, Header, Response
from fastapi.responses import StreamingResponse

from scheduler_service.frontend.http.callers import Caller
from scheduler_service.frontend.http.dashboard.hub import Hub
from scheduler_service.frontend.http.services import HttpServices

_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_FILES = {
    entry.name: entry.read_bytes()
    for entry in (resources.files(__package__) / "static").iterdir()
    if entry.name.rpartition(".")[2] in _TYPES
}

FILE_PATHS = ("/", *(f"/dashboard/{name}" for name in sorted(_FILES)))
"""The page without its contents: it asks for a key where one is needed."""

_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def make_router(services: HttpServices) -> APIRouter:
    """`/`, the files that it loads, and `/dashboard/stream`."""
    router = APIRouter(include_in_schema=False)
    hub = Hub(services.core)

    @router.get("/")
    async def page(if_none_match: Annotated[str | None, Header()] = None) -> Response:
        return _file("index.html", if_none_match)

    @router.get("/dashboard/stream")
    async def stream(caller: Caller) -> Response:
        """Lines of JSON, one a second; raises PermissionDenied for who is not an operator."""
        caller.check_operator()
        hub.check_room()
        headers = _HEADERS | {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(
            _until_draining(hub, services), media_type="application/x-ndjson", headers=headers
        )

    @router.get("/dashboard/{name}")
    async def file(name: str, if_none_match: Annotated[str | None, Header()] = None) -> Response:
        return _file(name, if_none_match) if name in _FILES else Response(status_code=404)

    return router


async def _until_draining(hub: Hub, services: HttpServices) -> AsyncIterator[bytes]:
    """A line at least every few seconds tells whether the browser, and we, are still there."""
    async with aclosing(hub.lines()) as lines:
        async for line in lines:
            if services.requests.is_draining.is_set():
                hub.close()
                return
            yield line


def _file(name: str, if_none_match: str | None) -> Response:
    content = _FILES[name]
    etag = f'"{hashlib.sha256(content).hexdigest()[:24]}"'
    headers = _HEADERS | {"ETag": etag}
    if if_none_match == etag:
        return Response(status_code=304, headers=headers)
    return Response(content, headers=headers, media_type=_TYPES[name.rpartition(".")[2]])
