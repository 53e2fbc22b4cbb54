"""The HTTP server: uvicorn's protocol on sockets of its own, with TLS, for slow clients too."""

import asyncio
import ctypes
import errno
import logging
import socket
import ssl
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scheduler_service.frontend.http.middleware import HttpServices
from service_common.addresses import split_host_port
from service_common.errors import CannotListen
from service_common.logging_config import LogThrottle
from service_common.tls import TlsFiles
from service_common.watched_files import WatchedFiles

if TYPE_CHECKING:
    from uvicorn.server import ServerState

logger = logging.getLogger(__name__)

HANDSHAKE_TIMEOUT_S = 10.0
"""Time limit from the TCP connection to the end of the TLS handshake; until then the client does
not count as connected. asyncio's default is a minute."""

TLS_SHUTDOWN_TIMEOUT_S = 5.0
"""Time limit for a client to confirm the end of a TLS connection; asyncio's is half a minute."""

BACKLOG = 2048
"""Connections that may wait to be accepted; the kernel's own limit may be lower."""

MAX_ACCEPTS = 64
"""Connections that are accepted at once, before those beyond `max_connections` are closed. asyncio
goes on for as many attempts when it runs out of files, each with a traceback in the log."""


class _AcceptFailures(logging.Filter):
    """Passes asyncio's reports of failures to accept a connection once in a while, as a line."""

    def __init__(self) -> None:
        super().__init__()
        self._throttle = LogThrottle()

    def filter(self, record: logging.LogRecord) -> bool:
        if not record.getMessage().startswith("socket.accept() out of system resource"):
            return True
        error = record.exc_info and record.exc_info[1]
        record.msg, record.args = "no connection can be accepted reason=%s", (str(error),)
        record.exc_info = None
        return self._throttle.should_log(str(error))


_ACCEPT_FAILURES = _AcceptFailures()


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
        why = (error.strerror or str(error)).lower().partition(" (while ")[0]
        raise CannotListen(f"{address} for HTTP", f"{why}; --http chooses another") from error
    return bound


def _listen(family: int, where: tuple[Any, ...], share_port: bool) -> socket.socket | None:
    """A listening socket, or None if the machine lacks the address family (often IPv6). Every
    address of IPv6 includes those of IPv4, as for gRPC."""
    try:
        listening = socket.create_server(
            where,
            family=family,
            backlog=BACKLOG,
            reuse_port=share_port,
            dualstack_ipv6=where[0] == "::" and socket.has_dualstack_ipv6(),
        )
    except OSError as error:
        is_absent = family == socket.AF_INET6 and error.errno == errno.EADDRNOTAVAIL
        if is_absent or error.errno == errno.EAFNOSUPPORT:
            return None
        raise
    # Connections inherit it. asyncio sets it only on sockets that were made with IPPROTO_TCP;
    # without it an answer's body waits for the client's delayed acknowledgement of its headers,
    # 40 ms.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listening.setblocking(False)
    return listening


HANDSHAKE_S = 0.05
"""Time limit for TCP handshakes under way to end before a shared port is left. The first packet of
clients that begin one meanwhile is dropped: they send it again after a second, to another frontend,
so the time is kept short."""

_SYN_RECV = "03"
"""The state of a handshake under way in Linux' tables of connections."""


def has_handshakes(port: int) -> bool:
    """Whether any TCP handshake at a port is under way; True where that is not known."""
    try:
        tables = [Path("/proc/net", name).read_text() for name in ("tcp", "tcp6")]
    except OSError:
        return True
    rows = (row.split(None, 4) for table in tables for row in table.splitlines())
    return any(row[3] == _SYN_RECV and row[1].endswith(f":{port:04X}") for row in rows)


_SO_ATTACH_FILTER = 26
_DROP_SYN = ((0x30, 0, 0, 13), (0x45, 0, 1, 0x02), (0x06, 0, 0, 0), (0x06, 0, 0, 0xFFFFFFFF))
"""A filter of Linux for packets: load the byte of TCP's flags; if SYN is set, drop, else pass."""


def ignore_handshakes(
    listening: socket.socket, packets: Sequence[tuple[int, int, int, int]] = _DROP_SYN
) -> None:
    """Let no client begin a connection here any longer, where the system can do that (Linux).

    Closing a socket resets the connections that it has not accepted yet. Without new ones, all can
    be accepted first. `packets`: the filter.
    """
    program = b"".join(struct.pack("HBBI", *step) for step in packets)
    buffer = ctypes.create_string_buffer(program, len(program))
    with suppress(OSError):
        listening.setsockopt(
            socket.SOL_SOCKET,
            _SO_ATTACH_FILTER,
            struct.pack("HP", len(packets), ctypes.addressof(buffer)),
        )


