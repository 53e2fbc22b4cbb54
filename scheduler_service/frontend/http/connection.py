"""One HTTP/1 connection: uvicorn's protocol with limits on what a client may cost, and with what it
lacks: offers to upgrade are ignored, HTTP/1.0 is spoken, half-closed connections are answered, and
a shutdown is announced."""

import asyncio
import logging
import socket
from email.utils import formatdate
from typing import Any

import httptools
from starlette.types import ASGIApp
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from scheduler_service.frontend.config import MAX_PUBLIC_MESSAGE_BYTES

logger = logging.getLogger(__name__)

MAX_HEAD_BYTES = 64 << 10
"""Request line and headers together, also of a request that is sent while the previous one is
answered; and headers together with the trailers of a chunked body."""

HEAD_TIMEOUT_S = 20.0
"""Time limit from the connection, or from a request's first byte, to the end of its head."""

IDLE_TIMEOUT_S = 75
"""An idle connection is closed after this; longer than clients and proxies commonly keep one, so
that they close it first, and none sends a request into a closed connection."""

LEAVING_IDLE_TIMEOUT_S = 1.0
"""An idle connection is closed after this during shutdown: a client that is about to send a request
gets its answer."""

CHECK_INTERVAL_S = 0.05
"""How often a half-closed connection is checked for its client."""

BEGINNING = b"HTTP/1.1 "
"""The bytes that every answer begins with."""

OFFER_HEADERS = (b"upgrade", b"http2-settings")
"""Headers of an offer to continue in another protocol; `Connection` names them."""


def connection_config(app: ASGIApp) -> Config:
    """The settings of connections to `app`."""
    config = Config(
        app,
        log_config=None,
        log_level="warning",  # the start has a log line of its own
        access_log=False,
        lifespan="off",
        http="httptools",
        ws="none",
        timeout_keep_alive=IDLE_TIMEOUT_S,
    )
    config.load()
    return config


