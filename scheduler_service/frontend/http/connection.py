"""One HTTP/1 connection: uvicorn's protocol with limits on what a client may cost."""

import asyncio
from typing import Any

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from scheduler_service.frontend.config import MAX_PUBLIC_MESSAGE_BYTES

MAX_HEAD_BYTES = 64 << 10
"""Request line and headers together, also of a request that is sent while the previous one is
answered; and headers together with the trailers of a chunked body."""

HEAD_TIMEOUT_S = 20.0
"""Time limit from the connection, or from a request's first byte, to the end of its head."""


class Connection(HttpToolsProtocol):
    """A connection that is closed when it exceeds a limit."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        *,
        max_connections: int | None,
    ) -> None:
        """`max_connections`: None for any number; the others are uvicorn's."""
        super().__init__(config, server_state, app_state)
        self._max_connections = max_connections
        self._num_bytes = 0
        """Bytes of what is being read: a head, or a body with its framing."""
        self._num_field_bytes = 0
        """Bytes of the present request's headers and trailers."""
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if self._max_connections is not None and len(self.connections) > self._max_connections:
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

    # What the parser calls.

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
