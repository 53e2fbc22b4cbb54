"""The HTTP server: uvicorn on its own sockets, with TLS and timeouts for slow clients."""

import asyncio
import errno
import logging
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from scheduler_service.frontend.config import MAX_PUBLIC_MESSAGE_BYTES
from scheduler_service.frontend.http.middleware import HttpServices
from service_common.addresses import split_host_port
from service_common.errors import CannotListen
from service_common.tls import TlsFiles
from service_common.watched_files import WatchedFiles

if TYPE_CHECKING:
    import uvicorn

logger = logging.getLogger(__name__)


MAX_HEAD_BYTES = 64 << 10
"""Request line and headers together, also of a request that is sent while the previous one is
answered; and headers together with the trailers of a chunked body."""

HEAD_TIMEOUT_S = 20.0
"""Time limit from the connection, or from a request's first byte, to the end of its head."""

HANDSHAKE_TIMEOUT_S = 10.0
"""Time limit from the TCP connection to the end of the TLS handshake; until then the client does
not count as connected. asyncio's default is a minute."""

TLS_SHUTDOWN_TIMEOUT_S = 5.0
"""Time limit for a client to confirm the end of a TLS connection; asyncio's is half a minute."""


def handshake_timeouts() -> dict[str, float]:
    """The arguments of asyncio's servers that use TLS."""
    return {
        "ssl_handshake_timeout": HANDSHAKE_TIMEOUT_S,
        "ssl_shutdown_timeout": TLS_SHUTDOWN_TIMEOUT_S,
    }


def limited(protocol: type[Any], *, max_connections: int | None) -> type[Any]:
    """One of uvicorn's protocols with these limits; a connection that exceeds them is closed."""

    class Limited(protocol):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._num_bytes = 0
            """Bytes of what is being read: a head, or a body with its framing."""
            self._num_field_bytes = 0
            """Bytes of the present request's headers and trailers."""
            self._head_timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            if max_connections is not None and len(self.connections) > max_connections:
                transport.abort()
            else:
                self._await_head()

        def data_received(self, data: bytes) -> None:
            cycle: Any = self.cycle if self._is_answering() else None
            is_body = cycle is not None and cycle.more_body
            if cycle is None:  # a request sent ahead has no time limit until the answer has ended
                self._await_head()
            self._num_bytes += len(data)
            super().data_received(data)
            has_begun = self._is_answering() and self.cycle is not cycle
            if has_begun or (is_body and not cycle.more_body):
                self._stop_timer()
                self._num_bytes = 0
            elif self._num_bytes > self._max_bytes() and not self.flow.read_paused:
                self.transport.abort()

        def connection_lost(self, error: Exception | None) -> None:
            self._stop_timer()
            super().connection_lost(error)

        # What httptools' parser calls; h11 has such limits of its own.

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._num_field_bytes = 0

        def on_header(self, name: bytes, value: bytes) -> None:
            super().on_header(name, value)
            self._num_field_bytes += len(name) + len(value)
            if self._num_field_bytes > MAX_HEAD_BYTES:
                self.transport.abort()

        def on_message_complete(self) -> None:
            super().on_message_complete()
            self.cycle.more_body = False  # even if the request was refused
            self._num_bytes = 0

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

    return Limited


BACKLOG = 2048
"""Connections that may wait to be accepted; the kernel's own limit may be lower."""


def bind(address: str, *, share_port: bool) -> list[socket.socket]:
    """Sockets that listen on every address of `HOST:PORT`; raises CannotListen with the reason.

    With `share_port` other processes of this user may listen there too, and the kernel spreads
    connections over them. With port 0 all have the port that the first was given.
    """
    host, port = split_host_port(address)
    bound: list[socket.socket] = []
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, _, _, _, where in dict.fromkeys(found):
            chosen = bound[0].getsockname()[1] if bound else port
            if found_socket := _listen(family, (where[0], chosen, *where[2:]), share_port):
                bound.append(found_socket)
        if not bound:
            raise OSError("no address family of this host can be used")
    except OSError as error:
        for listening in bound:
            listening.close()
        why = (error.strerror or str(error)).lower()
        raise CannotListen(f"{address} for HTTP", f"{why}; --http chooses another") from error
    return bound


def address_of(sockets: list[socket.socket], asked: str) -> str:
    """`HOST:PORT` with the port in effect."""
    return f"{asked.rpartition(':')[0]}:{sockets[0].getsockname()[1]}"


def _listen(family: int, where: tuple[object, ...], share_port: bool) -> socket.socket | None:
    """A listening socket, or None if the machine lacks the address family (often IPv6)."""
    try:
        listening = socket.socket(family, socket.SOCK_STREAM)
    except OSError:
        return None
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if share_port:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listening.bind(where)
        listening.listen(BACKLOG)
    except OSError as error:
        listening.close()
        if family == socket.AF_INET6 and error.errno == errno.EADDRNOTAVAIL:
            return None
        raise
    listening.setblocking(False)
    return listening