POLL_S = 0.05


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
        self._servers: list[asyncio.Server] = []
        self._state: ServerState | None = None
        """The open connections and the calls that are being answered."""
        self._is_leaving = asyncio.Event()

    @property
    def is_started(self) -> bool:
        """True once it answers; until then callers wait."""
        return bool(self._servers)

    @property
    def num_connections(self) -> int:
        """Open connections."""
        return len(self._connections())

    def bind(self) -> None:
        """Listen; raises CannotListen. Connections wait until `start`."""
        self._sockets = bind(self.address, share_port=self._share_port)
        self.address = f"{self.address.rpartition(':')[0]}:{self._sockets[0].getsockname()[1]}"

    async def start(self, services: HttpServices) -> None:
        """Import the libraries, off the loop, and answer."""
        connect = await asyncio.to_thread(self._connection_factory, services)
        if self._is_leaving.is_set():
            return
        loop = asyncio.get_running_loop()
        timeouts: dict[str, Any] = {}
        if self._tls is not None:
            timeouts["ssl_handshake_timeout"] = HANDSHAKE_TIMEOUT_S
            timeouts["ssl_shutdown_timeout"] = TLS_SHUTDOWN_TIMEOUT_S
        logging.getLogger("asyncio").addFilter(_ACCEPT_FAILURES)  # once, if it is there already
        listen = partial(
            loop.create_server, connect, ssl=self._tls, backlog=MAX_ACCEPTS, **timeouts
        )
        self._servers = [await listen(sock=bound) for bound in self._sockets]
        for bound in self._sockets:
            bound.listen(BACKLOG)  # which that has set to its own
        logger.info("listening http=%s", self.address)

    def _connection_factory(self, services: HttpServices) -> Callable[[], asyncio.Protocol]:
        from uvicorn.server import ServerState

        from scheduler_service.frontend.http import anthropic
        from scheduler_service.frontend.http.app import make_app
        from scheduler_service.frontend.http.connection import Connection, connection_config
        from scheduler_service.frontend.http.middleware import ErrorAnswers
        from scheduler_service.frontend.http.pooling import endpoints

        shapes = anthropic.ERROR_SHAPES | endpoints.ERROR_SHAPES
        self._state = ServerState()
        return partial(
            Connection,
            connection_config(ErrorAnswers(make_app(services), shapes)),
            self._state,
            {},
            max_connections=self._max_connections,
            is_leaving=self._is_leaving,
        )

    async def leave(self) -> None:
        """Stop listening, and wait until no connection is left.

        Connections that clients have made are served: the next answer on one says that it is the
        last, and an idle one is closed after a second.
        """
        self._is_leaving.set()
        for connection in self._connections():
            connection.leave()
        if self._share_port and self._servers:
            await self._finish_handshakes()
        self._close_listeners()
        await self._until_closed()

    async def _finish_handshakes(self) -> None:
        """Let no client begin a connection here, and accept those that are being made."""
        for listening in self._sockets:
            ignore_handshakes(listening)
        port = int(self.address.rpartition(":")[2])
        with suppress(TimeoutError):
            async with asyncio.timeout(HANDSHAKE_S):
                while await asyncio.to_thread(has_handshakes, port):  # noqa: ASYNC110
                    await asyncio.sleep(HANDSHAKE_S / 50)
        await asyncio.sleep(HANDSHAKE_S / 50)  # the loop accepts the last ones

    def _close_listeners(self) -> None:
        for server in self._servers:
            server.close()
        for listening in self._sockets:
            listening.close()

    def _connections(self) -> list[Any]:
        return [] if self._state is None else list(self._state.connections)

    def _tasks(self) -> list[asyncio.Task[None]]:
        return [] if self._state is None else list(self._state.tasks)

    async def stop(self, flush_s: float) -> None:
        """Give connections `flush_s` seconds for their last bytes, then close all.

        Requests must have been drained.
        """
        self._close_listeners()
        for connection in self._connections():
            connection.shutdown()
        try:
            await asyncio.wait_for(self._until_closed(), flush_s)
        except TimeoutError:
            for connection in self._connections():
                connection.transport.abort()
            for task in self._tasks():
                task.cancel()
            await asyncio.gather(*self._tasks(), return_exceptions=True)
        logger.info("stopped http=%s", self.address)

    async def _until_closed(self) -> None:
        """Wait until no connection is left, and no call that was made on one."""
        while self.num_connections or self._tasks():  # noqa: ASYNC110 - uvicorn has no event for it
            await asyncio.sleep(POLL_S)


class _NewestContext(ssl.SSLContext):
    """Wraps each new connection with the context of the files on disk at that time.

    A connection that begins with one context and changes to another, as in a callback for the
    server's name, could resume a session of the former one, whose client is not asked for its
    certificate again.
    """

    watched: WatchedFiles[ssl.SSLContext]

    def wrap_bio(self, *arguments: Any, **options: Any) -> ssl.SSLObject:
        return self.watched.get().wrap_bio(*arguments, **options)


def http_context(files: TlsFiles) -> ssl.SSLContext:
    """The TLS context of an HTTP server: each new connection uses the certificate and authority on
    disk at that time."""
    context = _NewestContext(ssl.PROTOCOL_TLS_SERVER)
    context.watched = WatchedFiles(files.paths, lambda: _context(files))
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
