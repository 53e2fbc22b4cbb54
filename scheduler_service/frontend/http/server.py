"""uvicorn in the frontend's event loop: its sockets, its start, its orderly end."""

import asyncio
import logging
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from scheduler_service.frontend.http import sockets
from scheduler_service.frontend.http.patience import handshake_timeouts, patient
from scheduler_service.frontend.http.services import HttpServices
from scheduler_service.frontend.http.sockets import BACKLOG

if TYPE_CHECKING:
    import uvicorn

logger = logging.getLogger(__name__)

IDLE_TIMEOUT_S = 75
"""An idle connection is closed after this; longer than clients and proxies commonly keep one, so
that it is they who close it and none sends a request into a closed connection."""


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
        """Where it listens; with port 0, the port in effect once it is bound."""
        self._share_port = share_port
        self._tls = tls
        self._max_connections = max_connections
        self._sockets: list[socket.socket] = []
        self._server: uvicorn.Server | None = None
        self._serving: asyncio.Task[None] | None = None

    @property
    def is_started(self) -> bool:
        """Whether it answers, rather than have callers wait."""
        return self._server is not None and self._server.started

    def bind(self) -> None:
        """Listen; raises CannotListen. Connections wait until `start`."""
        self._sockets = sockets.bind(self.address, share_port=self._share_port)
        self.address = sockets.address_of(self._sockets, self.address)

    async def start(self, services: HttpServices) -> None:
        """Import the libraries, off the loop, and answer."""
        self._server = await asyncio.to_thread(
            _make_server, services, self._tls, self._max_connections
        )
        self._serving = asyncio.create_task(self._server.serve(self._sockets))
        logger.info("listening http=%s", self.address)

    async def stop(self, flush_s: float) -> None:
        """Refuse new connections, give open ones `flush_s` seconds for their last bytes, end them.

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

    from scheduler_service.frontend.http.app import make_app

    class Server(uvicorn.Server):
        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            """The frontend has its own signal handlers."""
            yield

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            """Answer at the sockets, with less patience for handshakes than uvicorn has."""
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
        make_app(services),
        log_config=None,
        log_level="warning",  # that it has started is our own line
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        timeout_keep_alive=IDLE_TIMEOUT_S,
        ssl_context_factory=None if tls is None else lambda *_: tls,
    )
    config.load()
    config.http_protocol_class = patient(
        config.http_protocol_class, max_connections=max_connections
    )
    return Server(config)