IDLE_TIMEOUT_S = 75
"""An idle connection is closed after this; longer than clients and proxies commonly keep one, so
that they close it first, and none sends a request into a closed connection."""


class HttpServer:
    """The HTTP side of one frontend: `bind`, `start`, `stop`."""

    def __init__(
        self,
        address: str,
        *,
        share_port: bool = False,
        tls: ssl.SSLContext | None = None,
        max_connections: int | None = None,
    ) -> None:
        """`address` is HOST:PORT; `share_port` lets several frontends listen there; `tls` is None
        for none; `max_connections`: None for any number."""
        self.address = address
        """The address; port 0 is replaced by the actual port once it is bound."""
        self._share_port = share_port
        self._tls = tls
        self._max_connections = max_connections
        self._sockets: list[socket.socket] = []
        self._server: uvicorn.Server | None = None
        self._serving: asyncio.Task[None] | None = None

    @property
    def is_started(self) -> bool:
        """True once it answers; until then callers wait."""
        return self._server is not None and self._server.started

    def bind(self) -> None:
        """Listen; raises CannotListen. Connections wait until `start`."""
        self._sockets = bind(self.address, share_port=self._share_port)
        self.address = address_of(self._sockets, self.address)

    async def start(self, services: HttpServices) -> None:
        """Import the libraries, off the loop, and answer."""
        self._server = await asyncio.to_thread(
            _make_server, services, self._tls, self._max_connections
        )
        self._serving = asyncio.create_task(self._server.serve(self._sockets))
        logger.info("listening http=%s", self.address)

    async def stop(self, flush_s: float) -> None:
        """Refuse new connections, give open ones `flush_s` seconds for their last bytes, close all.

        Requests must have been drained.
        """
        for listening in self._sockets:
            if self._server is None:
                listening.close()
        if self._server is None or self._serving is None:
            return
        self._server.should_exit = True
        done, _ = await asyncio.wait({self._serving}, timeout=flush_s)
        if not done:
            self._server.force_exit = True
            for connection in list(self._server.server_state.connections):
                if connection.transport is not None:
                    connection.transport.abort()
            for task in list(self._server.server_state.tasks):
                task.cancel()
        await self._serving
        logger.info("stopped http=%s", self.address)


def _make_server(
    services: HttpServices, tls: ssl.SSLContext | None, max_connections: int | None
) -> "uvicorn.Server":
    import uvicorn

    from scheduler_service.frontend.http.anthropic import AnthropicErrors
    from scheduler_service.frontend.http.app import make_app
    from scheduler_service.frontend.http.middleware import RequestIds

    class Server(uvicorn.Server):
        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            """The frontend has its own signal handlers."""
            yield

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            """Serve the sockets, with shorter timeouts for handshakes than uvicorn's."""
            await super().startup(sockets=[])
            timeouts: dict[str, Any] = {} if tls is None else handshake_timeouts()
            loop = asyncio.get_running_loop()
            for listening in sockets or []:
                self.servers.append(
                    await loop.create_server(
                        self._make_protocol,
                        sock=listening,
                        ssl=self.config.ssl,
                        backlog=BACKLOG,
                        **timeouts,
                    )
                )

        def _make_protocol(self) -> asyncio.Protocol:
            protocol: asyncio.Protocol = self.config.http_protocol_class(  # type: ignore[call-arg]
                config=self.config, server_state=self.server_state, app_state=self.lifespan.state
            )
            return protocol

    config = uvicorn.Config(
        RequestIds(AnthropicErrors(make_app(services))),
        log_config=None,
        log_level="warning",  # the start has a log line of its own
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        timeout_keep_alive=IDLE_TIMEOUT_S,
        ssl_context_factory=None if tls is None else lambda *_: tls,
    )
    config.load()
    config.http_protocol_class = limited(
        config.http_protocol_class, max_connections=max_connections
    )
    return Server(config)


def http_context(files: TlsFiles) -> ssl.SSLContext:
    """The TLS context of an HTTP server: each new connection uses the certificate and authority on
    disk at that time."""
    watched = WatchedFiles(files.paths, lambda: _context(files))
    context = _context(files)

    def use_newest(connection: ssl.SSLObject, _: str | None, __: ssl.SSLContext) -> None:
        connection.context = watched.get()

    context.sni_callback = use_newest
    return context


def _context(files: TlsFiles) -> ssl.SSLContext:
    files.check()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    context.load_cert_chain(files.cert, files.key)
    if files.ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(files.ca)
        # A resumed session shows no certificate, so clients of a former authority could resume.
        context.num_tickets = 0
        context.options |= ssl.OP_NO_TICKET
    return context
