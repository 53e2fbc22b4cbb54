"""Hosts as processes on loopback, with a relay for each service that a host calls on another."""

import asyncio
from collections import defaultdict
from contextlib import suppress
from typing import Self

from tests.chaos.network import Link, Network
from tools.launch import free_port

CHUNK_BYTES = 65536

Direction = tuple[str, str]
"""Sender and receiver."""


class RelayNetwork(Network):
    """A cut direction is not read, so that its data waits, as a kernel would retransmit it; while
    either direction is cut, no new connection can be made."""

    def __init__(self, links: list[Link]) -> None:
        super().__init__(links)
        self._ports = {host: free_port() for host in self.hosts}
        self._relays: dict[Direction, asyncio.Server] = {}
        self._open: dict[Direction, asyncio.Event] = defaultdict(_set_event)
        self._pumps: set[asyncio.Task[None]] = set()

    def program(self, host: str) -> list[str]:
        return []

    def listen_address(self, host: str) -> str:
        return f"127.0.0.1:{self._ports[host]}"

    def address(self, caller: str, callee: str) -> str:
        return f"127.0.0.1:{self._relays[caller, callee].sockets[0].getsockname()[1]}"

    def _cut(self, sender: str, receiver: str) -> None:
        self._open[sender, receiver].clear()

    def _heal(self, sender: str, receiver: str) -> None:
        self._open[sender, receiver].set()

    async def __aenter__(self) -> Self:
        for link in self.links:
            for caller, callee in ((link.one, link.other), (link.other, link.one)):
                if callee in self._ports:
                    await self._listen(caller, callee)
        return self

    async def __aexit__(self, *_: object) -> None:
        for relay in self._relays.values():
            relay.close()
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    async def _listen(self, caller: str, callee: str) -> None:
        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            pump = asyncio.create_task(self._connect(caller, callee, reader, writer))
            self._pumps.add(pump)
            pump.add_done_callback(self._pumps.discard)

        self._relays[caller, callee] = await asyncio.start_server(accept, "127.0.0.1", 0)

    async def _connect(
        self,
        caller: str,
        callee: str,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        """One connection, from end to end, until either end closes it."""
        await self._open[caller, callee].wait()
        await self._open[callee, caller].wait()
        far: asyncio.StreamWriter | None = None
        with suppress(OSError):
            back, far = await asyncio.open_connection("127.0.0.1", self._ports[callee])
            async with asyncio.TaskGroup() as pumps:
                there = pumps.create_task(self._pump(reader, far, self._open[caller, callee]))
                here = pumps.create_task(self._pump(back, writer, self._open[callee, caller]))
                await asyncio.wait((there, here), return_when=asyncio.FIRST_COMPLETED)
                there.cancel()
                here.cancel()
        for end in (writer, far):
            if end is not None:
                end.close()

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, is_open: asyncio.Event
    ) -> None:
        with suppress(OSError):
            while data := await reader.read(CHUNK_BYTES):
                await is_open.wait()
                writer.write(data)
                await writer.drain()
        # The end of a connection crosses a cut link no more than what was sent on it.
        await is_open.wait()


def _set_event() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event
