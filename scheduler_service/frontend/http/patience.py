"""How long, how much and how often a client may keep an HTTP connection waiting.

uvicorn itself limits only the time between requests. A client that sends its request's head a byte
at a time, or none at all, would have a connection for as long as it likes, and memory for a head of
any length.
"""

import asyncio
from typing import Any

from scheduler_service.frontend.public_options import MAX_PUBLIC_MESSAGE_BYTES

MAX_HEAD_BYTES = 64 << 10
"""Request line and headers together, also of a request that is sent while the one before it is
answered; and headers together with the trailers behind a body in chunks."""

HEAD_TIMEOUT_S = 20.0
"""From the connection, or from a request's first byte, to the end of its head."""

HANDSHAKE_TIMEOUT_S = 10.0
"""From the connection to TLS; before, it does not count as one. asyncio's own is a minute."""

FAREWELL_TIMEOUT_S = 5.0
"""For a client to say that it has noticed the end of TLS. asyncio's own is half a minute."""


def handshake_timeouts() -> dict[str, float]:
    """As asyncio's servers take them, where they speak TLS."""
    return {
        "ssl_handshake_timeout": HANDSHAKE_TIMEOUT_S,
        "ssl_shutdown_timeout": FAREWELL_TIMEOUT_S,
    }


def patient(protocol: type[Any], *, max_connections: int | None) -> type[Any]:
    """One of uvicorn's protocols with these limits; who exceeds them is cut off."""

    class Patient(protocol):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._num_bytes = 0
            """Of what is being read: a head, or a body with all that is around it."""
            self._num_field_bytes = 0
            """Of the present request's headers and trailers."""
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
            if cycle is None:  # who sends ahead may take their time until the answer has ended
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
            self.cycle.more_body = False  # of one that was refused, too
            self._num_bytes = 0

        def _is_answering(self) -> bool:
            return self.cycle is not None and not self.cycle.response_complete

        def _max_bytes(self) -> int:
            """More where a body comes, or the rest of one that was refused: its sender shall read
            why."""
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
            """Unless a request was answered within the very data that began it."""
            if not self._is_answering():
                self.transport.abort()

    return Patient
