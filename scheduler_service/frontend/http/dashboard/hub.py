"""The dashboard's endpoints: its files, and one stream of views for all browsers."""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from importlib import resources
from typing import Any

import grpc
from fastapi import APIRouter, Response
from fastapi.responses import StreamingResponse

from pagewire.v1 import scheduler_service_pb2 as pb
from pagewire.v1 import status_pb2
from scheduler_service.errors import Unavailable
from scheduler_service.frontend.core_client import CoreConnection
from scheduler_service.frontend.http.dashboard.series import FIELDS, Series
from scheduler_service.frontend.http.dashboard.view import View, changes, view_of
from scheduler_service.frontend.http.middleware import Caller, HttpServices

logger = logging.getLogger(__name__)

INTERVAL_MS = 1000
MAX_REQUESTS = 512
MAX_BROWSERS = 256
SILENCE_S = 5.0
"""A core that sends nothing for this long counts as lost."""
RETRY_S = 1.0


class Browser:
    """An open page: the next line for it."""

    def __init__(self) -> None:
        self.has_update = asyncio.Event()
        self.line: bytes | None = None
        self.needs_all = True


class Hub:
    """Sends the core's status to browsers."""

    def __init__(self, core: CoreConnection) -> None:
        self._core = core
        self._browsers: set[Browser] = set()
        self._view = View()
        self._series = Series()
        self._uptime_s = 0.0
        self._lost: str | None = "connecting to the scheduler core"
        self._watching: asyncio.Task[None] | None = None

    async def lines(self) -> AsyncGenerator[bytes, None]:
        """The endless lines for one browser.

        Raises Unavailable if there are too many.
        """
        browser = self._enter()
        try:
            while True:
                await browser.has_update.wait()
                yield await self._take(browser)
        finally:
            self._leave(browser)

    def check_room(self) -> None:
        """Raise Unavailable if there are too many browsers."""
        if len(self._browsers) >= MAX_BROWSERS:
            raise Unavailable(f"{MAX_BROWSERS} dashboards are open", reason="TOO_MANY_DASHBOARDS")

    def close(self) -> None:
        """End the watch."""
        if self._watching is not None:
            self._watching.cancel()
            self._watching = None

    def _enter(self) -> Browser:
        self.check_room()
        browser = Browser()
        browser.has_update.set()
        self._browsers.add(browser)
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch())
        return browser

    def _leave(self, browser: Browser) -> None:
        self._browsers.discard(browser)
        if not self._browsers:
            self.close()

    async def _take(self, browser: Browser) -> bytes:
        browser.has_update.clear()
        line, browser.line = browser.line, None
        if not browser.needs_all and line is not None:
            return line
        browser.needs_all = False
        message = {"all": True, "fields": FIELDS, "points": list(self._series.points)}
        # A large view takes long to serialize, and the loop serves streams of tokens. Changes that
        # arrive meanwhile are relative to this view, and come next.
        return await asyncio.to_thread(_whole_line, message | self._state(), self._view)

    def _state(self) -> dict[str, Any]:
        """The fields of every line."""
        return {"uptime": round(self._uptime_s, 2), "lost": self._lost}

    def _send(self, message: dict[str, Any]) -> None:
        line = _to_json(message | self._state()).encode() + b"\n"
        for browser in self._browsers:
            browser.needs_all |= browser.line is not None
            browser.line = line
            browser.has_update.set()

    async def _watch(self) -> None:
        """Watch the core, and reconnect whenever it is lost."""
        while True:
            try:
                await self._follow()
            except Exception:  # a bug; pages would keep showing an old status
                logger.exception("watch failed")
                self._lost = "the frontend cannot read the core's status"
            self._send({})
            await asyncio.sleep(RETRY_S)

    async def _follow(self) -> None:
        """Send the core's statuses until the watch ends."""
        request = pb.SchedulerServiceWatchStatusRequest(
            interval_ms=INTERVAL_MS,
            detail=status_pb2.StatusDetail(
                include_requests=True, include_blocks=True, max_requests=MAX_REQUESTS
            ),
        )
        call = self._core.stub.WatchStatus(request)
        try:
            while True:
                async with asyncio.timeout(SILENCE_S):
                    response = await call.read()
                if response is grpc.aio.EOF:
                    self._lost = "the scheduler core has ended"
                    return
                self._publish(response.status)
        except TimeoutError:
            self._lost = "the scheduler core is silent"
        except asyncio.CancelledError:
            # A call also ends like this when its channel is replaced because of newer certificates.
            if (task := asyncio.current_task()) is None or task.cancelling():
                raise
            self._lost = "the scheduler core cannot be reached"
        except grpc.aio.AioRpcError as error:
            self._lost = "the scheduler core cannot be reached"
            logger.debug("watch ended code=%s details=%s", error.code().name, error.details())
        finally:
            call.cancel()

    def _publish(self, status: status_pb2.EngineStatus) -> None:
        point = self._series.add(status)
        view = view_of(status, self._series.recent)
        self._lost, self._uptime_s = None, status.uptime_s
        message = {"point": point, **changes(self._view, view)}
        self._view = view
        self._send(message)


def _whole_line(message: dict[str, Any], view: View) -> bytes:
    return _to_json(message | changes(View(), view)).encode() + b"\n"


def _to_json(value: Any, depth: int = 2) -> str:
    """The value as JSON. Entries of large objects are serialized one by one, so that other threads
    run in between."""
    if depth and isinstance(value, dict):
        entries = (
            f"{json.dumps(name)}:{_to_json(field, depth - 1)}" for name, field in value.items()
        )
        return f"{{{','.join(entries)}}}"
    return json.dumps(value, separators=(",", ":"))


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

_PAGE = "index.html"
"""Its links are relative to `/`."""

FILE_PATHS = ("/", *(f"/dashboard/{name}" for name in sorted(_FILES) if name != _PAGE))
"""The page itself is public; it asks for a key if one is required."""

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

    @router.api_route("/", methods=["GET", "HEAD"])
    async def page() -> Response:
        return _file(_PAGE)

    @router.get("/dashboard/stream")
    async def stream(caller: Caller) -> Response:
        """Lines of JSON, one a second; raises PermissionDenied unless the caller is an operator."""
        caller.check_operator()
        hub.check_room()
        headers = _HEADERS | {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(
            _until_draining(hub, services), media_type="application/x-ndjson", headers=headers
        )

    @router.get("/dashboard/{name}")
    async def file(name: str) -> Response:
        is_known = name in _FILES and name != _PAGE
        return _file(name) if is_known else Response(status_code=404)

    return router


async def _until_draining(hub: Hub, services: HttpServices) -> AsyncIterator[bytes]:
    """The lines until shutdown; one at least every few seconds shows that both sides are alive."""
    async with aclosing(hub.lines()) as lines:
        async for line in lines:
            if services.requests.capacity.is_draining.is_set():
                return
            yield line


def _file(name: str) -> Response:
    kind = _TYPES[name.rpartition(".")[2]]
    return Response(_FILES[name], headers=_HEADERS, media_type=kind)
