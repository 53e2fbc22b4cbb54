"""A TCP proxy that can lose all data in one direction, as a one-way partition does.

Both ends keep their connections, and neither is notified. A connection that has lost data is
unusable; no new one can be made while a direction is lost, because that takes both.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class OneWayProxy:
    """Listens at `address` and passes on to a server; `up` is towards the server."""

    def __init__(self, target: str) -> None:
        self.address = ""
        self.loses_up = False
        self.loses_down = False
        self._target = target
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Listen on a free port."""
        self._server = await asyncio.start_server(self._begin, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        """End all connections."""
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _begin(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._tasks.add(asyncio.create_task(self._serve(reader, writer)))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ends = [writer]
        try:
            if self.loses_up or self.loses_down:
                await reader.read()
            else:
                await self._connect(reader, writer, ends)
        except OSError:
            pass  # an end broke the connection
        finally:
            for end in ends:
                end.close()
            await asyncio.gather(*(end.wait_closed() for end in ends), return_exceptions=True)

    async def _connect(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        ends: list[asyncio.StreamWriter],
    ) -> None:
        host, _, port = self._target.rpartition(":")
        up_reader, up_writer = await asyncio.open_connection(host, int(port))
        ends.append(up_writer)
        await asyncio.gather(
            self._pass_on(reader, up_writer, "loses_up"),
            self._pass_on(up_reader, writer, "loses_down"),
        )

    async def _pass_on(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, loses: str
    ) -> None:
        """Until the sender ends; that it has ended is lost like everything else."""
        is_lost = False
        while data := await reader.read(1 << 16):
            is_lost = is_lost or getattr(self, loses)
            if not is_lost:
                writer.write(data)
                await writer.drain()
        if not (is_lost or getattr(self, loses)):
            writer.write_eof()


@asynccontextmanager
async def one_way_proxy(target: str) -> AsyncIterator[OneWayProxy]:
    """A proxy in front of a server's HOST:PORT."""
    proxy = OneWayProxy(target)
    await proxy.start()
    try:
        yield proxy
    finally:
        await proxy.stop()
