"""The HTTP server: uvicorn on its own sockets, with TLS and timeouts for slow clients."""

import asyncio
import ctypes
import errno
import logging
import socket
import ssl
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from scheduler_service.frontend.http.middleware import HttpServices
from service_common.addresses import split_host_port
from service_common.errors import CannotListen
from service_common.tls import TlsFiles
from service_common.watched_files import WatchedFiles

if TYPE_CHECKING:
    import uvicorn

logger = logging.getLogger(__name__)


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


HANDSHAKE_S = 0.05
"""Time for TCP handshakes under way to end before a shared port is left. Clients that begin one
meanwhile try again after a second, and reach another frontend."""

_SO_ATTACH_FILTER = 26
_DROP_SYN = ((0x30, 0, 0, 13), (0x45, 0, 1, 0x02), (0x06, 0, 0, 0), (0x06, 0, 0, 0xFFFFFFFF))
"""A filter of Linux for packets: load the byte of TCP's flags; if SYN is set, drop, else pass."""


def ignore_handshakes(listening: socket.socket) -> None:
    """Let no client begin a connection here any longer, where the system can do that (Linux).

    Closing a socket resets the connections that it has not accepted yet. Without new ones, all can
    be accepted first.
    """
    program = b"".join(struct.pack("HBBI", *step) for step in _DROP_SYN)
    buffer = ctypes.create_string_buffer(program, len(program))
    with suppress(OSError):
        listening.setsockopt(
            socket.SOL_SOCKET,
            _SO_ATTACH_FILTER,
            struct.pack("HP", len(_DROP_SYN), ctypes.addressof(buffer)),
        )


POLL_S = 0.05
IDLE_TIMEOUT_S = 75
"""An idle connection is closed after this; longer than clients and proxies commonly keep one, so
that they close it first, and none sends a request into a closed connection."""


class HttpServer:
    """The HTTP side of one frontend: `bind`, `start`, `leave`, `stop`."""

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
        self._is_leaving = asyncio.Event()

    @property
    def is_started(self) -> bool:
        """True once it answers; until then callers wait."""
        return self._server is not None and self._server.started

    @property
    def num_connections(self) -> int:
        """Open connections."""
        return len(self._connections())

    def bind(self) -> None:
        """Listen; raises CannotListen. Connections wait until `start`."""
        self._sockets = bind(self.address, share_port=self._share_port)
        self.address = address_of(self._sockets, self.address)

    async def start(self, services: HttpServices) -> None:
        """Import the libraries, off the loop, and answer."""
        self._server = await asyncio.to_thread(
            _make_server, services, self._tls, self._max_connections, self._is_leaving
        )
        if self._is_leaving.is_set():
            return
        self._serving = asyncio.create_task(self._server.serve(self._sockets))
        logger.info("listening http=%s", self.address)

    async def leave(self) -> None:
        """Stop listening, and wait until no connection is left.

        Connections that clients have made are served: the next answer on one says that it is the
        last, and an idle one is closed after a second.
        """
        self._is_leaving.set()
        for connection in self._connections():
            connection.leave()
        if self._server is not None and self.is_started:
            if self._share_port:
                for listening in self._sockets:
                    ignore_handshakes(listening)
                await asyncio.sleep(HANDSHAKE_S)
            for server in self._server.servers:
                server.close()
        for listening in self._sockets:
            listening.close()
        while self.num_connections:  # noqa: ASYNC110 - uvicorn has no event for it
            await asyncio.sleep(POLL_S)

    def _connections(self) -> list[Any]:
        return [] if self._server is None else list(self._server.server_state.connections)

    async def stop(self, flush_s: float) -> None:
        """Give connections `flush_s` seconds for their last bytes, then close all.

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
            for connection in self._connections():
                if connection.transport is not None:
                    connection.transport.abort()
            for task in list(self._server.server_state.tasks):
                task.cancel()
        await self._serving
        logger.info("stopped http=%s", self.address)


def _make_server(
    services: HttpServices,
    tls: ssl.SSLContext | None,
    max_connections: int | None,
    is_leaving: asyncio.Event,
) -> "uvicorn.Server":
    import uvicorn

    from scheduler_service.frontend.http.anthropic import AnthropicErrors
    from scheduler_service.frontend.http.app import make_app
    from scheduler_service.frontend.http.connection import Connection
    from scheduler_service.frontend.http.middleware import RequestIds

    class Server(uvicorn.Server):
        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            """The frontend has its own signal handlers."""
            yield

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            """Serve the sockets, with shorter timeouts for handshakes than uvicorn's."""
            timeouts: dict[str, Any] = {} if tls is None else handshake_timeouts()
            loop = asyncio.get_running_loop()
            servers = [
                await loop.create_server(
                    self._make_protocol,
                    sock=listening,
                    ssl=self.config.ssl,
                    backlog=BACKLOG,
                    **timeouts,
                )
                for listening in sockets or []
            ]
            await super().startup(sockets=[])
            self.servers += servers

        def _make_protocol(self) -> asyncio.Protocol:
            return Connection(
                self.config,
                self.server_state,
                self.lifespan.state,
                max_connections=max_connections,
                is_leaving=is_leaving,
            )

    config = uvicorn.Config(
        RequestIds(AnthropicErrors(make_app(services))),
        log_config=None,
        log_level="warning",  # the start has a log line of its own
        access_log=False,
        lifespan="off",
        http="httptools",
        ws="none",
        server_header=False,
        timeout_keep_alive=IDLE_TIMEOUT_S,
        ssl_context_factory=None if tls is None else lambda *_: tls,
    )
    config.load()
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