class Connection(HttpToolsProtocol):
    """A connection that is closed when it exceeds a limit."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        *,
        max_connections: int | None,
        is_leaving: asyncio.Event,
    ) -> None:
        """`max_connections`: None for any number; `is_leaving`: set at shutdown, together with a
        call of `leave`; the others are uvicorn's."""
        super().__init__(config, server_state, app_state)
        self._max_connections = max_connections
        self._is_leaving = is_leaving
        self._num_bytes = 0
        """Bytes of what is being read: a head, or a body with its framing."""
        self._num_field_bytes = 0
        """Bytes of the present request's headers and trailers."""
        self._head_timer: asyncio.TimerHandle | None = None
        self._running: RequestResponseCycle | None = None
        """The exchange that was begun last; those of requests that were sent ahead follow."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if self._max_connections is not None and len(self.connections) > self._max_connections:
            transport.abort()
        else:
            self._await_head()
            if self._is_leaving.is_set():
                self.leave()

    def leave(self) -> None:
        """Make the next answer the last one, and close an idle connection soon."""
        self.timeout_keep_alive = LEAVING_IDLE_TIMEOUT_S  # type: ignore[assignment]
        if not self._is_answering():
            if not self._num_bytes:  # otherwise a request has begun to arrive
                self._unset_keepalive_if_required()
                self.timeout_keep_alive_task = self.loop.call_later(
                    LEAVING_IDLE_TIMEOUT_S, self.timeout_keep_alive_handler
                )
        elif not self.cycle.response_started:
            self.cycle.keep_alive = False

    def data_received(self, data: bytes) -> None:
        cycle: Any = self.cycle if self._is_answering() else None
        is_body = cycle is not None and cycle.more_body
        if cycle is None:  # a request sent ahead has no time limit until the answer has ended
            self._await_head()
        self._num_bytes += len(data)
        self._unset_keepalive_if_required()
        self._parse(data)
        has_begun = self._is_answering() and self.cycle is not cycle
        if has_begun or (is_body and not cycle.more_body):
            self._stop_timer()
            self._num_bytes = 0
        elif self._num_bytes > self._max_bytes() and not self.flow.read_paused:
            self.transport.abort()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep the connection of a client that sends nothing more and waits for its answers.

        A client that has gone looks the same until data reaches its machine, which refuses it. So
        something is sent at once that is part of any answer: its first bytes, or a zero before the
        size of the next chunk.
        """
        cycle = self.cycle
        if not self._is_answering() or cycle.more_body or self.scheme == "https":
            return False
        cycle.keep_alive = cycle.waiting_for_100_continue = False
        if not self.pipeline and not cycle.response_started:
            self.transport.write(BEGINNING)
            cycle.transport = _BegunTransport(cycle)  # type: ignore[assignment]
        elif not self.pipeline and cycle.chunked_encoding:
            self.transport.write(b"0")
        self._check_client()
        return True

    def connection_lost(self, error: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(error)  # which ends the newest exchange, not the one that runs
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    # What the parser calls.

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._num_field_bytes = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._num_field_bytes += len(name) + len(value)
        if self._num_field_bytes > MAX_HEAD_BYTES:
            self.transport.abort()

    def on_headers_complete(self) -> None:
        self.server_state.default_headers = [(b"date", formatdate(usegmt=True).encode())]
        super().on_headers_complete()
        if self.parser.should_upgrade():
            return
        self.cycle.transport = _JoiningTransport(self.cycle, self.loop)  # type: ignore[assignment]
        if self.scope["http_version"] < "1.1":
            self._speak_1_0(self.cycle)
        if self._is_leaving.is_set():
            self.cycle.keep_alive = False

    def on_message_complete(self) -> None:
        super().on_message_complete()
        if self.parser.should_upgrade():
            return
        self.cycle.more_body = False  # even if the request was refused
        self._num_bytes = 0

    def _should_upgrade(self) -> bool:
        """Make uvicorn skip a request with an offer, which is parsed again without it."""
        return True

    def _parse(self, data: bytes) -> None:
        rest: bytes | memoryview = data
        try:
            while rest:
                try:
                    self.parser.feed_data(rest)
                    return
                except httptools.HttpParserUpgrade as offer:
                    rest = memoryview(rest)[offer.args[0] :]
                    self._parse_without_offer()
        except httptools.HttpParserError as error:
            logger.debug("request malformed reason=%s", type(error).__name__)
            self.send_400_response("Invalid HTTP request received.")

    def _parse_without_offer(self) -> None:
        """Parse the head again without its offer to upgrade, which is ignored (RFC 9110, 7.8): the
        parser takes whatever follows such a head for the other protocol."""
        method, version = self.parser.get_method(), self.parser.get_http_version()
        if method == b"CONNECT":
            raise httptools.HttpParserInvalidMethodError
        lines = [b"%b %b HTTP/%b" % (method, self.url, version.encode())]
        for name, value in self.headers:
            if name == b"connection":
                options = (option.strip() for option in value.split(b","))
                value = b", ".join(o for o in options if o.lower() not in OFFER_HEADERS)
            if name not in OFFER_HEADERS:
                lines.append(name + b": " + value)
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self.parser.feed_data(b"\r\n".join((*lines, b"", b"")))

    def _speak_1_0(self, cycle: RequestResponseCycle) -> None:
        """Answer without chunks, which HTTP/1.0 lacks: the end of the connection ends a body of
        unknown length. A connection is kept if the client asks for it and the length is known."""
        names = {name for name, _ in self.headers}
        keeps_alive = self.parser.should_keep_alive() and b"transfer-encoding" not in names
        send = cycle.send
        cycle.chunked_encoding = cycle.keep_alive = cycle.waiting_for_100_continue = False

        async def send_1_0(message: Any) -> None:
            if message["type"] == "http.response.body":
                cycle.expected_content_length = len(message.get("body", b""))
            elif keeps_alive and not self._is_leaving.is_set():
                names = {name.lower() for name, _ in message["headers"]}
                if b"content-length" in names and b"connection" not in names:
                    cycle.keep_alive = True
                    kept = (b"connection", b"keep-alive")
                    message = {**message, "headers": [*message["headers"], kept]}
            await send(message)

        cycle.send = send_1_0  # type: ignore[method-assign]

    def _check_client(self) -> None:
        """Close a half-closed connection once the client's machine has refused data."""
        if not self._is_answering() or self.transport.is_closing():
            return
        refused = self.transport.get_extra_info("socket").getsockopt(
            socket.SOL_SOCKET, socket.SO_ERROR
        )
        if refused:
            self.transport.abort()
        else:
            self.loop.call_later(CHECK_INTERVAL_S, self._check_client)

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _max_bytes(self) -> int:
        """The limit of what is being read. It is higher for a body, including the rest of a
        refused one, so that its sender reads the answer."""
        is_body = self.cycle is not None and self.cycle.more_body
        return 2 * MAX_PUBLIC_MESSAGE_BYTES if is_body else MAX_HEAD_BYTES

    def _await_head(self) -> None:
        if self._head_timer is None:
            self._num_bytes = 0
            self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._give_up)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _give_up(self) -> None:
        """Close the connection, unless a request is being answered."""
        if not self._is_answering():
            self.transport.abort()


class _JoiningTransport:
    """The transport of an answer, which sends the head together with what follows it in the same
    turn of the event loop: uvicorn writes them one by one, and each would wake the client."""

    def __init__(self, cycle: RequestResponseCycle, loop: asyncio.AbstractEventLoop) -> None:
        self._cycle, self._transport, self._loop = cycle, cycle.transport, loop
        self._head = b""
        self._flushing: asyncio.Handle | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Keep the head; write it with what follows, and step aside."""
        if self._flushing is None:
            self._head, self._flushing = data, self._loop.call_soon(self._flush)
        else:
            self._head += data
            self._flush()

    def close(self) -> None:
        """Close the connection after what was written."""
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        if self._flushing is not None:
            self._flushing.cancel()
        self._cycle.transport = self._transport
        if self._head:
            self._transport.write(self._head)
            self._head = b""


class _BegunTransport:
    """The transport of an answer whose `BEGINNING` has been sent."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle, self._transport = cycle, cycle.transport

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Write what follows the beginning, and step aside."""
        self._cycle.transport = self._transport
        self._transport.write(data.removeprefix(BEGINNING))
